"""Explains the memory, communication and flops of compiled steps, as text and as an HTML page.

Steps are only compiled, never run.
"""
