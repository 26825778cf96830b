"""Configs of experiments: fields by path, `--set`, and the files config.json and config.txt."""
