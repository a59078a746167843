"""Rules of the service: named and stored; aliases may have standing ones.

Each change is a record of the store's journal of rules. The rules of a process are what the records
amount to in their order, so that all processes with one store agree.
A record that cannot take effect at its place, such as the deletion of a rule that an alias was
given just before, has none in any process. Processes read each other's records once a second.
"""

import asyncio
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from recsys.errors import RuleError
from recsys.requests import RecommendRequest
from recsys.rules import Rule, apply_rules
from recsys.serving.errors import ProblemError
from recsys.serving.journal_follower import JournalFollower
from recsys.serving.models import Model, Models
from recsys.serving.schemas.common import CHAMPION
from recsys.serving.schemas.rules import RuleBody, RuleInfo, RuleList
from recsys.serving.stores.store import Store

logger = logging.getLogger("recsys.serving.rules")
JOURNAL = "rules"  # written in stores
MOST_RULES = 1_000
MOST_CHARACTERS = 2 << 20  # of all rules as JSON; in memory, one takes about 28 bytes
PAGE = 1 << 20  # characters of a page; a rule that has more is a page of its own


@dataclass(frozen=True)
class Kept:
    """A rule, the JSON that it was put as, and its last change."""

    rule: Rule
    value: dict[str, Any]
    time_ms: int
    by: str | None

    @cached_property
    def size(self) -> int:
        """Its characters as JSON, with escapes."""
        return len(json.dumps(self.value))


@dataclass
class State:
    """What the records of the journal amount to."""

    rules: dict[str, Kept] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)

    def apply(self, record: Mapping[str, Any]) -> bool:
        """Make a change; returns whether it had an effect."""
        op, name = record["op"], record["name"]
        value: Any = record.get("value")
        if op == "put":
            before = self.rules.get(name)
            if before is not None and before.value == value:
                return False
            try:
                rule = Rule(**value)
            except (RuleError, TypeError) as error:  # of another version of the service
                logger.error("rule %s of the store cannot be read: %s", name, error)
                return False
            self.rules[name] = Kept(rule, value, record["time_ms"], record["by"])
        elif op == "delete":
            if name not in self.rules or self.users(name):
                return False
            del self.rules[name]
        elif op == "alias":
            if self.aliases.get(name, []) == value or not self.rules.keys() >= set(value):
                return False
            self.aliases.pop(name, None)
            if value:
                self.aliases[name] = value
        else:  # of another version of the service
            return False
        return True

    def users(self, name: str) -> list[str]:
        """Aliases that have a rule."""
        return sorted(alias for alias, names in [*self.aliases.items()] if name in names)


class Rules(JournalFollower):
    """The rules of all processes that share a store."""

    def __init__(self, store: Store, models: Models) -> None:
        """Without rules; `start` reads them."""
        super().__init__(store, JOURNAL, logger)
        self._models, self._state = models, State()
        self.unchanged = self._changing  # while this lock is held, no rule changes

    # Readers

    def page(self, after: str, limit: int) -> RuleList:
        """A page of the rules whose names come after a name; it ends early if they are large.

        It takes long if the rules are large, and may be made on another thread.
        """
        names = sorted(name for name in [*self._state.rules] if name > after)
        rules: list[RuleInfo] = []
        size = 0
        for name in names[:limit]:
            info = self._info(name)
            size += len(str(info))
            if rules and size > PAGE:
                break
            rules.append(info)
        cursor = rules[-1].name if len(rules) < len(names) else None
        return RuleList(rules=rules, next=cursor)

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
        async with self._changing.for_client():
            await self._catch_up()
            value = await asyncio.to_thread(self._checked, name, body)
            stored = self._state.rules.get(name)
            if stored is None or stored.value != value:
                await self._write({"op": "put", "name": name, "value": value}, by)
            return self._info(name)

    async def delete(self, name: str, by: str | None) -> None:
        """Delete a rule.

        Raises:
            ProblemError: there is none of this name, or an alias has it.
            StoreError: as `put`.
        """
        async with self._changing.for_client():
            await self._catch_up()
            self._check_unused(name)
            if not await self._write({"op": "delete", "name": name}, by):
                self._check_unused(name)  # another process was faster

    async def require(self, names: Sequence[str]) -> None:
        """Refuse names that no process has a rule for.

        Raises:
            ProblemError: there is no rule of a name.
        """
        async with self._changing.for_client():
            await self._catch_up()
        self._named(names)

    async def stand(self, alias: str, names: Sequence[str], by: str | None) -> None:
        """Set the rules that apply to all requests of an alias.

        Raises:
            ProblemError: there is no rule of a name, or it does not fit the alias's model.
            StoreError: as `put`.
        """
        value = [*dict.fromkeys(names)]
        async with self._changing.for_client():
            await self._catch_up()
            if rules := self._named(value):
                await asyncio.to_thread(self.check, rules, self._models.get(alias))
                try:
                    await asyncio.to_thread(_check_together, rules.values())
                except RuleError as error:
                    raise ProblemError.at("invalid_request", f"rules: {error}") from None
            if self.standing(alias) == value:
                return
            if not await self._write({"op": "alias", "name": alias, "value": value}, by):
                self._named(value)  # another process was faster

    # Internals

    def _apply(self, record: Mapping[str, Any]) -> bool:
        return self._state.apply(record)

    def _clear(self) -> None:
        self._state = State()

    def _info(self, name: str) -> RuleInfo:
        """Describe a rule as it is now."""
        kept, aliases = self._find(name), self._state.users(name)
        return RuleInfo(name=name, time_ms=kept.time_ms, by=kept.by, aliases=aliases, **kept.value)

    def _find(self, name: str) -> Kept:
        try:
            return self._state.rules[name]
        except KeyError:
            raise ProblemError(
                "unknown_rule", f"There is no rule {name!r}; /v1/rules lists them."
            ) from None

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

    def _checked(self, name: str, body: RuleBody) -> dict[str, Any]:
        """The parts of a rule, checked against its models, and its pins against the champion."""
        value = body.model_dump(exclude_defaults=True)
        rule = Rule(**value)
        others = [kept for other, kept in self._state.rules.items() if other != name]
        before = self._state.rules.get(name)
        size, growth = sum(kept.size for kept in others), len(json.dumps(value))
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
        for alias in self._state.users(name):
            rules = {other: self._state.rules[other].rule for other in self.standing(alias)}
            _check_together((rules | {name: rule}).values())
        for alias in (CHAMPION, *self._state.users(name)):
            if alias in self._models.aliases:  # it may be one of another process
                model = self._models.get(alias)
                rule.check(model.recommender.epoch.filters.attributes)
        return value

    def _check_unused(self, name: str) -> None:
        self._find(name)
        if users := self._state.users(name):
            raise ProblemError(
                "rule_in_use",
                f"The rule {name!r} is a standing rule of the alias {users[0]!r}; take it out of "
                f"its 'rules' with PUT /v1/aliases/{users[0]} first.",
            )


def _check_together(rules: Iterable[Rule]) -> None:
    """Check that an alias may have these rules together; `RuleError` if they are too large."""
    try:
        apply_rules(RecommendRequest([]), rules)
    except ValueError as error:  # a FilterError, too
        raise RuleError(f"the standing rules of an alias together: {error}") from None
