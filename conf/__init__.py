"""Configuration: the schema, what reads and explains it, and the YAML files, shipped as package data.

It is: what one run of a script may say, and the models that such a configuration can build. It is not: training.
"""

from __future__ import annotations

from pathlib import Path

CONF_DIR = str(Path(__file__).resolve().parent)
"""The folder of the YAML files, for `hydra.main(config_path=CONF_DIR)`."""
