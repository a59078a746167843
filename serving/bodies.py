"""Strict and bounded parsing of JSON (RFC 8259), and validation of what was parsed.

Python's parser accepts numbers that JSON does not have, keeps the last of two equal names, and
follows any nesting. Such bodies are mistakes or attacks, so they are refused.

The work is linear in the body, and bounded: a body has at most `MAX_VALUES` values, which are
counted before it is parsed, an object at most `MAX_NAMES` names, and the lists of the schemas stop
at their first invalid entry (`FailFast`), so that few errors are built.
A body of more than `LARGE` bytes takes longer than the event loop may be blocked. Such bodies are
read on one thread, one after the other: several threads would only wait for Python's global lock.
"""

import asyncio
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

import numpy as np

T = TypeVar("T")
MAX_DEPTH = 64
MAX_NAMES = 256
MAX_VALUES = 50_000  # 5,000 events of ten fields, or 100 histories of 500 items
LARGE = 16 * 1024
_BEFORE_VALUES = (b",", b"[", b"{")
_CONTAINERS = {dict, list}
_reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bodies")


class MalformedError(ValueError):
    """The body is not valid JSON; the text gives the reason."""


def parse(body: bytes) -> Any:
    """Parse a JSON document.

    >>> parse(b'{"k": 5}')
    {'k': 5}

    Raises:
        MalformedError: not JSON, not UTF-8, a number out of range, half a surrogate pair, a name
            twice in an object, more than 256 names in it, more than 50,000 values, or nested deeper
            than 64.
    """
    if _count_values(body) > MAX_VALUES:
        raise MalformedError(f"it has more than {MAX_VALUES:,} values; send several smaller bodies")
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=_object,
            parse_float=_float,
            parse_constant=_refuse,
        )
    except MalformedError:
        raise
    except UnicodeDecodeError:
        raise MalformedError("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise MalformedError(f"at character {error.pos}: {error.msg}") from None
    except RecursionError:
        raise MalformedError(f"it is nested deeper than {MAX_DEPTH}") from None
    except ValueError:  # Python's limit of digits
        raise MalformedError("a number has too many digits") from None
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    if b"\\ud" in body or b"\\uD" in body:
        _check_text(value)
    return value


async def read(function: Callable[[bytes], T], body: bytes) -> T:
    """Call a function that parses a body, off the event loop if the body is large."""
    if len(body) <= LARGE:
        return function(body)
    return await asyncio.get_running_loop().run_in_executor(_reader, function, body)


def _count_values(body: bytes) -> int:
    """Number of values, or more: each but the first is the next after a comma or a bracket."""
    count = sum(map(body.count, _BEFORE_VALUES))
    if count > MAX_VALUES:  # some may be in texts
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
        characters = np.frombuffer(plain, np.uint8)
        quotes = np.cumsum(characters == ord('"'), dtype=np.uint8)  # only whether it is odd counts
        outside = characters[quotes % 2 == 0].tobytes()
        count = sum(map(outside.count, _BEFORE_VALUES))
    return count


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_NAMES:
        raise MalformedError(f"an object has more than {MAX_NAMES} names")
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise MalformedError(f"an object has the name {name[:60]!r} twice")
        values[name] = value
    return values


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise MalformedError(f"the number {text[:30]} is too large")
    return value


def _refuse(text: str) -> NoReturn:
    raise MalformedError(f"{text} is not a number in JSON")


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        groups = [part.values() if isinstance(part, dict) else part for part in level]
        # Most lists hold only texts or numbers: their entries are not looked at one by one.
        inner = [group for group in groups if not _CONTAINERS.isdisjoint(map(type, group))]
        level = [part for group in inner for part in group if isinstance(part, dict | list)]
        if not level:
            return
    raise MalformedError(f"it is nested deeper than {MAX_DEPTH}")


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise MalformedError("a text has half of a surrogate pair") from None
