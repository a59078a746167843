"""What is new in a batch, against a slow twin that keeps a plain dictionary."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.serving.stores import records
from recsys.serving.stores.history import admit
from recsys.serving.stores.records import Event, EventConflictError, Sign, parts_of_history

EVENTS = st.builds(
    lambda name, user, content, answer: Event(
        name, user, "x", "view", int(content), recommendation_id=answer, digest=content
    ),
    st.sampled_from("abcd"),
    st.sampled_from(["ada", "bob"]),
    st.sampled_from("123"),
    st.sampled_from([None, "r1", "r2"]),
)


@given(st.lists(st.lists(EVENTS, max_size=4), max_size=6), st.integers(0, 3))
def test_admission_of_batches_equals_a_dictionary(batches, erased_ms):
    kept: dict[str, str] = {}  # the slow twin
    known: dict[str | None, str | None] = {}
    for batch in batches:
        after, counts = dict(kept), {"accepted": 0, "duplicates": 0, "ignored": 0, "unlinked": 0}
        conflict = False
        for event in batch:
            name, content = str(event.event_id), str(event.digest)
            if name in after:
                conflict |= after[name] != content
                counts["duplicates"] += 1
            elif event.user == "ada" and event.time_ms <= erased_ms:
                counts["ignored"] += 1
            else:
                after[name] = content
                counts["accepted"] += 1
                counts["unlinked"] += event.recommendation_id == "r2"
        if conflict:
            with pytest.raises(EventConflictError):
                admit(batch, known, {"ada": erased_ms}, {"r1"})
            continue
        fresh, done = admit(batch, known, {"ada": erased_ms}, {"r1"})
        known |= {event.event_id: event.digest for event in fresh}
        kept = after
        assert known == kept
        assert {name: getattr(done, name) for name in counts} == counts


def test_few_types_of_a_history_are_understood(monkeypatch):
    read = []
    monkeypatch.setattr(records, "sign_of", lambda name, _: read.append(name) or Sign.PART)
    types = ["skip", *(f"t{number}" for number in range(5_000)), "feedback", None]
    _, known, _ = parts_of_history([*map(str, range(len(types)))], types, ("feedback",))
    assert sorted(read) == sorted([*types[: records.MOST_TYPES], "feedback"])
    assert {*known[records.MOST_TYPES :]} == {None, "feedback"}
