"""Serves a language model through OpenAI's HTTP API (`--mode=serve`).

The engine runs the model and is independent of HTTP; the endpoints are independent of devices.
"""
