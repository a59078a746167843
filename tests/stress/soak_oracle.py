"""The oracle of `soak.py`: the answers of the library alone, in every state that was current."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from recsys.live import Epoch
from recsys.recommender import Recommender
from recsys.requests import RecommendResult
from recsys.serving.catalog_changes import _apply
from recsys.serving.schemas.common import MAX_HISTORY, ModelRef
from recsys.serving.schemas.recommendations import RecommendationsRequest
from recsys.serving.service import Answered, Asked, response
from recsys.serving.stores.records import TypedHistory

TOGETHER = 32  # answers that are computed at once
COMPARED = ("items", "certificate", "history_items", "unknown_items", "eligible_items")


class Alone(Recommender):
    """A recommender that answers over an earlier epoch, if one is set."""

    pinned: Epoch | None = None

    @property
    def epoch(self) -> Epoch:
        """The epoch of the next answer."""
        return self.pinned or super().epoch


@dataclass
class State:
    """What the service may answer from between two times."""

    bundle: str
    recommender: Alone
    epoch: Epoch
    last: float = float("inf")


class Oracle:
    """Answers with the library alone, in every state that was current during a request."""

    def __init__(self, bundles: Path, bundle: str) -> None:
        self.bundles = bundles
        self.records: dict[str, dict[str, Any]] = {}  # the journal
        self.states: list[State] = []
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._put(bundle, 0.0)

    def change(self, what: str, value: Any, done: float) -> None:
        """A change of the alias or of items was acknowledged at this time."""
        if what == "swap":
            self._put(value, done)
            return
        now = self.states[-1]
        now.recommender.pinned = None
        placed = {}
        for record in value:
            placed[record["item_id"]] = record.get("semantic_id")
            self.records.pop(record["item_id"], None)
            self.records[record["item_id"]] = {**record, "version": _model(now).version}
        # Their codes are computed here, too, so these records are of no version.
        _apply(_model(now), [{**record, "version": ""} for record in value])
        catalog = now.recommender.catalog
        for name, codes in placed.items():
            own = catalog.codes[catalog.find(name)].tolist() if codes else None
            if own != codes:
                self._note(f"{name} was placed at {codes} and not at {own}")
        self._add(now.bundle, now.recommender, done)

    def check(self, many: list[tuple[dict[str, Any], list[list[str]], Any, float]]) -> None:
        """Compare answers: the body, histories, answer and time of sending of each.

        They are computed together, from the latest state and history. Where that is not the answer,
        each other state and history of the time between the request and its answer is tried.
        """
        self.counts["answers"] += len(many)
        likely: dict[int, list[Any]] = {}
        for message in many:
            _, _, answer, sent = message
            states = [
                s for s in self.states if s.last >= sent and s.bundle == answer["model"]["name"]
            ]
            if states:
                likely.setdefault(id(states[-1]), []).append((states, message))
            else:
                self._note(f"the bundle of {answer} was not current")
        for group in likely.values():
            wires = [(RecommendationsRequest.model_validate(body), all_of[-1])
                     for _, (body, all_of, _, _) in group]  # fmt: skip
            expected = self._answers(group[0][0][-1], wires)
            for (states, (body, histories, answer, _)), (wire, _), likeliest in zip(
                group, wires, expected, strict=True
            ):
                others = (
                    self._answers(state, [(wire, history)])[0]
                    for state in reversed(states)
                    for history in histories
                )
                if not any(same(other, answer) for other in itertools.chain([likeliest], others)):
                    differs = [name for name in COMPARED if likeliest[name] != answer[name]]
                    shown = {name: (answer[name], likeliest[name]) for name in differs}
                    self._note(f"{json.dumps(body)} ({answer['model']}): {shown}")

    def _answers(self, state: State, wires: list[tuple[Any, list[str]]]) -> list[Any]:
        state.recommender.pinned = state.epoch
        requests = []
        for wire, history in wires:
            types = [] if wire.history is not None else ["view"] * len(history)
            latest = TypedHistory(history, types).latest(MAX_HISTORY)
            requests.append(wire.request(latest, state.recommender))
        results: list[RecommendResult] = state.recommender.recommend_batch(requests)
        model: Any = SimpleNamespace(ref=lambda alias, number: ModelRef.model_construct())
        answers = []
        for (wire, _), request, result in zip(wires, requests, results, strict=True):
            asked = Asked(wire, wire.model, model, request, (), None, 0.0, 0.0, 0.0)
            answer = json.loads(response(asked, Answered(result), None, {})[1])
            answers.append({name: answer[name] for name in COMPARED})
        return answers

    def _put(self, bundle: str, done: float) -> None:
        recommender = Alone.load(self.bundles / bundle)
        state = State(bundle, recommender, recommender.epoch)
        assert isinstance(recommender, Alone)
        _apply(_model(state), list(self.records.values()))  # type: ignore[arg-type]
        self._add(bundle, recommender, done)

    def _add(self, bundle: str, recommender: Alone, done: float) -> None:
        recommender.pinned = None
        if self.states:
            self.states[-1].last = done
        self.states.append(State(bundle, recommender, recommender.epoch))
        self.states = [state for state in self.states if state.last > done - 60]

    def _note(self, text: str) -> None:
        self.counts["wrong"] += 1
        if len(self.wrong) < 10:
            self.wrong.append(text[:3000])


def same(expected: Any, answer: Any) -> bool:
    """Whether an answer is the expected one, bit for bit."""
    return all(expected[name] == answer[name] for name in COMPARED)


def _model(state: State) -> Any:
    """What `_apply` needs of a model."""
    recommender = state.recommender
    version = recommender.manifest.digest
    return SimpleNamespace(name=state.bundle, version=version, recommender=recommender)


def replay(bundles: Path, bundle: str, journal: Path) -> Oracle:
    """Check a journal: pickled changes and answers, in the order of their arrival."""
    oracle, waiting = Oracle(bundles, bundle), []
    for kind, *message in _read(journal):
        if kind == "answer":
            waiting.append(message)
        if kind == "change" or len(waiting) == TOGETHER:
            oracle.check(waiting)
            waiting = []
        if kind == "change":
            oracle.change(*message)
    oracle.check(waiting)
    return oracle


def _read(journal: Path) -> Iterator[Any]:
    with journal.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return
