"""Dictionaries in pickled `.npy` files, read without executing a pickle.

NumPy stores arrays of objects as pickles, and a pickle is a program that may call anything. Here
its instructions are only decoded (`pickletools.genops`) and interpreted by a machine that knows
numbers, lists, dicts and the one shape that NumPy gives an array. It imports nothing and calls
nothing; any other instruction is refused by name and place.
"""

from __future__ import annotations

import io
import pickletools
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from recsys.errors import DataError

MAX_BYTES = 1 << 30
RECONSTRUCT, NDARRAY, DTYPE = "_reconstruct", "ndarray", "dtype"
# What NumPy 1 and 2 call the three things that an array is made of.
GLOBALS = {
    "numpy.core.multiarray _reconstruct": RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": RECONSTRUCT,
    "numpy ndarray": NDARRAY,
    "numpy dtype": DTYPE,
}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "INT", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES",
    "SHORT_BINBYTES", "BINSTRING", "SHORT_BINSTRING",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}
_MARK = object()
MAX_INT_BYTES = 8
_SPOILT = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class _Name:
    """One of `GLOBALS`; nothing stands behind it."""

    name: str


@dataclass
class _Made:
    """An array or a type of one that is being put together."""

    name: str
    content: list[Any] = field(default_factory=list)


def read_pickled_dict(path: Path) -> dict[int, list[int]]:
    """The dict of lists of numbers that a `.npy` file holds as its single object.

    Raises:
        DataError: not such a file, or its pickle would do more than build one.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise DataError(f"{path}: larger than {MAX_BYTES >> 30} GiB; store it in another form")
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    stream = io.BytesIO(raw)
    try:
        version = np.lib.format.read_magic(stream)
        header = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, kind = header(stream)
    except ValueError as error:
        raise DataError(f"{path}: not a .npy file: {error}") from error
    if kind != np.dtype(object) or shape not in ((), (1,)):
        raise DataError(f"{path}: holds {kind} of shape {shape}, not one pickled dict")
    found = _interpret(raw[stream.tell() :], stream.tell(), path)
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds a {type(found).__name__}, not a dict")
    for key, values in found.items():
        if not _is_number(key) or not isinstance(values, list) or not all(map(_is_number, values)):
            raise DataError(f"{path}: entry {str(key)[:40]!r}: expected a number and its numbers")
    # A list can be named again and again; what was written once is shorter than the file.
    if sum(map(len, found.values())) > len(raw):
        raise DataError(f"{path}: lists are repeated; nothing that stores histories does that")
    return found


def _is_number(value: object) -> bool:
    return type(value) is int and abs(value) < 1 << 63


def _interpret(program: bytes, offset: int, path: Path) -> Any:
    """What the instructions build."""
    name, place = "start", 0
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # of escapes in damaged texts
            for opcode, argument, position in pickletools.genops(program):
                name, place = opcode.name, position or 0
                if name == "STOP":
                    return _array_content(stack.pop()) if len(stack) == 1 else _refuse()
                _step(name, argument, stack, memo)
    except (*_SPOILT, DeprecationWarning) as error:
        word = f": {error}" if str(error) else ""
        raise DataError(
            f"{path}: byte {offset + place}: the pickle's instruction {name} is not one that an "
            f"array of numbers needs, or stands in a wrong place{word}; the file is refused and "
            "nothing of it was run: take a text or json form of these data"
        ) from error
    raise DataError(f"{path}: the pickle ends before its STOP; the file is cut off")


def _step(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """One instruction; whatever is wrong raises one of the errors that `_interpret` explains."""
    if name in _LITERALS:
        if isinstance(argument, int) and abs(argument) >= 1 << (8 * MAX_INT_BYTES - 1):
            _refuse("a number of more than 64 bits")
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name == "EMPTY_LIST":
        stack.append([])
    elif name == "EMPTY_DICT":
        stack.append({})
    elif name in _TUPLES:
        size = _TUPLES[name]
        if len(stack) < size:
            _refuse()
        stack[len(stack) - size :] = [tuple(stack[len(stack) - size :])]
    elif name == "MARK":
        stack.append(_MARK)
    elif name in ("TUPLE", "LIST", "APPENDS", "SETITEMS"):
        values = _since_mark(stack)
        if name == "TUPLE":
            stack.append(tuple(values))
        elif name == "LIST":
            stack.append(values)
        elif name == "APPENDS":
            _list(stack[-1]).extend(values)
        else:
            _set(stack[-1], values)
    elif name == "APPEND":
        value = stack.pop()
        _list(stack[-1]).append(value)
    elif name == "SETITEM":
        value, key = stack.pop(), stack.pop()
        _set(stack[-1], [key, value])
    elif name in _PUT:
        memo[argument] = stack[-1]
    elif name == "MEMOIZE":
        memo[len(memo)] = stack[-1]
    elif name in _GET:
        stack.append(memo[argument])
    elif name == "GLOBAL":
        stack.append(_global(argument))
    elif name == "STACK_GLOBAL":
        attribute, module = stack.pop(), stack.pop()
        stack.append(_global(f"{module} {attribute}"))
    elif name == "REDUCE":
        arguments, called = stack.pop(), stack.pop()
        stack.append(_made(called, arguments))
    elif name == "BUILD":
        state = stack.pop()
        _build(stack[-1], state)
    elif name not in ("PROTO", "FRAME"):
        _refuse()


def _refuse(why: str = "") -> Any:
    raise ValueError(why)


def _since_mark(stack: list[Any]) -> list[Any]:
    place = len(stack) - 1
    while stack[place] is not _MARK:  # an index under the bottom wraps around once, then fails
        place -= 1
    if place < 0:
        _refuse("no mark before it")
    values = stack[place + 1 :]
    del stack[place:]
    return values


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else _refuse("it extends something that is no list")


def _set(target: Any, pairs: list[Any]) -> None:
    if not isinstance(target, dict) or len(pairs) % 2:
        _refuse("it fills something that is no dict")
    target.update(zip(pairs[::2], pairs[1::2], strict=True))


def _global(name: str) -> _Name:
    if name not in GLOBALS:
        _refuse(f"it asks for {str(name)[:80]!r}")
    return _Name(GLOBALS[name])


def _made(called: Any, arguments: Any) -> _Made:
    """The two calls that NumPy's arrays of objects consist of, as empty shells."""
    if called == _Name(RECONSTRUCT) and arguments == (_Name(NDARRAY), (0,), b"b"):
        return _Made(NDARRAY)
    if called == _Name(DTYPE) and arguments == ("O8", False, True):
        return _Made(DTYPE)
    raise ValueError("it calls something")


def _build(made: Any, state: Any) -> None:
    if not isinstance(made, _Made) or not isinstance(state, tuple):
        _refuse("it changes something")
    if made.name == NDARRAY:
        if len(state) != 5 or not isinstance(state[4], list) or len(state[4]) != 1:
            _refuse("an array of one object was expected")
        made.content = state[4]


def _array_content(value: Any) -> Any:
    if not isinstance(value, _Made) or value.name != NDARRAY or len(value.content) != 1:
        _refuse("an array of one object was expected")
    return value.content[0]
