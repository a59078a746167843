"""Canonical data -> models: semantic IDs, target, draft, bundle."""
