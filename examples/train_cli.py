"""The same run by LightningCLI: model, data and strategy from the command line or from one YAML file.

    mpirun -n 8 python examples/train_cli.py fit --config examples/train_cli.yaml
    python examples/train_cli.py fit --model.model.num_layers 2 --trainer.max_steps 5 --trainer.accelerator cpu \\
        --trainer.strategy parallax.ParallaxStrategy --trainer.strategy.layout "dp1"
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

import parallax  # noqa: F401 - tells Lightning about the strategies
from causal_lm import CausalLM
from text_data import TextData


def main(arguments: list[str] | None = None) -> LightningCLI:
    """Parse and run; `arguments` default to the command line's."""
    return LightningCLI(CausalLM, TextData, args=arguments, save_config_callback=None, seed_everything_default=1234)


if __name__ == "__main__":
    main()
