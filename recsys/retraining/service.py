"""What the running service is told: the events of a file, and the version that is promoted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.artifacts import Workspace
from recsys.data import growth
from recsys.dataset import PAIR, Dataset
from recsys.errors import ConfigError
from recsys.event_names import PURCHASE, is_return, level, takes_back
from recsys.progress import say
from recsys.retraining.news import SENT, roles_of
from recsys.retraining.versions import CHAMPION

if TYPE_CHECKING:
    from recsys.serving.client import Client

CHUNK = 1000  # events in a request


def unsent(version: Workspace) -> int:
    """Number of new events of a version that the store of the service did not have."""
    events, _ = growth.read(version.path(growth.KIND))
    return pc.sum(pc.invert(events["stored"])).as_py() or 0


def send_events(version: Workspace, clients: Sequence[Client]) -> None:
    """Send the new events of a version's file to the service, which stores each of them once.

    Users who were left out of the data set, such as bots, are left out. An item that the user
    returned or dislikes is sent as a dislike, as in the data set that a service imports at its
    first start; a return that left pieces is sent as a partial one, which takes nothing back.
    """
    rows = list(_events(version))
    accepted = 0
    for start in range(0, len(rows), CHUNK):
        accepted += clients[0].send_events(rows[start : start + CHUNK]).accepted
    if rows:
        say(
            f"The service knows the {len(rows)} events of the file: {accepted} are new to it, and "
            f"{len(rows) - accepted} were there, or are from before the erasure of their user."
        )


def _events(version: Workspace) -> Iterator[dict[str, Any]]:
    """The new events of a version's file, as `POST /v1/events` takes them."""
    from recsys.serving.stores.records import DISLIKES, SEED_TYPE, content_digest

    dataset = Dataset.load(version.dataset)
    events, _ = growth.read(version.path(growth.KIND))
    users = pa.array(dataset.interactions.user_ids.tolist(), pa.string())
    unwanted: set[tuple[str, ...]] = set()
    if dataset.disliked is not None:
        users = pa.concat_arrays([users, dataset.disliked.table["user_id"].combine_chunks()])
        standing = dataset.disliked.standing
        unwanted = set(zip(*(standing[name].to_pylist() for name in PAIR), strict=True))
    mine = pc.and_(pc.invert(events["stored"]), pc.is_in(events["user"], value_set=users))
    by_time = [("timestamp", "ascending"), ("nanosecond", "ascending")]
    events = events.filter(mine).sort_by(by_time)
    bound = (version.manifest("dataset").info.get("cleaning") or {}).get("mapping", {})
    low = pc.less_equal(events["rating"], bound.get("negative_rating"))
    negative = growth.is_negative(events["type"], roles_of(version, dataset))
    negative = pc.or_(negative, pc.fill_null(low, False)).to_numpy(zero_copy_only=False)
    first = _first_times(dataset, pc.unique(events["user"].filter(pa.array(negative))))
    for is_negative, row in zip(negative.tolist(), events.to_pylist(), strict=True):
        kind = re.sub(r"[^\w -]", " ", row["type"] or SEED_TYPE).strip(" _-")[:32] or SEED_TYPE
        if (row["user"], row["item"]) in unwanted:
            if not is_negative:
                continue  # it was bought and returned
            kind = "return" if takes_back(kind) else DISLIKES[0]
        elif is_negative and level(kind) != 0:
            continue  # the service would count it by its name
        elif (
            is_return(kind) and first.get((row["user"], row["item"]), math.inf) <= row["timestamp"]
        ):
            kind = "partial return"  # what was bought before is still a part of the data
        value = row["rating"] if row["quantity"] is None else row["quantity"]
        if value is not None and (np.isnan(value) or (value <= 0 and level(kind) == PURCHASE)):
            value = None
        event = {"user": row["user"], "item": row["item"], "type": kind, "value": value}
        event |= {"timestamp": row["timestamp"] + (row["nanosecond"] or 0) // 10**6 / 1000}
        yield event | {"event_id": SENT + content_digest(*map(str, event.values()))}


def _first_times(dataset: Dataset, user_ids: pa.Array) -> dict[tuple[str, str], int]:
    """User and item -> unix seconds of the first event, of some users."""
    rows = dataset.interactions
    mine = np.isin(rows.user_ids, np.asarray(user_ids.to_pylist(), np.str_))[rows.user]
    users, items = rows.user_ids[rows.user[mine]], rows.item_ids[rows.item[mine]]
    pairs = zip(users.tolist(), items.tolist(), strict=True)
    times = zip(pairs, rows.timestamp[mine].tolist(), strict=True)
    return dict(reversed(list(times)))


def promote_version(version: Workspace, champion: Workspace, client: Client) -> None:
    """Let the alias stand for the version; a repetition changes nothing.

    Raises:
        ConfigError: the alias was changed meanwhile.
    """
    alias = client.alias(CHAMPION)
    ours = {w.manifest("bundle").digest for w in (version, champion)}
    if alias.version not in ours:
        raise ConfigError(
            f"the alias {CHAMPION!r} was changed to {alias.bundle} ({alias.version}) meanwhile; "
            "run `recsys retrain` again"
        )
    client.set_alias(CHAMPION, version.name)
