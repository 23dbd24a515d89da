"""What one entry of a plan has been resolved to.

It is: a record. It is not: how it was found (`plans.py`) or what is done with it (`plugin.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from parallax.plugins.tensor.styles import Style


@dataclass(frozen=True)
class Target:
    """A module (or a parameter, an integer attribute or an argument of it) and what is done to it.

    Attributes:
        fqn: of the module; where `part` is named, its own name follows.
        module: what the plan names, or the module that has it.
        style: what is done.
        part: the parameter, attribute or argument; empty for the module itself.
        copies: ranks that share each part of the cut dim (`heads.py`).
        place: FQN of the place it has in the model, where a wrapper holds it (`lora.py`); empty when that is `fqn`.
    """

    fqn: str
    module: nn.Module
    style: Style
    part: str = ""
    copies: int = 1
    place: str = ""

    @property
    def block(self) -> str:
        """FQN of the module around it: an attention or MLP, whose column layers share one entry."""
        return (self.place or self.fqn).rpartition(".")[0]

    @property
    def name(self) -> str:
        """Its name in that module."""
        return (self.place or self.fqn).rpartition(".")[2]
