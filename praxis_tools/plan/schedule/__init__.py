"""Simulates when each instruction in a compiled program runs and which transfers it waits for."""
