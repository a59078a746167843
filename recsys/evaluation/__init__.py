"""Evaluation of any `Ranker`: metrics with intervals, baselines, one protocol, one report."""
