"""Computes the MFU and HFU of training from the traced and the compiled training step."""
