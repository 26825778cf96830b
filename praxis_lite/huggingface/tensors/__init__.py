"""Tensors of Hugging Face checkpoints: reads and writes safetensors files, converts layouts."""
