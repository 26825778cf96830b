"""How do jobs compare, and how are they getting on? Told as text, and drawn on a page.

Reads the files in their directories, while they train too, and never the weights.
"""
