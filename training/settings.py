"""Sections of the training stages: their settings, and how they depend on each other.

This module imports no torch, so that a run can check the settings of all stages before the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from recsys.config import Folder, Settings, Share, internal, section
from recsys.devices import AUTO
from recsys.errors import ConfigError
from recsys.models.architecture import architecture
from recsys.prompts import PromptConfig
from recsys.semantic_ids.settings import FeatureConfig, RQKMeansConfig, RQVAEConfig

SASREC = "sasrec"
LEARNED = ("rq-kmeans", "rq-vae")  # methods that learn codes from features
Method = Literal["rq-vae", "rq-kmeans", "imported"]
Objective = Literal[
    "sft", "wordkd", "tvdkd", "seqkd", "atspeed-s", "atspeed-s-eq4", "atspeed-r", "tree-kd",
    "margin-kd",
]  # fmt: skip
# What each objective learns from, in addition to the next items.
ON_WORDS = ("wordkd", "tvdkd")  # the target's distribution at every token of the windows
# The teacher's trees.
ON_TREES = tuple(name for name in get_args(Objective) if name not in ("sft", *ON_WORDS))
Ablation = Literal[
    "released", "no-density", "node-tokens", "unconstrained", "top-1", "last-beams",
]  # fmt: skip
# Objectives whose optimum is the target itself need no recommendation loss.
_COMPLETE = ("tree-kd", "margin-kd")
OURS: Final = "margin-kd"  # accepts the most levels in equal time (docs/experiments.md)
TRIED: Final = (OURS, "atspeed-s", "atspeed-r")  # of `auto`
Precision = Literal["auto", "bf16", "float32"]


@section
class LoopConfig:
    """Settings of the training loop."""

    epochs: PositiveInt = 30
    """Passes over the training windows, at most."""
    min_steps: NonNegativeInt = 0
    """Few data need more passes: epochs are added until there are this many steps."""
    max_steps: PositiveInt | None = internal(default=None)
    """Steps at most, at which the schedule then ends."""
    max_minutes: PositiveFloat | None = None
    """Time budget, including validation. Training ends when either budget is spent. The schedule
    follows the clock if the steps do not fit into the time."""
    learning_rate: float = 3e-3
    """Peak of the schedule."""
    warmup_steps: NonNegativeInt = 100
    """Steps of linear warm-up, followed by a cosine decay."""
    weight_decay: float = internal(default=0.05)
    """Weight decay of matrices; norms have none."""
    precision: Precision = internal(default="auto")
    """Precision of matrix products: `bf16`, `float32`, or `auto`, which is bf16 if the processor
    supports it in hardware."""
    evaluate_every: NonNegativeInt = 5
    """Epochs between validations, more of them if `min_steps` adds epochs; 0 never validates."""
    patience: NonNegativeInt = internal(default=4)
    """Validations without improvement before training stops; 0 never stops early."""
    checkpoint_minutes: float = internal(default=2.0)
    """Minutes between checkpoints; one is also written after each validation."""


@section
class SupervisedConfig(LoopConfig):
    """Sizes, batches, regularisation and validation, in addition to `LoopConfig`."""

    patience: NonNegativeInt = 4
    """Validations without improvement before training stops; 0 never stops early."""
    preset: str = "tiny"
    """Sizes of a model from scratch: `tiny`, `small` or `base`."""
    architecture: dict[str, Any] = Field(default_factory=dict)
    """Sizes that differ from the preset's (`recsys.models.architecture`)."""
    batch_tokens: PositiveInt = 4096
    """Most tokens of a batch, padding included."""
    item_dropout: Share = internal(default=0.1)
    """Share of items removed from a history, drawn again in each epoch."""
    embedding_dropout: Share = internal(default=0.0)
    """Dropout of the token embeddings."""
    label_smoothing: Share = internal(default=0.05)
    """Share of a token's probability that is spread over the vocabulary."""
    eval_users: NonNegativeInt = 1000
    """Validation users, a fixed sample."""

    def __post_init__(self) -> None:
        architecture(self.preset, self.architecture)  # refuses unknown sizes


