"""Files: opened without hanging, read without trust, and written whole or not at all.

Never sees what a file is about.
"""
