"""Load the native library and call it: ctypes structures that mirror `native.h`."""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from pathlib import Path

from recsys.native.build import LIBRARY

ABI = 8
PANEL = 32
OFF = "RECSYS_NATIVE"
"""Environment variable; 0 leaves the library unused. Tests and comparisons set it."""

# Of an ELF header of 64 bits: where the section headers begin, the size of each, and their number.
_ELF = struct.Struct("<40xQ10xHH2x")

FLOATS = ctypes.c_void_p
INTEGERS = ctypes.c_void_p


class Linear(ctypes.Structure):
    """`Linear` of native.h."""

    _fields_ = [
        ("panels", FLOATS),
        ("bias", FLOATS),
        ("pairs", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    ]


class Layer(ctypes.Structure):
    """`Layer` of native.h."""

    _fields_ = [
        *((name, Linear) for name in ("q", "kv", "o", "gate_up", "down")),
        *((name, FLOATS) for name in ("norm", "mlp_norm", "q_norm", "k_norm")),
        ("mask", ctypes.c_int64),
    ]


_SIZES = "layers hidden inner heads kv_heads head_size rotary vocabulary positions"


class Model(ctypes.Structure):
    """`Model` of native.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _SIZES.split()),
        ("epsilon", ctypes.c_float),
        ("scaling", ctypes.c_float),
        *((name, FLOATS) for name in ("embedding", "cosine", "sine", "norm")),
        ("head", Linear),
        ("layer", ctypes.POINTER(Layer)),
        ("projected", FLOATS),
    ]


class Pass(ctypes.Structure):
    """`Pass` of native.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("batch", "tokens", "rows", "slots", "view", "threads")
        ),
        *((name, INTEGERS) for name in ("token", "position", "write", "row")),
        ("mask", FLOATS * 2),
        ("mask_batch", ctypes.c_int64 * 2),
        ("mask_token", ctypes.c_int64 * 2),
        ("cache", FLOATS),
        ("cache_layer", ctypes.c_int64),
        ("cache_values", ctypes.c_int64),
        ("logits", FLOATS),
        ("workspace", ctypes.c_void_p),
    ]


class Trie(ctypes.Structure):
    """`Trie` of native.h."""

    _fields_ = [
        *((n, ctypes.c_int64) for n in ("levels", "leaves", "wide_symbols", "wide_rows")),
        *((name, INTEGERS) for name in ("first_child", "symbol", "rows", "alphabet")),
    ]


class Search(ctypes.Structure):
    """`Search` of native.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("batch", "longest", "slots", "prompt")),
        *((name, ctypes.c_int64) for name in ("beams", "threads")),
        *((name, INTEGERS) for name in ("token", "length", "cached", "width")),
        ("window", ctypes.c_int64 * 2),
        *((name, ctypes.c_void_p) for name in ("allowed", "dead", "dead_count", "gains", "limit")),
        ("extra", ctypes.c_int64),
        *((f"extra_{name}", INTEGERS) for name in ("token", "parent", "depth", "state")),
        ("extra_logits", FLOATS),
        ("cache", FLOATS),
        ("cache_layer", ctypes.c_int64),
        ("cache_values", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("workspace", "row", "sequence", "log_prob")),
        *((name, ctypes.c_void_p) for name in ("complete", "finite", "nodes")),
    ]


class Matrix(ctypes.Structure):
    """`Matrix` of native.h."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("start", "column", "value")]


class Fitted(ctypes.Structure):
    """`Fitted` of native.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("items", "terms", "vector_size", "state_size")),
        *((name, Matrix) for name in ("item_item", "neighbors", "content", "postings")),
        *((name, FLOATS) for name in ("vectors", "states", "popularity")),
        *((name, INTEGERS) for name in ("order", "recent_order")),
        *((name, ctypes.c_void_p) for name in ("log_counts", "log_recent", "eventless")),
        ("smoothing", ctypes.c_double),
    ]


class Asked(ctypes.Structure):
    """`Asked` of native.h."""

    _fields_ = [
        ("batch", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("offset", "history", "decay", "neighbor_decay")),
        *((name, ctypes.c_void_p) for name in ("blocked", "states")),
    ]


class Proposals(ctypes.Structure):
    """`Proposals` of native.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("k", "half", "quarter", "near", "width")),
        *((name, ctypes.c_void_p) for name in ("cosines", "nearest", "items", "supported")),
    ]


RANKED = (
    *("item_item", "last_item", "neighbors", "vectors", "last_vectors", "content", "last_content"),
    *("sasrec", "model", "popularity", "recent"),
)
"""Sources of the reranker, by their numbers in native.h."""


class Weights(ctypes.Structure):
    """`Weights` of native.h."""

    _fields_ = [
        ("source", ctypes.c_int64),
        *((name, ctypes.c_double) for name in ("value", "rank", "gap", "new_rank")),
    ]


INPUTS = ("value", "rank", "gap", "plain", "missing")
"""Forms of a network's inputs, in the order of native.h."""


