"""The tree forward pass in C, for Llama-family decoders in float32 on a CPU.

`recsys.models.tree_forward.TreeModel.run` uses it where it can, and is its reference.
"""
