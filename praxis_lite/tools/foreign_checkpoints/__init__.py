"""Jobs that begin with weights that another system has trained."""
