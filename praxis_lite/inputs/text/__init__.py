"""Text for language models: documents, their tokens, and the windows, rows and prompts of them."""
