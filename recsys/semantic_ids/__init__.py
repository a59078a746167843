"""Semantic IDs: item features -> residual codes -> unique tuples, with a health report.

Knows features, quantisers and codes; knows nothing of prompts, tries or models.
"""
