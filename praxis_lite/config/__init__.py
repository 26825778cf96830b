"""Configs of experiments: access to fields by path, `--set`, config.json and config.txt."""
