"""A language model behind the HTTP API of OpenAI: `--mode=serve`.

An engine owns the devices and knows nothing of HTTP; the endpoints know nothing of devices. Never
sees how a model is trained.
"""
