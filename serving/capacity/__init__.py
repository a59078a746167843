"""Capacity: what a replica costs, how many are needed, and what a fleet of them would answer.

`costs` holds what was measured, `simulation` plays a fleet with it, `plan` searches the smallest
fleet that is quick enough, `measure` and `check` run real replicas. Nothing here imports torch.
"""
