"""Tenants: sets of users in one store, each with ids of its own.

A tenant's user `A1` is stored as `TENANT:A1`, its event `e1` as `TENANT:e1`, and so are ids of
answers: feedback is linked to answers of the same tenant. The name of a tenant has no colon, so no
id of one tenant can be written as one of another. Inside a request of a tenant, a store takes and
returns the tenant's own ids (`TENANT` is set). Otherwise ids are as stored.
"""

import re
from contextvars import ContextVar

MAX_ID = 256
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TENANT: ContextVar[str | None] = ContextVar("tenant", default=None)


class LongIdError(ValueError):
    """An id is too long with the name of the tenant before it."""


def inside(own: str, tenant: str | None) -> str:
    """The stored form of a tenant's id; without a tenant, the id itself."""
    return own if tenant is None else f"{tenant}:{own}"


def stored(own: str) -> str:
    """The stored form of an id of the current request.

    Raises:
        LongIdError: it has more than `MAX_ID` characters.
    """
    tenant = TENANT.get()
    found = inside(own, tenant)
    if tenant is not None and len(found) > MAX_ID:
        raise LongIdError(
            f"The id {own[:20]!r}... has {len(own)} characters; a key of the tenant {tenant!r} can "
            f"use ids of up to {MAX_ID - len(tenant) - 1}."
        )
    return found


def own(stored: str) -> str:
    """The id of the current request's tenant whose stored form this is."""
    tenant = TENANT.get()
    return stored if tenant is None else stored.removeprefix(f"{tenant}:")
