"""Optimizers that optax does not have, or has with other numerics than Pax's."""
