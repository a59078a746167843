"""ParserProcess: parsers in a process of their own, for grammars of untrusted clients.

llguidance limits its own work, but not all of it: schemas of 400 characters compiled for minutes,
or until the memory was full, which ends a process (`docs/constraints-text.md`). The other process
has a limit of processor time for each call, and of memory. If it exceeds one, it ends, the grammar
is refused, and the next one is compiled by a new process.
"""

from __future__ import annotations

import contextlib
import json
import select
import struct
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from recsys.text.grammar import Grammar
from recsys.text.grammar_constraint import TooCostlyError, explained, source_of
from recsys.text.token_trie import TextTokenizer

COMPILE_S, STEP_S = 1.0, 0.5
"""Processor time of compiling a grammar, and of a step."""
MEMORY = 96 << 20
"""Bytes beyond those of the tokenizer."""
PATIENCE_S, START_S = 20.0, 60.0
"""Longest waits for an answer and for the start, on a machine with other work."""
WORKER = Path(__file__).with_name("parser_worker.py")
_LENGTH = struct.Struct(">I")


class ParserProcess:
    """A process that follows one grammar at a time; threads may share it.

    It is started by the first call, and ends when this object does.
    """

    def __init__(self, tokenizer: TextTokenizer, limits: dict[str, Any]) -> None:
        """Use a tokenizer, and `LLParserLimits` by their names."""
        self._tokenizer, self._limits = tokenizer, limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._compiled = 0  # number of the grammar that the process follows
        self._ended: weakref.finalize[Any, ParserProcess] | None = None

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, V."""
        return self._tokenizer.vocabulary_size

    def compile(self, grammar: Grammar) -> RemoteParser:
        """A parser at the beginning of a text; parsers of the grammar before are of no use then.

        Raises:
            ValueError: the grammar is malformed, not supported, or takes too much to compile.
        """
        source = source_of(grammar, self._tokenizer)
        with self._lock:
            self._compiled += 1
            order = {"do": "compile", "source": source, "limits": self._limits}
            self._ask(order, COMPILE_S, grammar.field)
            return RemoteParser(self, self._compiled, 0, grammar.field)

    def ask(self, parser: RemoteParser, do: str, **more: Any) -> bytes:
        """Let the process do something with a parser.

        Raises:
            ValueError: the parser's error, or the call took too much.
        """
        with self._lock:
            if parser.number != self._compiled or self._process is None:
                raise ValueError(
                    f"{parser.field}: the process of this parser has ended, or follows another "
                    "grammar since"
                )
            return self._ask({"do": do, "of": parser.place, **more}, STEP_S, parser.field)

    def close(self) -> None:
        """End the process; the next call starts another one."""
        with self._lock:
            self._end()

    def _ask(self, order: dict[str, Any], seconds: float, field: str) -> bytes:
        process = self._process or self._start()
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        try:
            _send(process.stdin, order | {"seconds": seconds})
            answer = _receive(process.stdout, PATIENCE_S)
        except (OSError, EOFError):
            self._end()
            raise TooCostlyError(
                f"{field}: takes too much to follow (at most {COMPILE_S:g} s to compile, "
                f"{STEP_S:g} s a token, and {MEMORY >> 20} MB); write a smaller one"
            ) from None
        if answer[:1] == b"\1":
            raise ValueError(f"{field}: {explained(answer[1:].decode(errors='replace'))}")
        return answer[1:]

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # noqa: S603 - our own file
            [sys.executable, "-P", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._process = process
        self._ended = weakref.finalize(self, _finish, process)
        tokenizer = self._tokenizer
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        assert process.stdout is not None  # noqa: S101
        setup = {"tokenizer": tokenizer.source, "vocabulary": tokenizer.vocabulary_size}
        try:
            _send(process.stdin, setup | {"end": tokenizer.end_tokens[0], "bytes": MEMORY})
            _receive(process.stdout, START_S)
        except (OSError, EOFError):
            self._end()
            raise RuntimeError(f"{sys.executable} {WORKER} does not start") from None
        return process

    def _end(self) -> None:
        if self._ended is not None:
            self._ended()
        self._process = self._ended = None


class RemoteParser:
    """A position in a text, as `grammar_constraint.Parser`, in a `ParserProcess`."""

    def __init__(self, process: ParserProcess, number: int, place: int, field: str) -> None:
        """Use the parser at a place of the process's list, for its grammar of that number."""
        self._process, self._width = process, -(-process.vocabulary_size // 8)
        self.number, self.place, self.field = number, place, field

    def fork(self) -> RemoteParser:
        """Copy the parser at its position."""
        place = int(self._process.ask(self, "fork"))
        return RemoteParser(self._process, self.number, place, self.field)

    def bits(self) -> NDArray[np.uint8]:
        """(V / 8, rounded up) one bit per token that may follow, lowest first."""
        return np.frombuffer(self._process.ask(self, "bits"), np.uint8)[: self._width]

    def forced(self) -> bytes:
        """Bytes with which every text continues."""
        return self._process.ask(self, "forced")

    def forth(self, tokens: list[int]) -> None:
        """Move forward by tokens."""
        self._process.ask(self, "forth", tokens=tokens)

    def back(self, count: int) -> None:
        """Move back by a number of tokens."""
        self._process.ask(self, "back", count=count)


def _send(stream: IO[bytes], message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes], seconds: float) -> bytes:
    """An answer, for which at most `seconds` are waited.

    Raises:
        EOFError: the process has ended, or does not answer.
    """
    waiting = select.poll()  # `select` knows 1,024 files only, and a service has many connections
    waiting.register(stream, select.POLLIN)
    if not waiting.poll(1000 * seconds):
        raise EOFError
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    answer = stream.read(length)
    if len(answer) < length:
        raise EOFError
    return answer


def _finish(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            stream.close()  # type: ignore[union-attr]
