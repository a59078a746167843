"""`recsys benchmark atspeed`: AtSpeed's experiments with this project's models and search.

`lineup` says which drafts there are, `produce` makes them, `measure` and `speed` ask them, `run`
puts an experiment together as one document of plain rows, `paper` has the published figures, and
`report` shows rows beside them.
"""
