"""FixedTrie: a catalog in tensors of fixed sizes, into which the next catalog is copied.

A captured decode has the addresses and sizes of all tensors as constants, and with them the first
state of each depth. Here every depth has room for further states behind its own, so that items can
be added without another capture:

    catalog     0 | 1 2 | 3 4 5          depths begin at 0, 1, 3
    in here     0 . | 2 3 . . | 6 7 8 . .   depths begin at 0, 2, 6; a dot is room

States keep their order, and rows their numbers. States in the room have no parent, so no search
reaches them. Symbols are offsets in a range of tokens, which has room, too.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint.transitions import DeviceTrie
from recsys.constraint.trie import NO_STATE, ItemTrie

_SHARE = 8  # room for one more state, child or token for so many
_LEAST = 8  # and for so many at least


class FixedTrie:
    """A catalog in tensors whose sizes and addresses never change.

    Attributes:
        catalog: the trie that is here now.
        trie: the same with room behind each depth; its tensors are the fixed ones.
        places: (S + C,) int32 for each state of `trie` and the C behind them, its number in
            `catalog`, or that of no state for room.
    """

    def __init__(
        self, catalog: ItemTrie, device: str | torch.device = "cpu", *, tokens: int = 0
    ) -> None:
        """Allocate the tensors, with room for one state more for eight, and copy a catalog.

        Tokens other than the catalog's have room, too, if they are below `tokens`.
        """
        states = [_with_room(n) for n in np.diff(catalog.depth_start).tolist()]
        states[0] = 2  # the state behind the last of a depth ends its children
        self._depth_start = tuple(np.cumsum([0, *states]).tolist())
        self._branching = tuple(
            min(_with_room(most), room)
            for most, room in zip(catalog.branching, states[1:], strict=True)
        )
        first, behind = int(catalog.alphabet[0]), int(catalog.alphabet[-1]) + 1
        room = _with_room(behind - first) - (behind - first)
        last = max(behind, min(behind + room, tokens))
        self._alphabet = np.arange(max(0, first - room), last, dtype=np.int64)
        spaced = self._spaced(catalog)
        self.catalog, self.trie = catalog, DeviceTrie.of(spaced, device)
        spaced.release()  # ends a reference cycle
        self._number()

    @classmethod
    def of(cls, trie: ItemTrie | FixedTrie, device: str | torch.device = "cpu") -> FixedTrie:
        """`trie` on a device; a `FixedTrie` as it is."""
        return trie if isinstance(trie, FixedTrie) else cls(trie, device)

    def use(self, catalog: ItemTrie) -> bool:
        """Copy another catalog over the one that is here; False, and no copy, if it has no room."""
        if not self._fits(catalog):
            return False
        spaced = self._spaced(catalog)
        for field in fields(DeviceTrie):
            own = getattr(self.trie, field.name)
            if isinstance(own, torch.Tensor) and field.name != "rows":
                own.copy_(getattr(DeviceTrie.of(spaced), field.name))
        spaced.release()
        rows = DeviceTrie.of(catalog, self.trie.device).rows  # no captured step reads them
        self.catalog, self.trie = catalog, replace(self.trie, source=spaced, rows=rows)
        self._number()
        return True

    def states(
        self, states: NDArray[np.int64], depth: int | NDArray[np.integer]
    ) -> NDArray[np.int64]:
        """The numbers here of states of the catalog, which are at `depth`."""
        moved: NDArray[np.int64] = states + self._moved[depth]
        return moved

    def symbols(self, symbols: NDArray[np.int64]) -> NDArray[np.int64]:
        """The symbols here of symbols of the catalog."""
        numbers: NDArray[np.int64] = self.catalog.alphabet[symbols] - self._alphabet[0]
        return numbers

    def renumber_excluded(self, depth: int, dead: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers here of dead states below `depth` (`Excluded`)."""
        return np.where(dead != NO_STATE, self.states(dead, depth + 1), NO_STATE)

    def _fits(self, catalog: ItemTrie) -> bool:
        """Whether there is room for a catalog."""
        if catalog.num_levels != self.trie.source.num_levels:
            return False
        room, states = np.diff(self._depth_start), np.diff(catalog.depth_start)
        most = zip(catalog.branching, self._branching, strict=True)
        return (
            bool((states < room).all())
            and all(theirs <= ours for theirs, ours in most)
            and bool(np.isin(catalog.alphabet[[0, -1]], self._alphabet).all())
        )

    def _spaced(self, catalog: ItemTrie) -> ItemTrie:
        """The catalog with room behind each depth."""
        here, theirs, levels = self._depth_start, catalog.depth_start, catalog.num_levels
        symbol = np.zeros(here[-1], np.int16 if len(self._alphabet) < 1 << 15 else np.int32)
        first_child = np.full(here[levels] + 1, here[-1], np.int32)
        inner_start = np.full(here[levels], catalog.num_rows, np.int32)
        offset = (catalog.alphabet - self._alphabet[0]).astype(symbol.dtype)
        for depth in range(levels + 1):
            first, last = theirs[depth : depth + 2]
            behind = here[depth] + last - first
            symbol[here[depth] : behind] = offset[catalog.symbol[first:last]]
            if depth < levels:
                moved = here[depth + 1] - theirs[depth + 1]
                inner_start[here[depth] : behind] = catalog.inner_start[first:last]
                first_child[here[depth] : behind] = catalog.first_child[first:last] + moved
                first_child[behind : here[depth + 1]] = theirs[depth + 2] + moved
        return ItemTrie(
            catalog.rows,
            catalog.row_items,
            catalog.row_item_start,
            catalog.item_row,
            self._alphabet,
            symbol,
            first_child,
            inner_start,
            here,
            self._branching,
        )

    def _number(self) -> None:
        """Set what follows from the catalog."""
        here, theirs = np.array(self._depth_start), np.array(self.catalog.depth_start)
        self._moved = (here - theirs)[:-1]
        states = np.full(self.trie.source.padded_states, self.catalog.num_states, np.int32)
        for start, first, last in zip(here, theirs, theirs[1:], strict=False):
            states[start : start + last - first] = np.arange(first, last)
        self.places = torch.from_numpy(states).to(self.trie.device)


def _with_room(count: int) -> int:
    """A number, and room for more."""
    return count + max(_LEAST, count // _SHARE)
