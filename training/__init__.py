"""Trains models on canonical data: semantic IDs, SASRec, target, draft, retrieval, bundle."""

from __future__ import annotations

import os

# Waiting threads sleep instead of spinning: on a shared machine, two spinning threads were ten
# times slower than one. OpenMP reads the variable when torch is loaded, so it is set here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if os.environ.get("ACCELERATE_USE_CPU") == "":
    del os.environ["ACCELERATE_USE_CPU"]  # accelerate refuses it, and it means not set
