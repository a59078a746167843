"""Rules of the service: named and stored; aliases may have standing ones.

They are one object of the store, which is changed in transactions: no rule is deleted that another
process has just given to an alias. Processes look for each other's changes once a second.
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from recsys.errors import RuleError
from recsys.requests import RecommendRequest
from recsys.rules import Rule, apply_rules
from recsys.serving.errors import ProblemError
from recsys.serving.models import Model, Models
from recsys.serving.schemas.common import CHAMPION, as_json
from recsys.serving.schemas.rules import RuleBody, RuleInfo, RuleList
from recsys.serving.shared_changes import Change, SharedState
from recsys.serving.stores.records import now_ms
from recsys.serving.stores.store import Store

logger = logging.getLogger("recsys.serving.rules")
NAME = "rules"  # written in stores
MOST_RULES = 1_000
MOST_CHARACTERS = 1 << 20  # of all rules as JSON; in memory, one takes about 28 bytes


@dataclass(frozen=True)
class StoredRule:
    """A rule, the JSON that it was put as, and its last change."""

    rule: Rule
    value: dict[str, Any]
    time_ms: int
    by: str | None

    @cached_property
    def size(self) -> int:
        """Its characters as JSON, with escapes."""
        return len(json.dumps(self.value))


@dataclass(frozen=True)
class State:
    """The rules by their names, and the names of the standing rules of aliases."""

    rules: Mapping[str, StoredRule] = field(default_factory=dict)
    aliases: Mapping[str, list[str]] = field(default_factory=dict)

    @cached_property
    def listed(self) -> bytes:
        """A `RuleList` as JSON, up to a megabyte: made once, for all who ask until a change."""
        return as_json(RuleList(rules=[_info(name, self) for name in sorted(self.rules)]))


class Rules(SharedState[State]):
    """The rules of all processes that share a store."""

    def __init__(self, store: Store, models: Models) -> None:
        """Without rules; `start` reads them."""
        super().__init__(store, NAME, logger)
        self._models, self._state = models, State()
        self.unchanged = self._changing  # while this lock is held, no rule changes

    # Readers

    def __len__(self) -> int:
        """Number of rules."""
        return len(self._state.rules)

    def all(self) -> bytes:
        """A `RuleList` as JSON, which may take long to make; on any thread."""
        return self._state.listed

    def standing(self, alias: str) -> list[str]:
        """Names of the rules that apply to all requests of an alias."""
        return self._state.aliases.get(alias, [])

    def of(self, alias: str, names: Sequence[str]) -> dict[str, Rule]:
        """The rules of a request by name: those of its alias, then those that it names.

        Raises:
            ProblemError: there is no rule of a name.
        """
        return self._named(self.standing(alias)) | self._named(names)

    def check(self, rules: Mapping[str, Rule], model: Model) -> None:
        """Check rules against the items of a model.

        Raises:
            ProblemError: a rule does not fit; the text names it.
        """
        for name, rule in rules.items():
            try:
                rule.check(model.recommender.epoch.filters.attributes)
            except RuleError as error:
                raise ProblemError.at(
                    "invalid_request",
                    f"the rule {name!r} does not fit the model {model.name!r}: {error}",
                ) from None

    # Changes

    async def put(self, name: str, body: RuleBody, by: str | None) -> RuleInfo:
        """Add or replace a rule; from the return on it applies to requests.

        Raises:
            RuleError: it is malformed, or does not fit the items of the champion, or of an alias
                that has it.
            QueueFullError: too many changes wait.
            StoreError: the rule may not be kept; repeat the call.
        """

        async def check() -> Change | None:
            value = await asyncio.to_thread(self._checked, name, body)
            stored = self._state.rules.get(name)
            if stored is not None and stored.value == value:
                return None
            rule = {"value": value, "time_ms": now_ms(), "by": by}
            return lambda state: state.setdefault("rules", {}).update({name: rule})

        async with self._changing.for_client():
            await self._change(check)
            return _info(name, self._state)

    async def delete(self, name: str) -> None:
        """Delete a rule.

        Raises:
            ProblemError: there is none of this name, or an alias has it.
            StoreError: as `put`.
        """

        async def check() -> Change:
            if name not in self._state.rules:
                detail = f"There is no rule {name!r}; /v1/rules lists them."
                raise ProblemError("unknown_rule", detail)
            if aliases := _aliases_of(name, self._state):
                raise ProblemError(
                    "rule_in_use",
                    f"The rule {name!r} is a standing rule of the alias {aliases[0]!r}; take it "
                    f"out of its 'rules' with PUT /v1/aliases/{aliases[0]} first.",
                )
            return lambda state: state["rules"].pop(name, None)

        async with self._changing.for_client():
            await self._change(check)

    async def require(self, names: Sequence[str]) -> None:
        """Refuse rules that no alias can have.

        Raises:
            ProblemError: no process has a rule of a name, or they are too large together.
        """
        async with self._changing.for_client():
            await self._catch_up()
        await asyncio.to_thread(self._together, names)

    async def stand(self, alias: str, names: Sequence[str]) -> None:
        """Set the rules that apply to all requests of an alias.

        Raises:
            ProblemError: there is no rule of a name, or it does not fit the alias's model.
            StoreError: as `put`.
        """
        value = [*dict.fromkeys(names)]

        async def check() -> Change | None:
            if value:
                rules = await asyncio.to_thread(self._together, value)
                await asyncio.to_thread(self.check, rules, self._models.get(alias))
            return None if self.standing(alias) == value else partial(_stand, alias, value)

        async with self._changing:  # `require` has counted its client
            await self._change(check)

    # Internals

    def _read(self, stored: dict[str, Any]) -> State:
        rules: dict[str, StoredRule] = {}
        for name, fields in stored.get("rules", {}).items():
            before = self._state.rules.get(name)
            if before is not None and before.value == fields["value"]:
                rules[name] = replace(before, **fields)
                continue
            try:
                rules[name] = StoredRule(Rule(**fields["value"]), **fields)
            except (RuleError, TypeError) as error:  # of another version of the service
                logger.error("rule %s of the store cannot be read: %s", name, error)
        standing = stored.get("aliases", {}).items()
        aliases = {alias: [name for name in names if name in rules] for alias, names in standing}
        return State(rules, aliases)

    def _named(self, names: Sequence[str]) -> dict[str, Rule]:
        """Rules by their names; `ProblemError` for the first that is none."""
        rules = self._state.rules
        for number, name in enumerate(names):
            if name not in rules:
                raise ProblemError.at(
                    "invalid_request",
                    f"rules[{number}]: there is no rule {name!r}; GET /v1/rules lists them",
                )
        return {name: rules[name].rule for name in names}

    def _together(self, names: Sequence[str]) -> dict[str, Rule]:
        """Rules that an alias may have; `ProblemError` if one is unknown, or all are too large."""
        rules = self._named(names)
        try:
            _check_together(rules.values())
        except RuleError as error:
            raise ProblemError.at("invalid_request", f"rules: {error}") from None
        return rules

    def _checked(self, name: str, body: RuleBody) -> dict[str, Any]:
        """The parts of a rule, checked against its models, and its pins against the champion."""
        value = body.model_dump(exclude_defaults=True)
        rule = Rule(**value)
        others = [other for at, other in self._state.rules.items() if at != name]
        before = self._state.rules.get(name)
        size, growth = sum(other.size for other in others), len(json.dumps(value))
        grows = before is None or growth > before.size
        if grows and (len(others) >= MOST_RULES or size + growth > MOST_CHARACTERS):
            raise RuleError(
                f"a service has at most {MOST_RULES:,} rules, with {MOST_CHARACTERS:,} characters "
                "together; delete one"
            )
        catalog = self._models.get(CHAMPION).recommender.catalog
        for number, row in enumerate(catalog.index(rule.pin).tolist()):
            if row < 0:
                raise RuleError(
                    f"pin[{number}]: item {rule.pin[number]!r} is not in the catalog; add it with "
                    "POST /v1/items, or correct the id"
                )
        aliases = _aliases_of(name, self._state)
        for alias in aliases:
            _check_together((self._named(self.standing(alias)) | {name: rule}).values())
        for alias in (CHAMPION, *aliases):
            if alias in self._models.aliases:  # it may be one of another process
                model = self._models.get(alias)
                rule.check(model.recommender.epoch.filters.attributes)
        return value


def _aliases_of(name: str, state: State) -> list[str]:
    """The aliases that have a standing rule."""
    return sorted(alias for alias, names in state.aliases.items() if name in names)


def _info(name: str, state: State) -> RuleInfo:
    """Describe a rule of a state."""
    rule, aliases = state.rules[name], _aliases_of(name, state)
    return RuleInfo(name=name, time_ms=rule.time_ms, by=rule.by, aliases=aliases, **rule.value)


def _stand(alias: str, names: list[str], state: dict[str, Any]) -> None:
    aliases = state.setdefault("aliases", {})
    aliases[alias] = names
    if not names:
        del aliases[alias]


def _check_together(rules: Iterable[Rule]) -> None:
    """Check that an alias may have these rules together; `RuleError` if they are too large."""
    try:
        apply_rules(RecommendRequest([]), rules)
    except ValueError as error:  # a FilterError, too
        raise RuleError(f"the standing rules of an alias together: {error}") from None
