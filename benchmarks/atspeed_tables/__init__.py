"""The parts of `atspeed.py`: AtSpeed's experiments with this project's models and search.

`lineup` lists the drafts, `measure` measures them, `run` trains them and puts one document
together, `paper` has the published figures, and `report` shows both.
"""
