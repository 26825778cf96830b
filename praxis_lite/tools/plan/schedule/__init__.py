"""A compiled program in time: the order of its instructions, and how long each waits for others."""
