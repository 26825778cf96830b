"""The files that globs name, and the text in them."""
