"""tensorflow for input pipelines, imported on first use; examples are read without it."""
