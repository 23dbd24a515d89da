"""Proof that a layout is right: the user's own module, trained at the layout and by one process, compared."""

from parallax.strategies.verify.verify import Verdict, verify

__all__ = ["Verdict", "verify"]