@section
class SasRecConfig(LoopConfig):
    """Section `sasrec`."""

    epochs: NonNegativeInt = 0
    """Passes over the training histories; 0, the default, makes no model."""
    max_minutes: PositiveFloat | None = internal(default=None)
    learning_rate: float = 2e-3
    weight_decay: float = internal(default=0.0)
    warmup_steps: NonNegativeInt = 200
    evaluate_every: NonNegativeInt = 10
    patience: NonNegativeInt = internal(default=0)
    hidden: PositiveInt = internal(default=128)
    """D, width of states and item vectors."""
    layers: PositiveInt = internal(default=2)
    """Layers of attention."""
    heads: PositiveInt = internal(default=2)
    """Attention heads of a layer."""
    dropout: Share = internal(default=0.5)
    """Dropout of inputs, attention and residuals."""
    texts: bool = True
    """Whether the features of items, a projection of which is added to the item vectors, have their
    titles and texts."""
    features: FeatureConfig = internal(
        "texts: false leaves titles and texts out", default_factory=FeatureConfig
    )
    """These features (`recsys.semantic_ids.features`). With weights of 0 there are none."""
    negatives: PositiveInt = internal(default=1024)
    """Sampled items per batch."""
    soft_labels: Share = internal(default=0.5)
    """Share of the target that comes from other users."""
    batch_tokens: PositiveInt = internal(default=2048)
    """Most events of a batch, padding included."""
    item_dropout: Share = internal(default=0.0)
    """Share of items removed from a history, drawn again in each epoch."""
    window: PromptConfig = Field(default_factory=lambda: PromptConfig(50, 10))
    """How much of a history the model sees."""
    eval_users: NonNegativeInt = internal(default=2000)
    """Validation users, a fixed sample."""

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(f"hidden: {self.hidden} is not a multiple of heads, {self.heads}")
        if self.features.collaborative != "ppmi":
            raise ConfigError("features.collaborative: SASRec cannot use its own vectors; use ppmi")

    @property
    def item_features(self) -> FeatureConfig:
        """The features, without texts if they are not used."""
        return self.features if self.texts else replace(self.features, text_weight=0.0)


def check_sasrec(settings: Settings, key: str) -> None:
    """Check that a run trains the SASRec model that a setting requires.

    Raises:
        ConfigError: the settings have no epochs for SASRec; the message names `key`.
    """
    if not settings.section(SASREC, SasRecConfig).epochs:
        raise ConfigError(f"{key}: sasrec needs a SASRec model; set sasrec.epochs, 20 for a start")


def _check_folder(key: str, path: Path | None) -> None:
    if path is not None and not path.is_dir():
        raise ConfigError(f"{key}: {str(path)!r} is not a folder")


@section
class RecipeConfig:
    """Section `recipe`: settings of the IDs and the target that are chosen on validation."""

    trials: dict[str, list[str]] = Field(default_factory=dict)
    """Name -> settings that are tried together, such as `[target.soft_labels=0]`. Trials that would
    change a setting given on the command line are left out."""
    users: PositiveInt = internal(default=2000)
    """Validation users that all trials rank."""

    def check_with(self, settings: Settings) -> None:
        """Check the settings of each trial; a ConfigError names it."""
        for name, trial in self.trials.items():
            try:
                tried = settings.overridden(trial)
                tried.section("ids", IdsConfig).check_with(tried)
                tried.section("target", TargetConfig).check_with(tried)
            except ConfigError as error:
                raise ConfigError(f"recipe.trials.{name}: {error}") from error


@section
class IdsConfig:
    """Section `ids`."""

    method: Method = "rq-vae"
    """`rq-vae` and `rq-kmeans` learn codes; `imported` uses those of the data set. A run with a
    parent keeps the codes of its bundle, and places new items by their content."""
    levels: PositiveInt = 4
    """Codes of a semantic ID, L (only for learned codes, as the next two)."""
    codebook_size: int | tuple[int, ...] | None = 256
    """Codes per level, V: one number for all levels, or a list with one for each, such as
    `[4096, 64]`. None chooses by the number of items, N: the largest power of two of at most
    N / 16, from 8 to 256, but at most N."""
    features: FeatureConfig = Field(default_factory=FeatureConfig)
    """Features of items."""
    rqkmeans: RQKMeansConfig = internal(default_factory=RQKMeansConfig)
    """Settings of `rq-kmeans`."""
    rqvae: RQVAEConfig = internal(default_factory=RQVAEConfig)
    """Settings of `rq-vae`."""

    def __post_init__(self) -> None:
        sizes = self.codebook_size
        if isinstance(sizes, tuple) and len(sizes) != self.levels:
            raise ConfigError(
                f"codebook_size: {list(sizes)} has {len(sizes)} sizes, and levels is "
                f"{self.levels}; give one size for each level, or one number for all"
            )
        least = min(sizes) if isinstance(sizes, tuple) else sizes
        if least is not None and least < 2:
            raise ConfigError(f"codebook_size: expected at least 2 codes per level, got {least}")

    def check_with(self, settings: Settings) -> None:
        """Check that SASRec is trained if the features need it, or raise ConfigError."""
        if self.method in LEARNED and self.features.collaborative == "sasrec":
            check_sasrec(settings, "ids.features.collaborative")