class Ranking(ctypes.Structure):
    """`Ranking` of native.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("width", "k", "formed_count", "plain_count")),
        *((name, ctypes.c_int64) for name in ("weighs_new", "units", "input_count")),
        *((name, Weights * len(RANKED)) for name in ("formed", "plain")),
        *((name, ctypes.c_double) for name in ("missing", "is_new")),
        *((name, ctypes.c_void_p) for name in ("input", "network")),
        *((name, ctypes.c_void_p) for name in ("log_rank", "items", "log_probs", "source")),
        *((name, ctypes.c_void_p) for name in ("gains", "best", "score", "best_source")),
    ]


class SasrecLayer(ctypes.Structure):
    """`SasrecLayer` of native.h."""

    _fields_ = [
        *((name, Linear) for name in ("mixed", "out", "inner", "outer")),
        ("norm", FLOATS * 4),
    ]


class Sasrec(ctypes.Structure):
    """`Sasrec` of native.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("items", "layers", "hidden", "inner", "heads")),
        *((name, ctypes.c_int64) for name in ("window", "block")),
        *((name, FLOATS) for name in ("vectors", "positions")),
        ("norm", FLOATS * 2),
        ("layer", ctypes.POINTER(SasrecLayer)),
    ]


class Library:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        """Load the file.

        Raises:
            OSError: no library, one of another processor, or one of another version.
        """
        _check_whole(path)
        self._functions = ctypes.CDLL(os.fspath(path))  # its calls release the interpreter lock
        try:
            sizes = ("", "search_", "project_", "blend_", "states_")
            for name in (
                "abi",
                "bfloat16",
                "forward",
                "search",
                *(f"{size}workspace" for size in sizes),
            ):
                getattr(self._functions, f"recsys_{name}").restype = ctypes.c_int64
            blend = ("cosines", "propose", "rank", "because", "states")
            for name in ("log_sum_exp", "project", *blend):
                getattr(self._functions, f"recsys_{name}").restype = None
            size = ctypes.c_int64
            self._functions.recsys_blend_workspace.argtypes = [ctypes.c_void_p, size, size, size]
            self._functions.recsys_variant.restype = ctypes.c_char_p
            self._functions.recsys_variant.argtypes = [ctypes.c_int64]
            self._functions.recsys_choose.argtypes = [ctypes.c_int64]
        except AttributeError as error:
            raise OSError(f"{path} is another library: {error}") from error
        if (found := self._functions.recsys_abi()) != ABI:
            raise OSError(f"{path} has version {found}, and this code needs {ABI}; build it again")
        self.workspace = self._functions.recsys_workspace
        self.forward = self._functions.recsys_forward
        self.search_workspace = self._functions.recsys_search_workspace
        self.search = self._functions.recsys_search
        self.log_sum_exp = self._functions.recsys_log_sum_exp
        self.project_workspace = self._functions.recsys_project_workspace
        self.project = self._functions.recsys_project
        self.blend_workspace = self._functions.recsys_blend_workspace
        self.cosines = self._functions.recsys_cosines
        self.propose = self._functions.recsys_propose
        self.rank = self._functions.recsys_rank
        self.because = self._functions.recsys_because
        self.states_workspace = self._functions.recsys_states_workspace
        self.states = self._functions.recsys_states

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether this processor multiplies numbers in bfloat16 (AVX512-BF16 of x86-64)."""
        return bool(self._functions.recsys_bfloat16())

    @property
    def variants(self) -> list[str]:
        """Instruction sets that this processor has, best first: v4, v3 and v2 of x86-64; base."""
        found: list[str] = []
        while (name := self._functions.recsys_variant(len(found))) is not None:
            found.append(name.decode())
        return found

    def choose(self, variant: str) -> None:
        """Use an instruction set other than the best one."""
        self._functions.recsys_choose(self.variants.index(variant))


def _check_whole(path: Path) -> None:
    """Raise `OSError` if an ELF file ends early: the processor would stop this process (SIGBUS).

    The section headers are the last part of the file that a linker writes.
    """
    with path.open("rb") as file:
        head = file.read(_ELF.size)
    if not head.startswith(b"\x7fELF"):
        return  # Mach-O, of which macOS checks this itself
    if len(head) == _ELF.size:
        start, size, count = _ELF.unpack(head)
        if start + size * count <= path.stat().st_size:
            return
    raise OSError(f"{path} is not whole; `python -m recsys.native.build` makes it again")


@functools.cache
def _loaded() -> Library | str:
    if not LIBRARY.is_file():
        return "the library was not built; `python -m recsys.native.build` says why"
    try:
        return Library(LIBRARY)
    except OSError as error:
        return str(error)


def find_library() -> Library | str:
    """The library; where there is none, or it is switched off, the reason."""
    if os.environ.get(OFF) == "0":
        return f"switched off by {OFF}=0"
    return _loaded()


def describe() -> str:
    """Which forward pass serves on a CPU, in words."""
    library = find_library()
    if isinstance(library, str):
        return f"torch ({library})"
    return f"native, instruction set {library.variants[0]}"
