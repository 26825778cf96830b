"""A user's text: which files, which documents are held out, where windows and prompts lie in them.

How text becomes ids is a tokenizer's affair, and what a model makes of them never known here.
"""
