"""Simulates when each instruction of a compiled program runs and which transfers it waits for."""
