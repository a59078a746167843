"""Explanations: reasons in words for recommended items, written by the service's text model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from recsys.live_catalog import EpochCatalog
from recsys.serving.models import Model
from recsys.serving.schemas.explanations import (
    ExplainedItem,
    ExplanationsRequest,
    ExplanationsResponse,
    QuotedItem,
)
from recsys.serving.text_model import TITLE, Stopped, TextModel

if TYPE_CHECKING:
    from recsys.text.explain import Explained, Explainer

EVENTS = 100  # of a history, the last ones, whose titles may be quoted
WORK = 50.0  # of one explanation: a hundred passes or so of a model that is larger than the target


async def explain(
    body: ExplanationsRequest,
    history: Sequence[str],
    model: Model,
    writer: TextModel,
    deadline: float,
) -> ExplanationsResponse:
    """Explain items of a model's catalog to one user.

    Args:
        body: the request.
        history: ids of the items that the user liked, oldest first.
        model: its catalog has the titles.
        writer: the text model.
        deadline: on the event loop's clock.

    Raises:
        UnsupportedError, QueueFullError, DeadlineExceededError, ClosedError: of the text model.
    """
    text_model = writer.name
    catalog = model.recommender.catalog
    asked = list(dict.fromkeys(body.items))
    titles = _titles(catalog, asked)
    shown = [name for name, title in titles.items() if title]
    # By what the text model reads of a title. Of several items with one title, the last counts.
    liked: dict[str, QuotedItem] = {}
    for name, title in _titles(catalog, history[-EVENTS:]).items():
        liked.pop(title[:TITLE], None)
        liked[title[:TITLE]] = QuotedItem.model_construct(item_id=name, title=title)
    liked.pop("", None)

    def write(explainer: "Explainer", stopped: Stopped) -> "list[Explained]":
        items = [titles[name][:TITLE] for name in shown]
        return explainer.explain(list(liked), items, stopped=stopped)

    found = await writer.write(write, WORK * len(shown), deadline)
    return ExplanationsResponse.model_construct(
        model=model.ref(body.model),
        text_model=text_model,
        explanations=[
            ExplainedItem.model_construct(
                item_id=name,
                title=titles[name],
                because=[liked[title] for title in one.explanation.because],
                reason=one.explanation.reason,
            )
            for name, one in zip(shown, found, strict=True)
        ],
        unknown_items=[name for name in asked if name not in titles],
        untitled_items=[name for name, title in titles.items() if not title],
    )


def _titles(catalog: EpochCatalog, names: Sequence[str]) -> dict[str, str]:
    """The titles of the items that the catalog has, each in the place of its last occurrence."""
    names = list(dict.fromkeys(reversed(names)))[::-1]
    rows = catalog.index(names).tolist()
    return {name: catalog.title(row) for name, row in zip(names, rows, strict=True) if row >= 0}
