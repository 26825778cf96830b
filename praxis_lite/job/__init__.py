"""What does the operating system see of a job? Its directory, its lock, its processes.

Never sees a model, its weights or its data.
"""
