"""`${parallax.layouts:${sweep}}` and `${parallax.digest:...}` in configuration files.

It is: their registration with OmegaConf. It is not: which layouts there are (`parallax.plugins.sweep.layouts`).
"""

from __future__ import annotations

import hashlib
from typing import Any

from omegaconf import OmegaConf


def layouts(sweep: Any) -> str:
    """The layouts of a `sweep` node, as a choice for Hydra: "tp2 dp4,tp4 dp2"."""
    from parallax.plugins.sweep.layouts import as_choice

    return as_choice(sweep)


def digest(value: Any) -> str:
    """Eight characters that stand for `value`."""
    plain = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return hashlib.sha256(repr(plain).encode()).hexdigest()[:8]


OmegaConf.register_new_resolver("parallax.layouts", layouts, replace=True)
OmegaConf.register_new_resolver("parallax.digest", digest, replace=True)
