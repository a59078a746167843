"""Batch scoring: a file of users in, their top-K out, with the service's own answers."""
