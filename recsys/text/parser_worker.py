"""The other side of `parser_process`: follows grammars, and may be ended at any time.

It is started by its path, with nothing but llguidance to import. The first message has the
tokenizer and the limits. Each further one is an order, and each answer begins with a byte: 0 for
bytes, 1 for the parser's error. Messages begin with their length in four bytes. An order that takes
more processor time than it may, or memory beyond the limit, ends the process.
"""

import contextlib
import json
import os
import signal
import struct
import sys
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

LENGTH = struct.Struct(">I")


def receive(stream: BinaryIO) -> Any:
    """The next message, or None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    return json.loads(stream.read(*LENGTH.unpack(head)))


def send(stream: BinaryIO, answer: bytes) -> None:
    """Send an answer."""
    stream.write(LENGTH.pack(len(answer)) + answer)
    stream.flush()


def limit_memory(more: int) -> None:
    """Allow this process as many bytes more than it has; beyond them, llguidance aborts.

    Elsewhere than on Linux, and where a sandbox forbids it, there is the limit of time alone.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as stream:  # noqa: PTH123 - pathlib is slow
            pages = int(stream.read().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + more
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def limit_time(seconds: float) -> None:
    """End this process after so many seconds of processor time; 0 ends the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # whose signal ends a process, also in Rust


def follow(order: dict[str, Any], tokenizer: LLTokenizer, matchers: list[Any]) -> bytes:
    """Carry out an order; ValueError has the parser's error."""
    do = order["do"]
    if do == "compile":
        matchers[:] = [
            LLMatcher(
                tokenizer, order["source"], log_level=0, limits=LLParserLimits(**order["limits"])
            )
        ]
        matcher, answer = matchers[0], b""
    else:
        matcher, answer = matchers[order["of"]], b""
        if do == "fork":
            matchers.append(matcher.deep_copy())
            return str(len(matchers) - 1).encode()
        if do == "bits":
            answer = matcher.compute_bitmask()
        elif do == "forced":
            answer = matcher.compute_ff_bytes()
        elif do == "forth":
            matcher.consume_tokens(order["tokens"])
        elif do == "back":
            matcher.rollback(order["count"])
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return answer


def main() -> None:
    """Answer orders until the other side ends."""
    orders, answers = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(AttributeError, OSError):
        os.nice(5)  # answers of others come first
    setup = receive(orders)
    if setup is None:
        return
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocabulary"], eos_token=setup["end"])
    limit_memory(setup["bytes"])
    send(answers, b"")
    matchers: list[Any] = []
    while (order := receive(orders)) is not None:
        limit_time(order["seconds"])
        try:
            answer = b"\0" + follow(order, tokenizer, matchers)
        except Exception as error:
            answer = b"\1" + str(error).encode(errors="replace")
        limit_time(0)
        send(answers, answer)


if __name__ == "__main__":
    main()
