"""Admission: which events of a batch are new, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from recsys.serving.stores.protocol import Appended, Event, EventConflictError


def admit(
    batch: Sequence[Event],
    known: Mapping[str | None, str | None],
    erased: Mapping[str, int],
    answers: Collection[str],
) -> tuple[list[Event], Appended]:
    """Tell the new events of a batch from those that are there.

    Args:
        batch: events with ids and digests.
        known: id -> digest of those that are there.
        erased: user -> when they were erased, in unix milliseconds.
        answers: recommendation ids that are remembered.

    Returns:
        Events to write, and what became of the batch.

    Raises:
        EventConflictError: an id stands for two contents.
    """
    fresh: dict[str | None, Event] = {}
    conflicts: list[str] = []
    duplicates = ignored = unlinked = 0
    for event in batch:
        if event.event_id in fresh or event.event_id in known:
            same = fresh.get(event.event_id)
            before = same.digest if same is not None else known[event.event_id]
            if before == event.digest:
                duplicates += 1
            else:
                conflicts.append(str(event.event_id))
        elif event.time_ms <= erased.get(event.user, -1):
            ignored += 1
        else:
            fresh[event.event_id] = event
            named = event.recommendation_id
            unlinked += named is not None and named not in answers
    if conflicts:
        raise EventConflictError(conflicts)
    return list(fresh.values()), Appended(len(fresh), duplicates, ignored, unlinked)
