"""Reads compiled steps: what each device stores, sends and computes, as text and as a page.

Never runs a step.
"""
