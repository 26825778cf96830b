"""Chat templates of strangers, run: Jinja's sandbox, and how much a template may do in it."""
