"""Batch scoring: the top-K of many users in a file, equal to the answers of the service."""
