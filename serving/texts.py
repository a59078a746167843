"""Texts: titles of the catalog, quotations and JSON, written by the service's text model.

Prompts, source texts and schemas come from untrusted clients, so their grammars are compiled and
followed within the bounds of `recsys.text.untrusted`, in a process of their own.
"""

from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from recsys.live import Epoch
from recsys.serving.bodies import MalformedError, parse
from recsys.serving.models import Model, UnsupportedError
from recsys.serving.schemas.texts import (
    JsonFormat,
    SubstringFormat,
    TextsRequest,
    TextsResponse,
    TitleFormat,
    WrittenTitle,
)
from recsys.serving.text_model import TITLE, Stopped, TextModel

if TYPE_CHECKING:
    from recsys.text.explain import Explainer
    from recsys.text.grammar import Grammar
    from recsys.text.titles import TitleTrie
    from recsys.text.untrusted import UntrustedCompiler

PROMPT = 10.0  # units of work of the prompt, and of compiling a grammar
PASS = 0.5  # units of work of a token, as of those of an explanation
MOST_TITLES = 100_000  # of a catalog; a trie of them is built again after each change
_FIELDS = {"json_schema": "schema", "substring_of": "text"}  # by the names of grammars


class FormatError(ValueError):
    """The text model cannot write in the format; the message begins with its field."""


class Texts:
    """Writes texts in a format that the request names."""

    def __init__(self, writer: TextModel) -> None:
        """Use the text model of a service."""
        self._writer = writer
        self._compiler: UntrustedCompiler | None = None  # used on the text model's thread only
        self._titles: WeakKeyDictionary[Epoch, TitleTrie] = WeakKeyDictionary()  # of live epochs

    async def write(self, body: TextsRequest, model: Model, deadline: float) -> TextsResponse:
        """Answer one request.

        Args:
            body: the request.
            model: its catalog has the titles.
            deadline: on the event loop's clock.

        Raises:
            FormatError: the schema or the text is refused, or is more than the parser can follow.
            UnsupportedError, QueueFullError, DeadlineExceededError, ClosedError: of the text model.
        """
        answer = TextsResponse.model_construct(
            model=model.ref(body.model), text_model=self._writer.name
        )

        def write(explainer: "Explainer", stopped: Stopped) -> TextsResponse:
            if isinstance(body.format, TitleFormat):
                answer.titles = self._write_titles(body, model, explainer, stopped)
            else:
                _write_text(answer, body, explainer, self._compiler_for(explainer), stopped)
            return answer

        texts = body.format.limit if isinstance(body.format, TitleFormat) else 1
        work = PROMPT + PASS * body.max_tokens * texts
        return await self._writer.write(write, work, deadline)

    def close(self) -> None:
        """End the process that follows grammars; the text model is closed before."""
        if self._compiler is not None:
            self._compiler.close()

    def _compiler_for(self, explainer: "Explainer") -> "UntrustedCompiler":
        from recsys.text.untrusted import UntrustedCompiler

        if self._compiler is None:
            self._compiler = UntrustedCompiler(explainer.tokenizer)
        return self._compiler

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


def _grammar(form: "SubstringFormat | JsonFormat | TitleFormat") -> "Grammar":
    from recsys.text.grammar import substring_of
    from recsys.text.untrusted import untrusted_schema

    if isinstance(form, SubstringFormat):
        return substring_of(form.text, form.unit)
    assert isinstance(form, JsonFormat)  # noqa: S101 - titles have no grammar
    return untrusted_schema(form.schema_)


def _write_text(
    answer: TextsResponse,
    body: TextsRequest,
    explainer: "Explainer",
    compiler: "UntrustedCompiler",
    stopped: Stopped,
) -> None:
    """Write the text of a grammar, the most probable token at a time."""
    from recsys.text.sample import sample_text

    try:
        grammar = _grammar(body.format)
        (found,) = sample_text(
            explainer.model,
            [explainer.encode(body.prompt)],
            compiler.constraint(grammar),
            body.max_tokens,
            temperature=0.0,
            stopped=stopped,
        )
    except ValueError as error:
        field, _, said = str(error).partition(": ")
        if field not in _FIELDS:
            raise
        raise FormatError(f"format.{_FIELDS[field]}: {said}") from None
    answer.text = explainer.tokenizer.decode(found.tokens)
    if not found.finished:  # a character may be cut
        answer.text = answer.text.rstrip("\ufffd")
    answer.finished = found.finished
    answer.tokens, answer.forced_tokens = len(found.tokens), found.forced
    if isinstance(body.format, JsonFormat) and found.finished:
        with suppress(MalformedError):  # such as a number beyond floating point
            answer.value = parse(answer.text.encode())
