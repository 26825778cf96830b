"""Files: read as lines or JSON, and written completely or not at all.

Never sees what a file is about.
"""