@section
class LoraSettings:
    """Low-rank adaptation (Hu et al., 2021) of a pretrained model."""

    rank: PositiveInt = 16
    """Rank of the added matrices."""
    alpha: PositiveFloat = internal(default=32.0)
    """Their scale is alpha / rank."""
    dropout: Share = internal(default=0.05)
    """Dropout of their input."""
    modules: Annotated[tuple[str, ...], Field(min_length=1)] = internal(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    )
    """Linear layers that get such matrices."""
    merge: bool = True
    """Add them to the weights at the end; otherwise they are stored as an adapter."""


@section
class TargetConfig(SupervisedConfig):
    """Section `target`."""

    precision: Precision = "auto"
    """Precision of matrix products: `bf16`, `float32`, or `auto`, which is bf16 if the processor
    supports it in hardware."""
    weight_decay: float = 0.05
    """Weight decay of matrices; norms have none."""
    item_dropout: Share = 0.1
    """Share of items removed from a history, drawn again in each epoch."""
    embedding_dropout: Share = 0.0
    """Dropout of the token embeddings."""
    label_smoothing: Share = 0.05
    """Share of a token's probability that is spread over the vocabulary."""
    window_share: Annotated[float, Field(gt=0, le=1)] = internal(default=1.0)
    """Share of the training windows that are used; less than 1 in the trials of stage `recipe` on
    large data."""
    init_from_centroids: bool = internal(default=True)
    """Start new token embeddings from the quantiser's centroids."""
    agreement: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the early-exit KL loss (`recsys.training.objective.NextToken`)."""
    exit_layer: PositiveInt = 1
    """Number of layers before the early exit."""
    soft_labels: Share = 0.0
    """Share of the target that comes from soft labels (`recsys.training.soft_labels`)."""
    soft_labels_from: Literal["item-item", "sasrec"] = "item-item"
    """Their source: other users by `item-item`, or the run's `sasrec`."""
    prompt: PromptConfig = Field(default_factory=PromptConfig)
    """How much of a history the model sees, in training and in serving."""
    base: Folder | None = None
    """Folder of a pretrained LLaMA checkpoint with its tokenizer; replaces the preset."""
    instruction: str = internal(default="Items of one customer, oldest first:")
    """Text in front of a history, for a pretrained model."""
    update: Literal["full", "lora"] = "full"
    """What is trained of a parent's target: all weights (`full`) or LoRA's matrices. A pretrained
    model is always adapted with LoRA."""
    lora: LoraSettings = Field(default_factory=LoraSettings)
    """Settings of LoRA."""

    def check_with(self, settings: Settings) -> None:
        """Check the folder, and that SASRec is trained if soft labels need it; ConfigError."""
        _check_folder("target.base", self.base)
        if self.base is not None and settings.parent is not None:
            raise ConfigError(
                "target.base and parent: a target starts from one of them; remove the other"
            )
        if self.soft_labels and self.soft_labels_from == "sasrec":
            check_sasrec(settings, "target.soft_labels_from")


@section
class TeacherConfig:
    """Section `teacher`."""

    draft: Folder | None = None
    """Folder of a draft artifact q, of another run or variant: the mixture (q + p) / 2 is searched
    instead of the target p (AtSpeed's D')."""
    mixture: Annotated[float, Field(ge=0, le=1)] = internal(default=0.5)
    """Share of the target in the mixture (lambda of AtSpeed's eq. 3)."""
    beams: PositiveInt = 20
    """K."""
    histories: NonNegativeInt = 20_000
    """Number of training prompts, drawn from all prefixes; 0 takes all."""
    item_dropout: Share = 0.0
    """Share of items removed from the prompts, because the target has memorised its training
    histories."""
    level_tokens: bool | None = internal(default=None)
    """Also store the target's log-probs of all tokens of a node's level, for atspeed-s, which takes
    about six times the space. None: if the run's draft needs them."""
    shard: PositiveInt = internal(default=2_000)
    """Histories per file."""
    batch: PositiveInt = internal(default=64)
    """Histories that are searched together."""


