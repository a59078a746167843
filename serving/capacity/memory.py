"""Memory of a replica, its catalog and its users.

Sizes of weights, cache, table and retrieval are read from the bundle's files. The rest are the
constants below, each measured once (see `docs/capacity.md`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow.parquet as pq

from recsys.artifacts import read_manifest
from recsys.bundle import CATALOG, DRAFT, RETRIEVAL, TARGET
from recsys.catalog import FILE
from recsys.errors import ArtifactError
from recsys.serving.capacity.simulation import Fleet

MB = 1 << 20
PROCESS_MB = 560  # Python, torch, transformers and a server, before any catalog
TRIE_ITEM = 32  # bytes; 31.3 at ten million items of 4 x 256 codes
CATALOG_ITEM = 400  # ids, index, codes, prompts' tokens and titles, besides the table itself
EVENT = 194  # bytes of an event in the SQLite store, indices and all
PROMPT_TOKENS = 1  # in front of a history


@dataclass(frozen=True)
class Memory:
    """Memory of a replica of one bundle, in bytes.

    An item takes `table_item` in the catalog's table and `retrieval_item` in retrieval. A token
    (an item has `levels`) takes `token`: its keys and values in all layers.
    """

    weights: int
    token: int
    levels: int
    table_item: int
    retrieval_item: int
    prefix: int

    @classmethod
    def of_bundle(cls, bundle: Path, *, prefix_mb: int = 64) -> Self:
        """Read a bundle's files."""
        info = read_manifest(bundle, "bundle").info
        models = [folder for name in (TARGET, DRAFT) if (folder := bundle / name).is_dir()]
        try:
            config = json.loads((bundle / TARGET / "config.json").read_text(encoding="utf-8"))
            heads = config.get("num_key_value_heads") or config["num_attention_heads"]
            width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            token = 2 * 4 * config["num_hidden_layers"] * heads * width
            items, levels = int(info["items"]), int(info["levels"])
            table = pq.read_metadata(bundle / CATALOG / FILE)
        except (OSError, ValueError, KeyError) as error:
            raise ArtifactError(f"{bundle}: {error}; make the bundle again") from error
        retrieval = bundle / RETRIEVAL
        kept = sum(file.stat().st_size for file in retrieval.glob("*.npy"))
        weights = sum(
            file.stat().st_size for folder in models for file in folder.glob("*.safetensors")
        )
        groups = range(table.num_row_groups)
        row = sum(table.row_group(group).total_byte_size for group in groups) // max(items, 1)
        return cls(weights, token, levels, row, kept // max(items, 1), prefix_mb * MB)

    def histories(self, events: int) -> int:
        """Number of histories of so many events whose keys and values a replica keeps."""
        return self.prefix // (self.token * (PROMPT_TOKENS + self.levels * events))

    def of(
        self, items: int, users: int, events: int, fleet: Fleet, per_machine: int
    ) -> dict[str, Any]:
        """Bytes of a replica, a machine and the store, for users with so many events each."""
        nodes = 64 * self.levels  # more than a search of 20 beams has
        prompt = PROMPT_TOKENS + self.levels * events
        replica = {
            "process": PROCESS_MB * MB,
            "weights": self.weights,
            "trie": TRIE_ITEM * items,
            "catalog": (CATALOG_ITEM + self.table_item) * items,
            "retrieval": self.retrieval_item * items,
            "kept histories": self.prefix,
            "a full batch": fleet.max_batch * (prompt + nodes) * self.token,
        }
        total = sum(replica.values())
        return {
            "replica": replica,
            "replica_bytes": total,
            "machine_bytes": total * per_machine,
            "fleet_bytes": total * fleet.replicas,
            "item_bytes": TRIE_ITEM + CATALOG_ITEM + self.table_item + self.retrieval_item,
            "store_bytes": EVENT * events * users,
            "histories_kept": self.histories(events),
        }
