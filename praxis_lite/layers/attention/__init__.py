"""Attention: weights (`heads`), layers (`attentions`, `latent`), `masks`, `kernels` and `kv_cache`.

Nothing here depends on transformer layers.
"""