@dataclass(frozen=True)
class AlignmentSettings:
    """The settings of an alignment objective.

    Attributes:
        objective: see docs/alignment.md.
        alpha: weight of the alignment loss; 1 - alpha is the weight of the recommendation loss.
            None means .5, or 1 for tree-kd and margin-kd.
        ablations: changes of the objective, as of `DraftConfig`.
        flatten: the weight of a node in tree-kd is p(prefix)^(1 / flatten).
        drafts: N of margin-kd, the prefixes of a level that the draft will propose.
        margin: weight of the margin in margin-kd.
    """

    objective: Objective = OURS
    alpha: float | None = None
    ablations: tuple[Ablation, ...] = ()
    flatten: float = 2.0
    drafts: int = 40
    margin: float = 0.3

    @property
    def align_weight(self) -> float:
        """Weight of the alignment loss."""
        if self.alpha is None:
            return 1.0 if self.objective in _COMPLETE else 0.5
        return self.alpha

    @property
    def on_whole(self) -> bool:
        """Whether distributions over the whole vocabulary are compared; the target then runs."""
        return "unconstrained" in self.ablations

    @property
    def on_levels(self) -> bool:
        """Whether the objective compares all tokens of a level, which the teacher then stores."""
        if self.on_whole or "node-tokens" in self.ablations:
            return False
        released = self.objective == "atspeed-r" and "released" in self.ablations
        return released or self.objective == "atspeed-s"


@section
class DraftConfig(SupervisedConfig):
    """Section `draft`. Vocabulary and prompt window are the target's."""

    epochs: PositiveInt = 10
    objective: Objective | Literal["auto"] = AUTO
    """What the draft learns (docs/alignment.md). `auto` is the one of margin-kd, atspeed-s and
    atspeed-r that saves most passes on validation after equal times, or margin-kd if the stage has
    less than two minutes. Runs that name an objective train a draft on any machine."""
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight of the alignment loss; 1 - alpha is the weight of the recommendation loss. None means
    .5, or 1 for tree-kd and margin-kd."""
    ablations: tuple[Ablation, ...] = ()
    """How the objective is changed, for those who study it: `released` (atspeed-s and atspeed-r as
    in the authors' code), `no-density` (no density regularisation in atspeed-s), `node-tokens`
    (atspeed-s compares only tokens that the trie allows at a node), `unconstrained` (compare the
    whole vocabulary), `top-1` (learn from the best sequence only), `last-beams` (only from those of
    the last step)."""
    base: Folder | None = None
    """Folder of a pretrained checkpoint with its tokenizer, which must be the target's; replaces
    the sizes, `layers` and `init_from_target`. A run with a parent continues from the parent's
    draft instead."""
    lora: LoraSettings | None = None
    """Settings for adapting a pretrained draft with LoRA; None trains all its weights."""
    layers: PositiveInt = 1
    """Decoder layers."""
    init_from_target: bool = True
    """Take the target's sizes and start as its embeddings, head and first layers; otherwise the
    preset's sizes and random weights."""
    accept_users: NonNegativeInt = 200
    """Validation users for whom acceptance is measured; 0 for none."""
    accept_beams: PositiveInt = internal(default=20)
    """K of these searches."""
    accept_nodes: PositiveInt = internal(default=256)
    """Nodes of their draft trees."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha == 1 and self.objective == "atspeed-s-eq4":
            raise ConfigError(
                "alpha: with 1, atspeed-s-eq4 has no recommendation loss and moves all probability "
                "of the draft to one token; use a smaller alpha, or atspeed-s"
            )
        if "no-density" in self.ablations and self.objective == "atspeed-s-eq4":
            raise ConfigError(
                "ablations: without density regularisation, atspeed-s-eq4 rewards probability "
                "outside of V_c; use atspeed-s, which renormalises"
            )
        if self.lora is not None and self.base is None:
            raise ConfigError("lora: adapts a pretrained draft; give draft.base, or leave lora out")

    @property
    def alignment(self) -> AlignmentSettings:
        """The settings of the objective."""
        objective = OURS if self.objective == AUTO else self.objective
        return AlignmentSettings(objective, self.alpha, self.ablations)

    def check_with(self, settings: Settings) -> None:
        """Check the folder of the base, which a run with a parent does not read; ConfigError."""
        if settings.parent is None:
            _check_folder("draft.base", self.base)


@section
class RetrievalConfig:
    """Section `retrieval`."""

    candidates: NonNegativeInt = 40
    """Items that pair rules propose to the reranker; each further source proposes half as many, and
    popularity a quarter."""
    nodes: NonNegativeInt = internal(default=32)
    """Nodes of the target's tree that the candidates of a served list may use."""
    beams: PositiveInt = internal(default=20)
    """Beam width of the search for fitting the reranker."""
    users: NonNegativeInt = 10_000
    """Validation users for fitting the reranker, at most; 0 fits none."""


@section
class BundleConfig:
    """Section `bundle`."""

    refit: bool = True
    """Whether SASRec learns from events of validation and test, too, before it is served."""
