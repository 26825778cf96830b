"""Is a job that trains still right? For `run.certify_every_steps`: a certificate in flight.

Makes a step again on other devices and on another mesh, and compares; never changes a state.
"""
