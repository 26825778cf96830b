"""Computes the MFU and HFU of training steps from the traced and compiled step."""
