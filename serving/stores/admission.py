"""Separate the new events of a batch from repeated and erased ones."""

from collections.abc import Collection, Mapping, Sequence

from recsys.serving.stores.records import Appended, Event, EventConflictError


def admit(
    batch: Sequence[Event],
    known: Mapping[str | None, str | None],
    erased: Mapping[str, int],
    answers: Collection[str],
) -> tuple[list[Event], Appended]:
    """Separate the new events of a batch from repeated and erased ones.

    Args:
        batch: events with ids and digests.
        known: id -> digest of the stored events.
        erased: user -> time of the erasure, in unix milliseconds.
        answers: ids of the remembered answers.

    Raises:
        EventConflictError: two events have the same id and different contents.
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
            answer = event.recommendation_id
            unlinked += answer is not None and answer not in answers
    if conflicts:
        raise EventConflictError(conflicts)
    return list(fresh.values()), Appended(len(fresh), duplicates, ignored, unlinked)
