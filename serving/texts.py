"""Texts: titles of the catalog, quotations and named formats, written by the service's text model.

The operator names formats in the settings; no grammar comes from a client. A source text does: its
parts are compiled in time and memory that grow with its length (`MAX_SOURCE`).
"""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from recsys.errors import ConfigError
from recsys.live import Epoch
from recsys.serving.bodies import MalformedError, parse
from recsys.serving.models import Model, UnsupportedError
from recsys.serving.schemas.texts import (
    SubstringFormat,
    TextsRequest,
    TextsResponse,
    TitleFormat,
    WrittenTitle,
)
from recsys.serving.settings import TextFormat
from recsys.serving.text_model import TITLE, Stopped, TextModel

if TYPE_CHECKING:
    from recsys.text.explain import Explainer
    from recsys.text.grammar_constraint import GrammarCompiler, GrammarConstraint
    from recsys.text.titles import TitleTrie

PROMPT = 10.0  # units of work of the prompt, and of compiling a source text
PASS = 0.5  # units of work of a token
MOST_TITLES = 100_000  # of a catalog; a trie of them is built again after each change
LONGEST_NAME = 64  # characters of an unknown name that an error repeats
MOST_MASKS = 32 << 20  # bytes of the states and masks that a format keeps between requests


class FormatError(ValueError):
    """The text model cannot write in the format; the message begins with its field."""


