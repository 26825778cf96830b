"""Examples in files of any format, each found by its number, and all read once, by all cores.

What an example means is the pipelines' affair: of text `inputs.text`, of arrays the user's.
"""
