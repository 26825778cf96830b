"""Numbers: registered experiments over the tasks."""
