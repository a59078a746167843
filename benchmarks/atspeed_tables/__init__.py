"""The parts of `atspeed.py`: AtSpeed's experiments with this project's models and search.

`lineup` lists the drafts, `produce` trains them, `measure` and `speed` measure them, `run` puts one
document together, `paper` has the published figures, and `report` shows both.
"""
