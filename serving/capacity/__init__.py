"""Capacity planning: what a replica costs, how many are needed, and how such a fleet answers.

`costs` holds measured times, `simulation` runs a fleet with them, `plan` searches the smallest
fleet that is fast enough, `measure` and `check` run real replicas. Nothing here imports torch.
"""
