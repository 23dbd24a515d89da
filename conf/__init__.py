"""The configuration files, shipped as package data: YAML only, no code."""
