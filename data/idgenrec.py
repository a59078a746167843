"""Texts of IDGenRec (Tan et al., 2024) for the items of S3-Rec, which publishes none.

IDGenRec has the users of S3-Rec's Beauty and Sports in the same order, with ASINs for items, and a
file of keywords for each ASIN. A language model made them of the item's text. In the authors' code
those of `phase_0` are made before that model is trained on histories. An item and an ASIN are the
same if they have the same users. Nothing here knows of splits or of semantic IDs.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from recsys.data.files import read_lines
from recsys.data.item_texts import ItemText
from recsys.data.report import sentence
from recsys.errors import DataError

T = TypeVar("T")
SUFFIXES = (".txt", ".txt.gz")
SEQUENCES = ("user_sequence.txt", "user_sequence.txt.gz")


def sequences_beside(path: Path) -> Path:
    """The file of sequences in the folder of a file of keywords.

    Raises:
        DataError: there is none.
    """
    for name in SEQUENCES:
        if (beside := path.with_name(name)).is_file():
            return beside
    raise DataError(sentence("no_sequences", path=path, name=SEQUENCES[0]))


def read_keywords(
    path: Path, sequences: Path, lengths: NDArray[np.integer], events: NDArray[np.integer]
) -> dict[int, ItemText]:
    """Titles by item number; items with the same users as another item get none.

    An item of one file is the ASIN of the other that exactly the same users had.

    Args:
        path: lines of an ASIN and keywords; some ASINs have none.
        sequences: lines of a user and ASINs.
        lengths: (users,) number of events of each user, in the order of the source.
        events: their items, one user after another.

    Raises:
        DataError: the sequences do not have as many events of each user, or no keywords of any ASIN
            in them.
    """
    lines = (text.partition(" ") for _, text in read_lines(path))
    words = {asin: title for asin, _, title in lines if title}
    if not len(events):
        return {}
    users = [text.split()[1:] for _, text in read_lines(sequences)]
    if [len(user) for user in users] != lengths.tolist():
        raise DataError(sentence("users_in_another_order", path=sequences))
    asins, asin_number = np.unique([asin for user in users for asin in user], return_inverse=True)
    items, number = np.unique(events, return_inverse=True)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    item_of = _by_users(number, owner, items.tolist())
    asin_of = _by_users(asin_number, owner, asins.tolist())
    texts = {
        item_of[own]: ItemText(words[asin], "", None, [])
        for own, asin in asin_of.items()
        if asin in words and own in item_of
    }
    if not texts:
        raise DataError(sentence("no_keywords", path=path, sequences=sequences))
    return texts


def _by_users(
    items: NDArray[np.integer], users: NDArray[np.integer], names: list[T]
) -> dict[bytes, T]:
    """Names of the items 0, 1, ... by their users; without items that have the same users."""
    order = np.lexsort((users, items))
    ends = np.cumsum(np.bincount(items))[:-1]
    owners = [part.tobytes() for part in np.split(users[order], ends)]
    times = Counter(owners)
    return {own: name for own, name in zip(owners, names, strict=True) if times[own] == 1}
