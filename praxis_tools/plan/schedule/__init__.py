"""Simulates a compiled program: when each instruction runs, and what it waits for."""
