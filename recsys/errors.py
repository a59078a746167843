"""The exceptions that a caller may want to tell apart. Everything else is a ValueError."""

from __future__ import annotations

from collections.abc import Sequence


class RecsysError(Exception):
    """Base of the errors below; its text is meant to be shown to a person as it is."""


class ConfigError(RecsysError, ValueError):
    """A configuration names an unknown key, or a value of the wrong type or range."""


class DataError(RecsysError, ValueError):
    """An outside file is malformed; the text names the file, the line and the way out."""


class ArtifactError(RecsysError, ValueError):
    """A directory that should be an artifact is missing, incomplete or altered."""


class LockedError(RecsysError):
    """Another process uses what only one may use at a time; the text names what it is."""


def shown(value: object) -> str:
    """A value as errors show it, at most 60 characters long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


class FilterError(RecsysError, ValueError):
    """A filter over item attributes is malformed; the text names the clause and the way out."""


class RuleError(RecsysError, ValueError):
    """A business rule is malformed or does not fit the catalog; the text names the field."""


class ItemError(RecsysError, ValueError):
    """An item to add is malformed or cannot be placed; the text names item, field and way out."""


class RequestError(RecsysError, ValueError):
    """A request asks for what this bundle cannot do; the text names the field and the way out."""


class NonFiniteError(RecsysError, ArithmeticError):
    """The model gave logits that are not finite, so some requests of a batch have no answer.

    Attributes:
        requests: places of those requests in the batch; the other requests are not affected.
    """

    def __init__(self, requests: Sequence[int]) -> None:
        self.requests = tuple(requests)
        super().__init__(
            f"the model's logits are not finite for request {', '.join(map(str, self.requests))}: "
            "its weights hold a value that is not finite, or a sum overflowed; check the "
            "checkpoint, or load it in float32"
        )

    def __reduce__(self) -> tuple[type[NonFiniteError], tuple[tuple[int, ...]]]:
        return NonFiniteError, (self.requests,)  # pickle would give the text in their place
