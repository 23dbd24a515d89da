"""Parallax: every form of parallelism for a plain LightningModule, in one line.

It is: the facade. Importing it registers the strategy names with Lightning::

    import parallax
    Trainer(strategy="parallax_4d")
    Trainer(strategy=parallax.ParallaxStrategy("tp2 pp2 zero1", num_microbatches=4))
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from parallax.plugins.context.functional import scaled_dot_product_attention
from parallax.plugins.expert.callbacks import ExpertBiasBalance, ExpertLoad
from parallax.plugins.launch import prepare_process
from parallax.strategies.layout import Layout
from parallax.strategies.mesh import Mesh
from parallax.strategies.other_lightning import explain_to_other_lightning
from parallax.strategies.sentinels import ReplicaDrift, ReplicaSentinel, TrafficLogger
from parallax.strategies.strategy import ParallaxStrategy

__version__ = "0.1.0"
__all__ = [
    "ExpertBiasBalance",
    "ExpertLoad",
    "Layout",
    "Mesh",
    "ParallaxStrategy",
    "ReplicaDrift",
    "ReplicaSentinel",
    "TrafficLogger",
    "register_strategies",
    "scaled_dot_product_attention",
]

STRATEGY_NAMES = ("parallax_4d", "parallax")


def register_strategies(**options: Any) -> None:
    """(Re)register the names with Lightning, with the given `ParallaxStrategy` arguments as their defaults.

    `register_strategies(layout=cfg.layout)` makes `Trainer(strategy="parallax_4d")` use that layout.
    """
    for name in STRATEGY_NAMES:
        StrategyRegistry.register(
            name, ParallaxStrategy, override=True, description="Parallax: tp, pp and ZeRO composed", **options
        )


register_strategies()
prepare_process(STRATEGY_NAMES)
explain_to_other_lightning(STRATEGY_NAMES)
