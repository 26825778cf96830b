"""The fields of a Hugging Face config.json, and which of our settings each is."""
