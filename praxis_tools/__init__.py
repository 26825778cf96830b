"""What looks at a run, predicts it, proves it, or brings weights from elsewhere.

Nothing below needs any of it.
"""
