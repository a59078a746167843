"""Text: titles, grammars and free text under beam search, for models that keep their own tokens.

The recommender does not need this package; `recsys explain` does.
"""

from __future__ import annotations

from recsys.text.beam import Texts, generate_text

__all__ = ["Texts", "generate_text"]
