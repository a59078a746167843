"""The audit log: who changed what, when and from where.

The logger `recsys.serving.audit` writes a line for each request that would change the catalog,
aliases, rules or users, refused ones included; events are not audited. Ids of users and items are
hashed with the salt of the store, as those of erased users are, so that whoever has the store can
look for an id, and nobody else can. Changes of keys are reported by `recsys.serving.auth`.
"""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi.routing import APIRoute
from starlette.types import Scope

from recsys.serving.auth import is_audited
from recsys.serving.stores.records import user_hash

logger = logging.getLogger("recsys.serving.audit")
HASH_DIGITS = 32
MAX_NAME = 100


def note(scope: Scope, **fields: Any) -> None:
    """Add what a request changes to its line; ids are `item_ids`."""
    scope["state"].setdefault("audit", {}).update(fields)


def record(scope: Scope, status: int) -> None:
    """Write the line of a request, if its route is audited."""
    state = scope["state"]
    route: APIRoute | None = state["route"]
    if route is None or not is_audited(route.endpoint, scope["method"]):
        return
    given: dict[str, Any] = dict(route.matches(scope)[1].get("path_params", {}))
    given |= state.get("audit", {})
    client = scope.get("client")
    fields = {
        "action": f"{scope['method']} {route.path_format}",
        "key": state.get("key"),
        "client": client[0] if client else None,
        "request_id": state["request_id"],
        "status": status,
    }
    logger.info("change", extra={"fields": fields | _hidden(given, _salt(scope))})


def _salt(scope: Scope) -> bytes | None:
    """The salt of the store; None before it is open."""
    try:
        salt: bytes = scope["app"].state.service.store.salt
    except Exception:  # not ready, or refused before an application was reached
        return None
    return salt


def _hidden(given: Mapping[str, Any], salt: bytes | None) -> dict[str, Any]:
    """The fields with hashes of ids; without a salt, ids are left out."""
    hidden: dict[str, Any] = {}
    for name, value in given.items():
        if not name.endswith(("_id", "_ids")):
            hidden[name] = value[:MAX_NAME] if isinstance(value, str) else value
        elif salt is not None:
            ids = [value] if isinstance(value, str) else value
            hashes = [user_hash(one, salt)[:HASH_DIGITS] for one in ids]
            hidden[name] = hashes[0] if isinstance(value, str) else hashes
    return hidden
