"""Whether an item is available, in words of six languages or as a number in stock."""

from __future__ import annotations

import pyarrow as pa
import pytest

from recsys.data.availability import read_available, share_of_answers


@pytest.mark.parametrize(
    ("yes", "no"),
    [
        ("yes", "no"), ("true", "False"), ("1", "0"), ("12", "-3"), ("2,5", "0.0"),
        ("in stock", "Out of Stock"), ("active", "draft"), ("ja", "nein"), ("oui", "non"),
        ("auf Lager", "ausverkauft"), ("verfügbar", "nicht verfügbar"), ("sí", "no"),
        ("disponible", "épuisé"), ("disponibile", "esaurito"), ("op voorraad", "uitverkocht"),
    ],
)  # fmt: skip
def test_words_and_numbers_say_yes_or_no(yes: str, no: str) -> None:
    column = pa.chunked_array([[yes, no, None, "perhaps"]])
    assert read_available(column).to_pylist() == [True, False, None, None]
    assert share_of_answers(pa.chunked_array([[yes, no]])) == 1.0


def test_one_answer_for_all_items_says_nothing() -> None:
    assert share_of_answers(pa.chunked_array([["yes", "yes"]])) == 1.0
    assert share_of_answers(pa.chunked_array([["no", "no"]])) == 0.0
    assert share_of_answers(pa.chunked_array([["red", "blue"]])) == 0.0
    assert share_of_answers(pa.chunked_array([], pa.string())) == 0.0
