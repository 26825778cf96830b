"""How do images become features?

By convolutions and poolings in residual networks (`resnets`), by patches in transformers (`vits`).
Never sees text or a cache.
"""
