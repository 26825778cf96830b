"""Serves a language model through OpenAI's HTTP API (`praxis serve`).

The engine runs the model and does not depend on HTTP; the endpoints do not depend on devices.
"""
