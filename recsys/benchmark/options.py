"""Options that the benchmark commands share, and how their lists are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from recsys.errors import ConfigError

T = TypeVar("T", int, float)

Out = Annotated[
    Path | None, typer.Option(help="Folder for report.html, its plots and result.json.")
]
ServerSettings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Setting of the servers, serve.key=value. Repeatable."),
]


def words(option: str, text: str, allowed: Iterable[str] = ()) -> tuple[str, ...]:
    """Words of a list such as "a,b".

    Args:
        option: that the text was given for.
        text: the list.
        allowed: words that may be there; empty allows any.

    Raises:
        ConfigError: the list is empty, or a word is not allowed.
    """
    found, known = tuple(text.replace(",", " ").split()), tuple(allowed)
    if not found:
        raise ConfigError(f"{option} {text!r}: expected a list like {','.join(known) or '1,2,4'}")
    for word in found:
        if known and word not in known:
            raise ConfigError(f"{option} {word!r} is not one of {', '.join(known)}")
    return found


def numbers(option: str, text: str, kind: Callable[[str], T] = int) -> tuple[T, ...]:
    """Numbers of a list such as "1,2,4".

    Raises:
        ConfigError: the list is empty, or one of them is not a number above 0.
    """
    given = words(option, text)
    try:
        found = tuple(kind(word) for word in given)
    except ValueError:
        found = (kind("0"),)
    if min(found) <= 0:
        raise ConfigError(f"{option} {text!r}: expected numbers above 0, like 1,2,4")
    return found
