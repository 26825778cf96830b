"""Where do the numbers of a run go, and its clocks? JSON lines, the terminal, a PNG.

Never sees a model. matplotlib is loaded on first use, tensorflow never.
"""
