"""Canonical data -> models: semantic IDs, target, draft, bundle."""

from __future__ import annotations

import os

# Threads that wait for each other sleep instead of spinning: on a machine that others use too, two
# spinning threads were ten times slower than one. Read when torch's OpenMP is loaded, hence here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
