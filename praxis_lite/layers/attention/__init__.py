"""Attention: weights (`heads`), layers (`attentions`, `latent`), `masks`, `kernels` and `kv_cache`.

Nothing here knows a transformer block.
"""
