"""Packaged settings: one YAML file per purpose, found by name with `--config NAME`."""
