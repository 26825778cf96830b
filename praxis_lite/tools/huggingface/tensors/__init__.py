"""The tensors of a Hugging Face directory: read with their headers checked, and written."""
