"""Text pipelines: tokenized documents, and windows, packed rows and prompts made from them."""
