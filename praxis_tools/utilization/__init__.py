"""Computes MFU and HFU of training steps from the traced and the compiled step."""
