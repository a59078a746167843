"""The drafts that are compared: every objective, and AtSpeed's ablations.

A variant is a name and settings. All variants of a run share the target and the seeds, start from
random weights as the paper's, and train for the same number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from recsys.artifacts import Workspace
from recsys.config import Settings
from recsys.training.settings import ON_TREES, Objective

PUBLISHED = ("sft", "wordkd", "tvdkd", "seqkd", "atspeed-s", "atspeed-s-eq4", "atspeed-r")
OURS = tuple(n for n in get_args(Objective) if n not in PUBLISHED)
OBJECTIVES = (*PUBLISHED, *OURS)
TITLES = {
    "target": "target",
    "sft": "SFT", "wordkd": "WordKD", "tvdkd": "TVDKD", "seqkd": "SeqKD",
    "atspeed-s": "AtSpeed-S", "atspeed-s-eq4": "AtSpeed-S, eq. 4", "atspeed-r": "AtSpeed-R",
}  # fmt: skip
STRICT, RELAXED = "atspeed-s", "atspeed-r"  # objectives that the paper studies
PRINTED = "atspeed-s-eq4"  # searches the mixture of target and draft, as the paper prints

# Ablations by objective (figure 3 and table 4 of the paper), and how the released losses and the
# training script differ from the printed ones: name -> value of `draft.ablations`.
_OF_BOTH = {
    "as released": "released", "no constrained alignment": "unconstrained", "top-1": "top-1",
    "last step's beams": "last-beams",
}  # fmt: skip
ABLATIONS: dict[str, dict[str, str]] = {
    STRICT: {"no density": "no-density", **_OF_BOTH, "allowed tokens only": "node-tokens"},
    RELAXED: _OF_BOTH,
}  # fmt: skip

# Settings of every variant, whatever the configuration says of the deployed draft.
PLAIN: dict[str, Any] = {
    "alpha": None, "ablations": [], "base": None, "lora": None, "accept_users": 0,
    "evaluate_every": 0, "patience": 0,
}  # fmt: skip
# Settings of a draft from scratch, which is much smaller than its target.
SCRATCH: dict[str, Any] = {
    "init_from_target": False,
    "preset": "tiny",
    "architecture": {"hidden_size": 64, "intermediate_size": 128, "heads": 2, "tied": True},
    "layers": 1,
    "learning_rate": 3e-3,
}


def title_of(objective: str) -> str:
    """An objective's name in tables."""
    return TITLES.get(objective, f"{objective} (ours)")


@dataclass(frozen=True)
class Variant:
    """One draft.

    Attributes:
        objective: that it is trained with.
        seed: of its training.
        change: difference from the plain objective, in words; "" for none.
        options: the same difference as settings of section `draft`.
    """

    objective: str
    seed: int = 0
    change: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name of its folder."""
        words = [self.objective, self.change, str(self.seed)]
        safe = ["".join(c if c.isalnum() or c in "-." else "-" for c in w) for w in words if w]
        return "_".join(safe)

    def of(self, seed: int) -> Variant:
        """The same with another seed."""
        return replace(self, seed=seed)

    @property
    def title(self) -> str:
        """Name in tables."""
        own = title_of(self.objective)
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
        return f"teacher-{self.source}_{self.seed}"


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
    settings: Settings, variant: Variant, steps: int, workspace: Workspace
) -> Settings:
    """The settings of a run, changed for one variant that trains for so many steps."""
    values = settings.values
    draft = {**values.get("draft", {}), **PLAIN}
    # Settings of a draft cut from its target do not fit one from scratch.
    draft |= SCRATCH if draft.get("init_from_target", True) else {"init_from_target": False}
    draft |= {"epochs": 1, "max_minutes": None, "min_steps": steps, "max_steps": steps}
    draft |= variant.options
    draft["objective"] = variant.objective
    # One set of teacher data for all objectives that search the target.
    teacher = {**values.get("teacher", {}), "draft": None, "level_tokens": True}
    if variant.source == "mixture":
        sft = DraftSpace.seen_by(
            workspace, replace(variant, objective="sft", change="", options={})
        )
        teacher |= {"draft": str(sft.run("draft")), "level_tokens": False}
    return Settings({**values, "seed": variant.seed, "draft": draft, "teacher": teacher})


def list_variants(parts: Sequence[str]) -> list[Variant]:
    """All drafts that the parts of an experiment need, of one seed."""
    changes: list[tuple[str, str, dict[str, Any]]] = [(name, "", {}) for name in OBJECTIVES]
    if "ablations" in parts:
        changes += [
            (objective, change, {"ablations": [ablation]})
            for objective, ablations in ABLATIONS.items()
            for change, ablation in ablations.items()
        ]
    return [Variant(objective, 0, change, options) for objective, change, options in changes]
