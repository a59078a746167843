"""Sections of the training stages: their settings, and how they depend on each other.

This module imports no torch, so that a run can check the settings of all stages before the first.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from recsys.config import Settings, check_bounds
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
ON_TREES = ("seqkd", "atspeed-s", "atspeed-s-eq4", "atspeed-r", "tree-kd", "margin-kd")
# Objectives whose optimum is the target itself need no recommendation loss.
_COMPLETE = ("tree-kd", "margin-kd")


@dataclass(frozen=True)
class LoopConfig:
    """Settings of the training loop.

    Attributes:
        epochs: passes over the training windows, at most.
        min_steps: few data need more passes: epochs are added until there are this many steps.
        max_steps: steps at most, at which the schedule then ends.
        max_minutes: time budget, including validation. Training ends when either budget is spent.
            The schedule follows the clock if the steps do not fit into the time.
        learning_rate: peak of the schedule.
        min_learning_rate: end of the schedule, as a share of the peak.
        warmup_steps: steps of linear warm-up, followed by a cosine decay.
        weight_decay: of matrices; norms have none.
        beta2: of AdamW.
        clip: largest norm of the gradient; 0 does not clip.
        accumulate: batches per step.
        precision: of matrix products: `bf16`, `float32`, or `auto`, which is bf16 if the processor
            supports it in hardware.
        threads: of torch in each process; 0 keeps its default.
        evaluate_every: epochs between validations, more of them if `min_steps` adds epochs; 0 never
            validates.
        patience: validations without improvement before training stops; 0 never stops early.
        checkpoint_minutes: between checkpoints; one is also written after each validation.
        tensorboard: also write TensorBoard events (extra `tensorboard`).
    """

    epochs: int = 30
    min_steps: int = 0
    max_steps: int | None = None
    max_minutes: float | None = None
    learning_rate: float = 3e-3
    min_learning_rate: float = 0.0
    warmup_steps: int = 100
    weight_decay: float = 0.05
    beta2: float = 0.98
    clip: float = 1.0
    accumulate: int = 1
    precision: Literal["auto", "bf16", "float32"] = "auto"
    threads: int = 0
    evaluate_every: int = 5
    patience: int = 4
    checkpoint_minutes: float = 2.0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        least = {"epochs": 1, "min_steps": 0, "accumulate": 1, "evaluate_every": 0}
        check_bounds(self, at_least=least, above_zero=["max_minutes", "max_steps"])


@dataclass(frozen=True)
class SupervisedConfig(LoopConfig):
    """Sizes, batches, regularisation and validation, in addition to `LoopConfig`.

    Attributes:
        preset: sizes of a model from scratch: `tiny`, `small` or `base`.
        architecture: sizes that differ from the preset's (`recsys.models.architecture`).
        batch_tokens: most tokens of a batch, padding included.
        min_context: items that an item needs before it to be predicted; 0 also predicts the first.
        item_dropout: share of items removed from a history, drawn again in each epoch.
        embedding_dropout: of the token embeddings.
        label_smoothing: share of a token's probability that is spread over the vocabulary.
        eval_users: validation users, a fixed sample.
        eval_beams: width of their beam search.
    """

    preset: str = "tiny"
    architecture: dict[str, Any] = field(default_factory=dict)
    batch_tokens: int = 4096
    min_context: int = 1
    item_dropout: float = 0.1
    embedding_dropout: float = 0.0
    label_smoothing: float = 0.05
    eval_users: int = 1000
    eval_beams: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, below_one=["item_dropout", "embedding_dropout", "label_smoothing"])
        if self.eval_beams < 10:
            raise ConfigError(f"eval_beams: NDCG@10 needs at least 10, got {self.eval_beams}")
        architecture(self.preset, self.architecture)  # refuses unknown sizes


@dataclass(frozen=True)
class SasRecConfig(LoopConfig):
    """Section `sasrec`.

    Attributes:
        epochs: as `LoopConfig`; 0, the default, makes no model.
        hidden: D, width of states and item vectors.
        layers: of attention.
        heads: per layer.
        dropout: of inputs, attention and residuals.
        features: of items (`recsys.semantic_ids.features`); a projection of them is added to the
            item vectors. With weights of 0 there are none.
        negatives: sampled items per batch.
        soft_labels: share of the target that comes from other users.
        batch_tokens: most events of a batch, padding included.
        item_dropout: share of items removed from a history, drawn again in each epoch.
        window: how much of a history the model sees.
        eval_users: validation users, a fixed sample.
    """

    epochs: int = 0
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    warmup_steps: int = 200
    evaluate_every: int = 10
    patience: int = 0
    hidden: int = 128
    layers: int = 2
    heads: int = 2
    dropout: float = 0.5
    features: FeatureConfig = field(default_factory=FeatureConfig)
    negatives: int = 1024
    soft_labels: float = 0.5
    batch_tokens: int = 2048
    item_dropout: float = 0.0
    window: PromptConfig = field(default_factory=lambda: PromptConfig(50, 10))
    eval_users: int = 2000

    def __post_init__(self) -> None:
        if self.epochs:
            super().__post_init__()
        sizes = dict.fromkeys(("hidden", "layers", "heads", "negatives"), 1)
        check_bounds(self, at_least=sizes, below_one=["dropout", "soft_labels", "item_dropout"])
        if self.hidden % self.heads:
            raise ConfigError(f"hidden: {self.hidden} is not a multiple of heads, {self.heads}")
        if self.features.collaborative != "ppmi":
            raise ConfigError("features.collaborative: SASRec cannot use its own vectors; use ppmi")


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


@dataclass(frozen=True)
class RecipeConfig:
    """Section `recipe`: settings of the IDs and the target that are chosen on validation.

    Attributes:
        trials: name -> settings that are tried together, such as `[target.soft_labels=0]`. Trials
            that would change a setting given on the command line are left out.
        users: validation users that all trials rank.
    """

    trials: dict[str, Any] = field(default_factory=dict)
    users: int = 2000

    def __post_init__(self) -> None:
        check_bounds(self, at_least={"users": 1})
        for name, trial in self.trials.items():
            if not (isinstance(trial, list) and all(isinstance(text, str) for text in trial)):
                raise ConfigError(
                    f"trials.{name}: expected a list such as [target.soft_labels=0], got {trial!r}"
                )

    def check_with(self, settings: Settings) -> None:
        """Check the settings of each trial.

        Raises:
            ConfigError: one of them is wrong; the message names the trial.
        """
        for name, trial in self.trials.items():
            try:
                tried = settings.overridden(trial)
                tried.section("ids", IdsConfig).check_with(tried)
                tried.section("target", TargetConfig).check_with(tried)
            except ConfigError as error:
                raise ConfigError(f"recipe.trials.{name}: {error}") from error


@dataclass(frozen=True)
class IdsConfig:
    """Section `ids`.

    Attributes:
        method: `rq-vae` and `rq-kmeans` learn codes; `imported` uses those of the data set. A run
            with a parent keeps the codes of its bundle, and places new items by their content.
        levels: codes of a semantic ID, L (only for learned codes, as the next two).
        codebook_size: codes per level, V: one number for all levels, or a list with one for each,
            such as `[4096, 64]`. None chooses by the number of items, N: the largest power of two
            of at most N / 16, from 8 to 256, but at most N.
        features: of items.
        rqkmeans: settings of `rq-kmeans`.
        rqvae: settings of `rq-vae`.
    """

    method: Method = "rq-vae"
    levels: int = 4
    codebook_size: int | tuple[int, ...] | None = 256
    features: FeatureConfig = field(default_factory=FeatureConfig)
    rqkmeans: RQKMeansConfig = field(default_factory=RQKMeansConfig)
    rqvae: RQVAEConfig = field(default_factory=RQVAEConfig)

    def __post_init__(self) -> None:
        check_bounds(self, at_least={"levels": 1})
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
        """Check that the other sections give what this one needs.

        Raises:
            ConfigError: the features need SASRec and it is not trained.
        """
        if self.method in LEARNED and self.features.collaborative == "sasrec":
            check_sasrec(settings, "ids.features.collaborative")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adaptation (Hu et al., 2021) of a pretrained model.

    Attributes:
        rank: of the added matrices.
        alpha: their scale is alpha / rank.
        dropout: of their input.
        modules: linear layers that get such matrices.
        merge: add them to the weights at the end; otherwise they are stored as an adapter.

    Raises:
        ConfigError: a value out of range.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.05
    modules: tuple[str, ...] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    merge: bool = True

    def __post_init__(self) -> None:
        least = {"rank": 1}
        check_bounds(self, at_least=least, above_zero=["alpha"], below_one=["dropout"])
        if not self.modules:
            raise ConfigError("modules: empty; name linear layers, such as q_proj and v_proj")


@dataclass(frozen=True)
class TargetConfig(SupervisedConfig):
    """Section `target`.

    Attributes:
        window_share: share of the training windows that are used; less than 1 in the trials of
            stage `recipe` on large data.
        init_from_centroids: start new token embeddings from the quantiser's centroids.
        agreement: weight of the early-exit KL loss (`recsys.training.objective.NextToken`).
        exit_layer: number of layers before the early exit.
        soft_labels: share of the target that comes from soft labels
            (`recsys.training.soft_labels`).
        soft_labels_from: their source: other users by `item-item`, or the run's `sasrec`.
        prompt: how much of a history the model sees, in training and in serving.
        base: folder of a pretrained LLaMA checkpoint with its tokenizer; replaces the preset.
        instruction: text in front of a history, for a pretrained model.
        update: what is trained of a parent's target: all weights (`full`) or LoRA's matrices. A
            pretrained model is always adapted with LoRA.
        lora: settings of LoRA.
    """

    window_share: float = 1.0
    init_from_centroids: bool = True
    agreement: float = 0.0
    exit_layer: int = 1
    soft_labels: float = 0.0
    soft_labels_from: Literal["item-item", "sasrec"] = "item-item"
    prompt: PromptConfig = field(default_factory=PromptConfig)
    base: Path | None = None
    instruction: str = "Items of one customer, oldest first:"
    update: Literal["full", "lora"] = "full"
    lora: LoraSettings = field(default_factory=LoraSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self, at_least={"agreement": 0, "exit_layer": 1}, below_one=["soft_labels"])
        if not 0 < self.window_share <= 1:
            raise ConfigError(
                f"window_share: expected 0 < window_share <= 1, got {self.window_share}"
            )

    def check_with(self, settings: Settings) -> None:
        """Check that the other sections give what this one needs.

        Raises:
            ConfigError: a folder is not there, or soft labels need SASRec and it is not trained.
        """
        _check_folder("target.base", self.base)
        if self.base is not None and settings.parent is not None:
            raise ConfigError(
                "target.base and parent: a target starts from one of them; remove the other"
            )
        if self.soft_labels and self.soft_labels_from == "sasrec":
            check_sasrec(settings, "target.soft_labels_from")


@dataclass(frozen=True)
class TeacherConfig:
    """Section `teacher`.

    Attributes:
        source: the model to search with: the target p, or `(1 - mixture) q + mixture p`.
        mixture: share of the target in the mixture (lambda of AtSpeed's eq. 3).
        draft: folder of the draft artifact q; by default the run's own. Its weights are read only
            while the teacher data are made.
        beams: K.
        histories: number of training prompts, drawn from all prefixes; 0 takes all.
        min_context: items of a prompt, at least.
        item_dropout: share of items removed from the prompts, because the target has memorised its
            training histories.
        level_tokens: also store the target's log-probs of all tokens of a node's level, for
            atspeed-s, which takes about six times the space. None: if the run's draft needs them.
        shard: histories per file.
        batch: histories that are searched together.
        threads: of torch in each process; 0 keeps its default.
    """

    source: Literal["target", "mixture"] = "target"
    mixture: float = 0.5
    draft: Path | None = None
    beams: int = 20
    histories: int = 20_000
    min_context: int = 1
    item_dropout: float = 0.0
    level_tokens: bool | None = None
    shard: int = 2_000
    batch: int = 64
    threads: int = 0

    def __post_init__(self) -> None:
        least = {"beams": 1, "histories": 0, "shard": 1, "batch": 1}
        check_bounds(self, at_least=least, below_one=["item_dropout"])
        if not 0 <= self.mixture <= 1:
            raise ConfigError(f"mixture: expected 0 <= lambda <= 1, got {self.mixture}")


@dataclass(frozen=True)
class AlignmentSettings:
    """The settings of an alignment objective.

    Attributes:
        objective: see docs/alignment.md.
        alpha: weight of the alignment loss; 1 - alpha is the weight of the recommendation loss.
            None means .5, or 1 for tree-kd and margin-kd.
        beam_steps: whether the sequences of a history are the beams of every step, or of the last.
        density: keep the density regularisation of atspeed-s.
        level_tokens: atspeed-s compares all tokens of a node's level, as released; False: only
            those that the trie allows at the node.
        softmax_temperature: of atspeed-s (`recsys.training.losses.atspeed_s`); None renormalises.
        constrained: compare distributions over tokens of the catalog. False compares them over the
            whole vocabulary, for which the target runs again in every training step.
        top_k: learn from all K sequences; False: only from the best one.
        tree_attention: one row per history; False: one row per node.
        flatten: the weight of a node in tree-kd is p(prefix)^(1 / flatten).
        drafts: N of margin-kd, the prefixes of a level that the draft will propose.
        margin: weight of the margin in margin-kd.
    """

    objective: Objective = "sft"
    alpha: float | None = None
    beam_steps: Literal["all", "last"] = "all"
    density: bool = True
    level_tokens: bool = True
    softmax_temperature: float | None = None
    constrained: bool = True
    top_k: bool = True
    tree_attention: bool = True
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
    def on_levels(self) -> bool:
        """Whether the objective compares all tokens of a level, which the teacher then stores."""
        return self.objective == "atspeed-s" and self.level_tokens and self.constrained


@dataclass(frozen=True)
class DraftConfig(AlignmentSettings, SupervisedConfig):
    """Section `draft`, with the objective's. Vocabulary and prompt window are the target's.

    Attributes:
        base: folder of a pretrained checkpoint with its tokenizer, which must be the target's;
            replaces the sizes, `layers` and `init_from_target`. A run with a parent continues
            from the parent's draft instead.
        lora: settings for adapting a pretrained draft with LoRA; None trains all its weights.
        layers: decoder layers.
        init_from_target: take the target's sizes and start as its embeddings, head and first
            layers; otherwise the preset's sizes and random weights.
        on_policy: number of batches after which trees are searched again, with a mixture of the
            target and the current draft; 0 uses only the teacher artifact.
        accept_users: validation users for whom acceptance is measured; 0 for none.
        accept_beams: K of these searches.
        accept_nodes: nodes of their draft trees.
    """

    base: Path | None = None
    lora: LoraSettings | None = None
    layers: int = 1
    init_from_target: bool = True
    on_policy: int = 0
    accept_users: int = 200
    accept_beams: int = 20
    accept_nodes: int = 256
    epochs: int = 10
    evaluate_every: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha: expected 0 <= alpha <= 1, got {self.alpha}")
        if self.alpha == 1 and self.objective == "atspeed-s-eq4":
            raise ConfigError(
                "alpha: with 1, atspeed-s-eq4 has no recommendation loss and moves all probability "
                "of the draft to one token; use a smaller alpha, or atspeed-s"
            )
        if not self.density and self.objective == "atspeed-s-eq4":
            raise ConfigError(
                "density: without it, atspeed-s-eq4 rewards probability outside of V_c; use "
                "atspeed-s, which renormalises"
            )
        if self.lora is not None and self.base is None:
            raise ConfigError("lora: adapts a pretrained draft; give draft.base, or leave lora out")
        check_bounds(
            self,
            at_least={"drafts": 1, "margin": 0},
            above_zero=["flatten", "softmax_temperature"],
        )

    def check_with(self, settings: Settings) -> None:
        """Check what lies outside of this section.

        Raises:
            ConfigError: the folder of the base is not there. A run with a parent does not read it.
        """
        if settings.parent is None:
            _check_folder("draft.base", self.base)


@dataclass(frozen=True)
class RetrievalConfig:
    """Section `retrieval`.

    Attributes:
        window: see `ItemItem.directional`, as for the next four.
        reverse: see `ItemItem.directional`.
        source_damping: see `ItemItem.directional`.
        target_damping: see `ItemItem.directional`.
        decay: see `ItemItem.directional`.
        half_life_days: of popularity; with None, or without times, all events count equally.
        smoothing: share of popularity in p_retrieval (`recsys.retrieval.Retrieval`).
        vectors: store item vectors: the features that the semantic IDs were learned from, and the
            features of SASRec, as far as the run has them.
        near: number of nearest items by vectors that share each item's weight.
        near_share: share of an item's weight that they get (`ItemItem.with_near`).
        candidates: items that item-item proposes to the reranker; each further source proposes
            half as many, and popularity a quarter.
        nodes: of the target's tree that the candidates may use.
        beams: beam width of the search for fitting the reranker.
        users: validation users for fitting the reranker, at most; 0 fits none.
        ablate: whether to measure what each source adds to the reranker, which takes several times
            as long as the rest of the stage. For those who study the sources; lists do not change.
    """

    window: int = 5
    reverse: float = 0.5
    source_damping: float = 0.5
    target_damping: float = 0.0
    decay: float = 0.6
    half_life_days: float | None = None
    smoothing: float = 0.03
    vectors: bool = True
    near: int = 50
    near_share: float = 0.0
    candidates: int = 40
    nodes: int = 32
    beams: int = 20
    users: int = 10_000
    ablate: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.near_share <= 1:
            raise ConfigError(f"near_share: expected 0 <= near_share <= 1, got {self.near_share}")
        least = {"near": 1, "candidates": 0, "nodes": 0, "beams": 1, "users": 0}
        check_bounds(self, at_least=least)
