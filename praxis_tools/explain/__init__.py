"""Explains compiled steps: what each device stores, sends and computes, as text and as a page.

Steps are only compiled, never run.
"""
