"""Experiment configs: access to fields by path, `--set`, config.json and config.txt."""
