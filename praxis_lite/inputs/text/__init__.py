"""Text: which documents there are and which are held out, where windows, rows and prompts lie.

How text becomes ids is a tokenizer's affair, and what a model makes of them never known here.
"""
