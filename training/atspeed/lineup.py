"""The drafts that are compared: every objective, its ablations and weights, from two starts.

A variant is a name and settings. All variants share the target, the seeds and the budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from recsys.artifacts import Workspace
from recsys.config import Settings
from recsys.training.settings import ON_TREES, Objective

Init = Literal["scratch", "target"]

PUBLISHED = ("sft", "wordkd", "tvdkd", "seqkd", "atspeed-s", "atspeed-s-eq4", "atspeed-r")
OURS = tuple(name for name in get_args(Objective) if name not in PUBLISHED)
TITLES = {
    "sft": "SFT", "wordkd": "WordKD", "tvdkd": "TVDKD", "seqkd": "SeqKD",
    "atspeed-s": "AtSpeed-S", "atspeed-s-eq4": "AtSpeed-S, eq. 4", "atspeed-r": "AtSpeed-R",
}  # fmt: skip
INITS = {"scratch": "from scratch", "target": "from the target"}  # starting points in words
STRICT, RELAXED = "atspeed-s", "atspeed-r"  # objectives that the paper studies
PRINTED = "atspeed-s-eq4"  # searches the mixture of target and draft, as the paper prints

# Settings of the ablations by objective (figure 3 and table 4 of the paper).
ABLATIONS: dict[str, dict[str, dict[str, Any]]] = {
    STRICT: {
        "no density": {"density": False},
        "no constrained alignment": {"constrained": False},
        "top-1": {"top_k": False},
        "last step's beams": {"beam_steps": "last"},
    },
    RELAXED: {
        "no constrained alignment": {"constrained": False},
        "top-1": {"top_k": False},
        "last step's beams": {"beam_steps": "last"},
    },
}
# Changes the time of a training step only, so it is trained just long enough to be timed.
COSTLY = "no tree attention"
EPOCHS = 20  # passes over a draft's data, at most
ALPHAS = (0.1, 0.3, 0.7)  # besides the default of 0.5

# Settings of every variant, whatever the configuration says of the deployed draft.
PLAIN: dict[str, Any] = {
    "alpha": None, "beam_steps": "all", "density": True, "constrained": True, "top_k": True,
    "tree_attention": True, "on_policy": 0, "accept_users": 0, "evaluate_every": 0, "patience": 0,
}  # fmt: skip
# Settings of a draft from scratch, which is much smaller than its target.
SCRATCH: dict[str, Any] = {
    "init_from_target": False,
    "preset": "tiny",
    "architecture": {"hidden_size": 64, "intermediate_size": 128, "heads": 2, "tied": True},
    "layers": 1,
    "learning_rate": 3e-3,
}


@dataclass(frozen=True)
class Variant:
    """One draft.

    Attributes:
        objective: that it is trained with.
        init: its starting point.
        seed: of its training.
        change: difference from the plain objective, in words; "" for none.
        options: the same difference as settings of section `draft`.
    """

    objective: str
    init: Init
    seed: int = 0
    change: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name of its folder."""
        words = [self.objective, self.change, self.init, str(self.seed)]
        kept = ["".join(c if c.isalnum() or c in "-." else "-" for c in w) for w in words if w]
        return "_".join(kept)

    @property
    def title(self) -> str:
        """Name in tables."""
        own = TITLES.get(self.objective, f"{self.objective} (ours)")
        return f"{own}, {self.change}" if self.change else own

    @property
    def source(self) -> str:
        """The source of its teacher data: `none`, `target` or `mixture`."""
        if self.objective not in ON_TREES:
            return "none"
        return "mixture" if self.objective == PRINTED else "target"

    @property
    def teacher(self) -> str:
        """Name of the teacher's folder."""
        own = f"_{self.init}" if self.source == "mixture" else ""
        return f"teacher-{self.source}{own}_{self.seed}"

    @property
    def wave(self) -> int:
        """Wave of its training; later waves need what earlier ones made."""
        return {"none": 0, "target": 1, "mixture": 2}[self.source]


@dataclass(frozen=True)
class DraftSpace(Workspace):
    """The workspace of one variant: its own draft and a shared teacher in a run's workspace."""

    draft: str = ""
    teacher: str = ""

    @classmethod
    def seen_by(cls, workspace: Workspace, variant: Variant) -> DraftSpace:
        """The workspace of a variant of the run's drafts."""
        return cls(workspace.home, workspace.name, variant.key, variant.teacher)

    def run(self, stage: str) -> Path:
        """Folder of a stage, or of a part of it such as `draft.checkpoint`."""
        kind = stage.split(".")[0]
        own = {"draft": self.draft, "teacher": self.teacher}.get(kind)
        return super().run("atspeed") / own / stage if own else super().run(stage)


def derive_settings(
    settings: Settings, variant: Variant, minutes: float, workspace: Workspace
) -> Settings:
    """The settings of a run, changed for one variant that trains for `minutes` at most."""
    values = settings.values
    draft = {**values.get("draft", {}), **PLAIN}
    if variant.init == "scratch":
        # Settings of a draft cut from its target do not fit one from scratch.
        draft |= SCRATCH if draft.get("init_from_target", True) else {"init_from_target": False}
    else:
        draft["init_from_target"] = True
    draft |= {"max_minutes": minutes, "epochs": EPOCHS, **variant.options}
    draft["objective"] = variant.objective
    # One set of teacher data for all objectives that search the target.
    teacher = {**values.get("teacher", {}), "source": "target", "level_tokens": True}
    if variant.source == "mixture":
        sft = DraftSpace.seen_by(
            workspace, replace(variant, objective="sft", change="", options={})
        )
        teacher |= {"source": "mixture", "draft": str(sft.run("draft")), "level_tokens": False}
    return Settings({**values, "seed": variant.seed, "draft": draft, "teacher": teacher})


def list_plain(inits: Iterable[Init], seeds: Iterable[int]) -> list[Variant]:
    """Every objective without changes."""
    seeds = list(seeds)
    return [
        Variant(objective, init, seed)
        for init in inits
        for objective in (*PUBLISHED, *OURS)
        for seed in seeds
    ]


def list_ablations(init: Init, seeds: Iterable[int]) -> list[Variant]:
    """AtSpeed's objectives with one part removed."""
    return [
        Variant(objective, init, seed, change, options)
        for seed in seeds
        for objective, changes in ABLATIONS.items()
        for change, options in changes.items()
    ]


def list_costly(init: Init, seeds: Iterable[int]) -> list[Variant]:
    """AtSpeed's objectives without tree attention: every node of a tree is a row."""
    options = {"tree_attention": False, "max_minutes": 0.1}
    return [Variant(name, init, seed, COSTLY, options) for seed in seeds for name in ABLATIONS]


def list_weights(init: Init, seeds: Iterable[int]) -> list[Variant]:
    """AtSpeed-S with other weights of the alignment loss."""
    return [
        Variant(STRICT, init, seed, f"alpha {alpha}", {"alpha": alpha})
        for seed in seeds
        for alpha in ALPHAS
    ]


def list_variants(
    parts: Sequence[str], inits: Sequence[Init], seeds: Sequence[int]
) -> list[Variant]:
    """All drafts that the parts of an experiment need; studies use the first starting point."""
    found = list_plain(inits, seeds)
    if "ablations" in parts:
        found += [*list_ablations(inits[0], seeds), *list_costly(inits[0], seeds[:1])]
    if "effects" in parts:
        found += list_weights(inits[0], seeds)
    return found
