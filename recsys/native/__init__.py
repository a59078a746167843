"""C for a CPU: the tree forward pass of Llama-family decoders in float32, searches, blended lists.

Each has its reference in Python: `recsys.models.tree_forward.TreeModel.run`, `recsys.decoding.beam`
and `recsys.retrieval`.
"""
