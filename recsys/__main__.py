"""`python -m recsys` is the command `recsys`."""

from __future__ import annotations

from recsys.cli import main

main()
