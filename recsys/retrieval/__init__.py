"""Neighbours without the language model: candidates and baselines from co-occurrence. No torch."""

from recsys.retrieval.item_item import ItemItem as ItemItem

__all__ = ["ItemItem"]
