"""Attention: weights (`heads`), layers (`attentions`, `latent`), `masks`, `kernels` and `cache`.

Nothing here knows a transformer block.
"""
