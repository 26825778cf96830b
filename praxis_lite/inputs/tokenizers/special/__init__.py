"""Which tokens are special, and which end a text: from every file that may say it."""
