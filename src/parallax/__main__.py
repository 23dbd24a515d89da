"""`python -m parallax`: see `cli.py`."""

from __future__ import annotations

import sys

from parallax.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