class NamedFormat:
    """A format that the operator named: compiled once, and kept with its masks."""

    def __init__(self, name: str, definition: TextFormat, explainer: "Explainer") -> None:
        """Compile it.

        Raises:
            ConfigError: the definition is malformed, matches no text, or is too large.
        """
        from recsys.text import GrammarCompiler, grammar

        (kind,) = definition.model_fields_set
        self.is_json = kind == "json_schema"
        self._compiler = GrammarCompiler(explainer.tokenizer, capacity=1)
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
        """
        constraint = self._constraint or self._compiler.constraint(self._grammar)
        self._constraint = None
        yield constraint
        if constraint.nbytes <= MOST_MASKS:
            self._constraint = constraint


class Texts:
    """Writes texts in a format that the request names."""

    def __init__(self, writer: TextModel, formats: Mapping[str, TextFormat]) -> None:
        """Use the text model of a service, and the formats of its settings."""
        self._writer, self._definitions = writer, formats
        self._formats: dict[str, NamedFormat] = {}  # used on the text model's thread only
        self._parts: GrammarCompiler | None = None  # of the last source text
        self._titles: WeakKeyDictionary[Epoch, TitleTrie] = WeakKeyDictionary()  # of live epochs

    async def start(self) -> None:
        """Load the text model, if there is one, and compile the formats.

        Raises:
            ArtifactError, ConfigError: the model cannot be loaded, or a format not be compiled.
        """
        explainer = await self._writer.start()
        if explainer is not None:
            for name, definition in self._definitions.items():
                self._formats[name] = await asyncio.to_thread(
                    NamedFormat, name, definition, explainer
                )

    async def write(self, body: TextsRequest, model: Model, deadline: float) -> TextsResponse:
        """Answer one request.

        Args:
            body: the request.
            model: its catalog has the titles.
            deadline: on the event loop's clock.

        Raises:
            FormatError: there is no format of this name, or the source text cannot be followed.
            UnsupportedError, QueueFullError, DeadlineExceededError, ClosedError: of the text model.
        """
        answer = TextsResponse.model_construct(
            model=model.ref(body.model), text_model=self._writer.name
        )

        def write(explainer: "Explainer", stopped: Stopped) -> TextsResponse:
            if isinstance(body.format, TitleFormat):
                answer.titles = self._write_titles(body, model, explainer, stopped)
            else:
                self._write_text(answer, body, explainer, stopped)
            return answer

        if isinstance(body.format, str) and body.format not in self._formats:
            raise FormatError(f"format: {self._unknown(body.format)}")
        texts = body.format.limit if isinstance(body.format, TitleFormat) else 1
        work = PROMPT + PASS * body.max_tokens * texts
        return await self._writer.write(write, work, deadline)

    def _unknown(self, name: str) -> str:
        names = ", ".join(map(repr, self._formats)) or "none; serve.text_formats defines them"
        return f"there is no format {name[:LONGEST_NAME]!r}; this service offers {names}"

    @contextmanager
    def _following(
        self, form: str | SubstringFormat, explainer: "Explainer"
    ) -> "Iterator[GrammarConstraint]":
        """The constraint of a format for one search.

        Raises:
            UnsupportedError, FormatError: the parser cannot follow the named format, or the text.
        """
        from recsys.text import GrammarCompiler, substring_of

        try:
            if isinstance(form, str):
                with self._formats[form].constraint() as constraint:
                    yield constraint
            else:
                self._parts = self._parts or GrammarCompiler(explainer.tokenizer, capacity=1)
                yield self._parts.constraint(substring_of(form.text, form.unit))
        except ValueError as error:
            field, _, said = str(error).partition(": ")
            if field == "substring_of":
                raise FormatError(f"format.text: {said}") from error
            if isinstance(form, str) and field in TextFormat.model_fields:
                raise UnsupportedError(f"The format {form!r} cannot be followed: {said}") from error
            raise

    def _write_text(
        self, answer: TextsResponse, body: TextsRequest, explainer: "Explainer", stopped: Stopped
    ) -> None:
        """Write the text of a grammar, the most probable token at a time."""
        from recsys.text.sample import sample_text

        assert not isinstance(body.format, TitleFormat)  # noqa: S101 - the caller has checked
        with self._following(body.format, explainer) as constraint:
            (written,) = sample_text(
                explainer.model,
                [explainer.encode(body.prompt)],
                constraint,
                body.max_tokens,
                temperature=0.0,
                stopped=stopped,
            )
        answer.text = explainer.tokenizer.decode(written.tokens)
        if not written.finished:  # a character may be cut
            answer.text = answer.text.rstrip("\ufffd")
        answer.finished = written.finished
        answer.tokens, answer.forced_tokens = len(written.tokens), written.forced
        is_json = isinstance(body.format, str) and self._formats[body.format].is_json
        if is_json and written.finished:
            with suppress(MalformedError):  # such as a number beyond floating point
                answer.value = parse(answer.text.encode())

    def _write_titles(
        self, body: TextsRequest, model: Model, explainer: "Explainer", stopped: Stopped
    ) -> list[WrittenTitle]:
        """The best titles of the catalog as it is now."""
        from recsys.text.titles import generate_titles

        assert isinstance(body.format, TitleFormat)  # noqa: S101 - the caller has checked
        epoch = model.recommender.epoch
        titles = self._title_trie(epoch, explainer)
        if titles is None:
            return []
        found = generate_titles(
            explainer.model,
            [explainer.encode(body.prompt)],
            titles.without_masks(),
            body.format.limit,
            body.max_tokens,
            stopped=stopped,
        )
        scores, catalog = found.texts.scores[0].tolist(), epoch.catalog
        return [
            WrittenTitle.model_construct(
                title=catalog.title(int(items[0])),
                score=score,
                item_ids=[catalog.item_id(item) for item in items.tolist()],
            )
            for score, items in zip(scores, found.items[0], strict=False)
        ]

    def _title_trie(self, epoch: Epoch, explainer: "Explainer") -> "TitleTrie | None":
        """The titles of the items that can be recommended; None if there is none.

        An item with a title of more than `TITLE` characters is left out.
        """
        from recsys.text.titles import TitleTrie

        if epoch in self._titles:
            return self._titles[epoch]
        if epoch.num_items > MOST_TITLES:
            raise UnsupportedError(
                f"Titles are written of at most {MOST_TITLES:,} items; the catalog has "
                f"{epoch.num_items:,}."
            )
        given = zip(epoch.catalog.titles, epoch.alive.tolist(), strict=True)
        titles = [title if alive and len(title) <= TITLE else "" for title, alive in given]
        if not any(titles):
            return None
        return self._titles.setdefault(epoch, TitleTrie.build(titles, explainer.tokenizer.tokens))
