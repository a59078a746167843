"""Texts in formats that the operator named, written by the service's text model.

The text model is one folder for the whole process, beside the models that recommend. It has a
thread of its own, so that its passes delay recommendations no more than the cores must be shared.
One request is answered at a time. A request whose client has left, or whose deadline has passed,
stops before its next token. No grammar comes from a client.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from recsys.devices import AUTO, CPU
from recsys.errors import ConfigError, RequestError
from recsys.serving.batcher import ClosedError
from recsys.serving.bodies import MalformedError, parse
from recsys.serving.errors import ProblemError
from recsys.serving.limits import CALLER
from recsys.serving.off_loop import OffLoop
from recsys.serving.schemas.texts import MAX_PROMPT, TextsRequest, TextsResponse
from recsys.serving.settings import ServingSettings, TextFormat

if TYPE_CHECKING:
    from recsys.text.grammar_constraint import GrammarConstraint
    from recsys.text.text_model import TextModel

PROMPT = 10.0  # units of work of the prompt
PASS = 0.5  # units of work of a token
LONGEST_NAME = 64  # characters of an unknown name that an error repeats
MOST_MASKS = 32 << 20  # bytes of the states and masks that a format keeps between requests


class NamedFormat:
    """A format that the operator named: compiled once, and kept with its masks."""

    def __init__(self, name: str, definition: TextFormat, model: "TextModel") -> None:
        """Compile it.

        Raises:
            ConfigError: the definition is malformed, matches no text, or is too large.
        """
        from recsys.text import GrammarCompiler, grammar

        (kind,) = definition.model_fields_set
        self.name, self.is_json = name, kind == "json_schema"
        self._compiler = GrammarCompiler(model.tokenizer, capacity=1)
        self._constraint: GrammarConstraint | None = None
        try:
            self._grammar = getattr(grammar, kind)(getattr(definition, kind))
            self._constraint = self._compiler.constraint(self._grammar)
        except ValueError as error:  # its text begins with the kind
            raise ConfigError(f"serve.text_formats.{name}.{error}") from error

    @contextmanager
    def constraint(self) -> "Iterator[GrammarConstraint]":
        """The constraint for one search, with the masks of the searches before.

        It is not used again after an error, nor with more than `MOST_MASKS`.

        Raises:
            ProblemError: the parser cannot follow the format in the block.
        """
        try:
            constraint = self._constraint or self._compiler.constraint(self._grammar)
            self._constraint = None
            yield constraint
            if constraint.nbytes <= MOST_MASKS:
                self._constraint = constraint
        except ValueError as error:
            field, _, reason = str(error).partition(": ")
            if field not in TextFormat.model_fields:
                raise
            raise ProblemError(
                "unsupported_by_model", f"The format {self.name!r} cannot be followed: {reason}"
            ) from error


class Texts:
    """The text model that the settings name, its thread, the queue for it, and its formats."""

    def __init__(self, settings: ServingSettings) -> None:
        """Take model and formats from the settings; `start` loads and compiles them."""
        self._folder, self._definitions = settings.explainer, settings.text_formats
        self._device = CPU if settings.device == AUTO else settings.device
        self._formats: dict[str, NamedFormat] = {}
        self._model: TextModel | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="texts")
        self._calls = OffLoop(settings, self._thread.submit)
        self._closing = False

    async def start(self) -> None:
        """Load the text model, if there is one, and compile the formats.

        Raises:
            ArtifactError, ConfigError: the model cannot be loaded, or a format not be compiled.
        """
        if self._folder is None:
            return
        from recsys.text.text_model import TextModel  # only where it is used

        loop = asyncio.get_running_loop()
        self._model = await loop.run_in_executor(
            self._thread, TextModel.load, self._folder, self._device
        )
        for name, definition in self._definitions.items():
            self._formats[name] = await asyncio.to_thread(
                NamedFormat, name, definition, self._model
            )

    async def close(self) -> None:
        """Refuse new requests, answer the waiting ones, and end the thread."""
        self._closing = True
        await asyncio.to_thread(self._thread.shutdown)

    async def write(self, body: TextsRequest, deadline: float) -> TextsResponse:
        """Answer one request, when it is its turn. `deadline` is on the event loop's clock.

        Raises:
            ProblemError: there is no format of this name or no text model, or the request is more
                than it can read.
            QueueFullError, DeadlineExceededError, ClosedError: as of other requests.
        """
        if self._model is None or self._folder is None:
            raise ProblemError(
                "unsupported_by_model",
                "This service has no text model, which writes texts; the setting serve.explainer "
                "names the folder of one.",
            )
        if self._closing:
            raise ClosedError
        if body.format not in self._formats:
            names = ", ".join(map(repr, self._formats)) or "none; serve.text_formats defines them"
            raise ProblemError.at(
                "invalid_request",
                f"format: there is no format {body.format[:LONGEST_NAME]!r}; this service offers "
                f"{names}",
            )
        CALLER.get().charge(PROMPT + PASS * body.max_tokens - 1)
        stop = threading.Event()
        try:
            return await self._calls(self._write, body, self._model, stop.is_set, deadline=deadline)
        except RequestError as error:
            raise ProblemError(
                "unsupported_by_model", f"{self._folder.name} cannot write this: {error}"
            ) from error
        finally:
            stop.set()

    def _write(
        self, body: TextsRequest, model: "TextModel", stopped: Callable[[], bool]
    ) -> TextsResponse:
        """Write a text, the most probable token at a time."""
        from recsys.text.sample import sample_text

        named, prompt = self._formats[body.format], model.encode(body.prompt)
        if len(prompt) > MAX_PROMPT:
            raise RequestError(
                f"the prompt has {len(prompt):,} tokens; the limit is {MAX_PROMPT:,}"
            )
        with named.constraint() as constraint:
            (written,) = sample_text(
                model.model,
                [prompt],
                constraint,
                body.max_tokens,
                temperature=0.0,
                stopped=stopped,
            )
        text = model.tokenizer.decode(written.tokens)
        answer = TextsResponse.model_construct(
            text=text if written.finished else text.rstrip("\ufffd"),  # a character may be cut
            finished=written.finished,
            tokens=len(written.tokens),
            forced_tokens=written.forced,
        )
        if named.is_json and written.finished:
            with suppress(MalformedError):  # such as a number beyond floating point
                answer.value = parse(text.encode())
        return answer
