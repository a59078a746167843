"""Semantic IDs: item features -> residual codes -> unique tuples of codes, with a report."""
