"""The tensors of a Hugging Face directory: how our weights lie in them; their files."""
