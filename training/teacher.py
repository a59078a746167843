"""Stage `teacher`: stores beam searches of training histories with the target's log-probs.

For a sample of training prompts the artifact has the beam search of the target (or of a mixture of
target and draft) level by level, and at each of its nodes the target's log-probs of the tokens that
the trie allows. They are normalised over the whole vocabulary, so that the remaining probability is
known too, and stored in half precision: about 5 KB per history. For an objective that compares all
tokens of a level, those are stored as well.

The work is divided into shards. Each depends on settings and parents alone and is written
atomically, so that a killed run resumes after its last shard and ends with the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from recsys.artifacts import read_manifest
from recsys.config import as_dict, build
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.dataset import Dataset
from recsys.decoding.tree import NO_TOKEN, ROOT, PromptBatch, TokenTree
from recsys.errors import ArtifactError, ConfigError
from recsys.interactions import Histories
from recsys.models.tree_forward import TreeModel
from recsys.pipeline import Context
from recsys.progress import say, track
from recsys.training.settings import DraftConfig, TeacherConfig
from recsys.training.target import TrainedTarget, load_trained
from recsys.training.tree import child_tokens, level_tokens

KIND = "teacher"
SHARDS = "shard-*.safetensors"
LIMITED_BATCHES = 4  # of a shard, where the time is limited


@dataclass(frozen=True)
class Prompts:
    """The prompts of the teacher: prefixes of training histories, shortest first.

    Attributes:
        histories: n sequences of items.
        following: (n,) int32 next training item; -1 at the end of a history.
    """

    histories: Histories
    following: NDArray[np.int32]

    @classmethod
    def sample(
        cls,
        histories: Histories,
        count: int,
        seed: int,
        *,
        item_dropout: float = 0.0,
        held_out: NDArray[np.int32] | None = None,
    ) -> Prompts:
        """Draw prompts among all prefixes of all histories.

        Whole histories are included: no training item follows them, but serving uses whole
        histories, and the target's distribution is known.

        Args:
            histories: training events.
            count: number of prompts; 0 takes all.
            seed: of the draw.
            item_dropout: share of items removed from the drawn prompts; the last item is kept.
            held_out: histories that are not used as a whole, because drafts are measured on them.
        """
        rng = np.random.default_rng(seed)
        longest = histories.lengths.copy()
        if held_out is not None:
            longest[held_out] -= 1
        own = np.maximum(longest, 0)
        rows = np.repeat(np.arange(len(histories)), own)
        lengths = np.arange(own.sum()) - np.repeat(np.cumsum(own) - own, own) + 1
        if count and count < len(rows):
            chosen = rng.choice(len(rows), count, replace=False)
            rows, lengths = rows[chosen], lengths[chosen]
        after = histories.offsets[rows] + lengths
        following = np.append(histories.items, -1)[after]
        following = np.where(lengths < histories.lengths[rows], following, -1)
        prompts = histories.prefixes(rows, lengths)
        if item_dropout:
            keep = rng.random(len(prompts.items)) >= item_dropout
            keep[prompts.offsets[1:] - 1] = True
            prompts = prompts.where(keep)
        order = np.lexsort((np.arange(len(prompts)), prompts.lengths))
        return cls(prompts.take(order), following[order].astype(np.int32))

    def __len__(self) -> int:
        return len(self.following)

    def take(self, positions: NDArray[np.int64]) -> Prompts:
        """A subset."""
        return Prompts(self.histories.take(positions), self.following[positions])


@dataclass(frozen=True)
class Trees:
    """Beam searches, level by level, with the target's log-probs at their nodes.

    Attributes:
        states: (n, L, K) int32 trie states of the best K prefixes of each length, ascending, filled
            up with -1.
        parents: (n, L, K) int32 place of each state's parent in the level above.
        scores: (n, L, K) float32 sum of log-probs of the model that was searched; -inf for -1.
        log_probs: float16, the target's log-probs of the children of the root, then of the states
            of levels 1 .. L - 1, one after another.
        starts: (n + 1,) int64; start of each tree's log-probs.
        level_log_probs: (n, S) float16, the target's log-probs of all tokens of a level: V of the
            first level at the root, then V of the following level at each of K states, level by
            level. Arbitrary at states that are -1; S = 0 where they are not kept.
    """

    states: NDArray[np.int32]
    parents: NDArray[np.int32]
    scores: NDArray[np.float32]
    log_probs: NDArray[np.float16]
    starts: NDArray[np.int64]
    level_log_probs: NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.states)

    def split_levels(
        self, positions: NDArray[np.int64], sizes: Sequence[int]
    ) -> list[NDArray[np.float32]]:
        """(n, 1 or K, V) `level_log_probs` of the nodes of depth 0 .. L - 1; `sizes` are the V."""
        widths = [1] + [self.states.shape[2]] * (len(sizes) - 1)
        ends = np.cumsum([w * v for w, v in zip(widths, sizes, strict=True)])
        parts = np.split(self.level_log_probs[positions].astype(np.float32), ends[:-1], axis=1)
        return [
            part.reshape(len(positions), w, v)
            for part, w, v in zip(parts, widths, sizes, strict=True)
        ]

    def children_log_probs(
        self, positions: NDArray[np.int64], trie: ItemTrie
    ) -> list[NDArray[np.float32]]:
        """(n, 1 or K, C) log-probs of the nodes of depth 0 .. L - 1, padded with -inf."""
        states = self.states[positions]
        starts, stops = self.starts[positions], self.starts[positions + 1]
        children = np.diff(trie.first_child.astype(np.int64))
        children = np.append(children, 0)  # the last entry is for state -1
        above = [np.zeros_like(states[:, 0, :1]), *states[:, :-1].transpose(1, 0, 2)]
        real = [
            np.arange(width) < children[nodes][..., None]
            for width, nodes in zip(trie.branching, above, strict=True)
        ]
        flat = np.concatenate([r.reshape(len(positions), -1) for r in real], axis=1)
        values = np.full(flat.shape, -np.inf, np.float32)
        lengths = stops - starts
        ends = np.cumsum(lengths)
        source = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        values[flat] = self.log_probs[source]
        widths = np.cumsum([r[0].size for r in real])[:-1]
        parts = np.split(values, widths, axis=1)
        return [part.reshape(r.shape) for part, r in zip(parts, real, strict=True)]

    @classmethod
    def concatenate(cls, parts: Sequence[Trees]) -> Trees:
        """Join several sets of trees."""
        names = [field.name for field in fields(cls)]
        joined = {n: np.concatenate([getattr(part, n) for part in parts]) for n in names}
        lengths = np.concatenate([np.diff(part.starts) for part in parts])
        joined["starts"] = np.append(0, np.cumsum(lengths)).astype(np.int64)
        return cls(**joined)


@torch.inference_mode()
def search_trees(
    target: Any,
    prompts: Sequence[NDArray[np.int64]],
    trie: DeviceTrie,
    num_beams: int,
    *,
    draft: Any = None,
    mixture: float = 1.0,
    levels_of: Sequence[torch.Tensor] = (),
) -> Trees:
    """Constrained beam search of the target or a mixture, with the target's log-probs at its nodes.

    The score of a prefix under the mixture is `sum_t log((1 - m) q(y_t) + m p(y_t))` with p and q
    over the whole vocabulary. With m = 1 the levels are those of `recsys.decoding.beam_search`.

    Args:
        target: p, a causal LM.
        prompts: token ids, at least one per prompt.
        trie: the catalog, on the target's device.
        num_beams: K.
        draft: q, or None to search with the target alone.
        mixture: m.
        levels_of: `level_tokens` of the trie, if the log-probs of all of them are kept.
    """
    models = [TreeModel.of(model) for model in (target, draft) if model is not None]
    levels, device = trie.source.num_levels, trie.device
    states = torch.zeros((len(prompts), 1), dtype=torch.int64, device=device)
    scores = torch.zeros((len(prompts), 1), dtype=models[0].score_dtype, device=device)
    chosen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    stored, real = [], []
    on_levels = [torch.zeros((len(prompts), 0), dtype=torch.float16, device=device)]
    with ExitStack() as lent:
        trees = [
            lent.enter_context(
                TokenTree(
                    model, PromptBatch.of(prompts, model, levels - 1), (levels - 1) * num_beams
                )
            )
            for model in models
        ]
        for depth in range(levels):
            below, tokens, alive = child_tokens(trie, states, depth)
            whole = [_log_probs(tree) for tree in trees]
            if levels_of:
                on_levels.append(whole[0][..., levels_of[depth]].half().flatten(1))
            steps = [log_probs.gather(-1, tokens) for log_probs in whole]
            stored.append(steps[0].half().flatten(1))
            real.append(alive.flatten(1))
            step = steps[0]
            if draft is not None:
                shares = step.new_tensor([mixture, 1 - mixture]).log()
                step = torch.logaddexp(steps[0] + shares[0], steps[1] + shares[1])
            worth = (scores[..., None] + step).masked_fill(~alive, -torch.inf).flatten(1)
            best = worth.sort(dim=-1, descending=True, stable=True).indices[:, :num_beams]
            best = best.sort(dim=-1).values  # row order, the order of candidates
            scores = _pad(worth.gather(1, best), num_beams, -torch.inf)
            parents = _pad(best // below.shape[-1], num_beams, 0)
            states = _pad(below.flatten(1).gather(1, best), num_beams, 0)
            states = states.masked_fill(scores == -torch.inf, -1)
            chosen.append((states, parents, scores))
            if depth + 1 < levels:
                tokens = _pad(tokens.flatten(1).gather(1, best), num_beams, NO_TOKEN)
                above = parents + (depth - 1) * num_beams
                above = above if depth else torch.full_like(parents, ROOT)
                for tree in trees:
                    tree.add(tokens, above, depth + 1)
    is_real = torch.cat(real, dim=1)
    starts = torch.nn.functional.pad(is_real.sum(1).cumsum(0), (1, 0))
    states, parents, scores = (torch.stack(part, dim=1) for part in zip(*chosen, strict=True))
    return Trees(
        states.cpu().numpy().astype(np.int32),
        parents.cpu().numpy().astype(np.int32),
        scores.cpu().numpy().astype(np.float32),
        torch.cat(stored, dim=1)[is_real].cpu().numpy(),
        starts.cpu().numpy(),
        torch.cat(on_levels, dim=1).cpu().numpy(),
    )


def _log_probs(tree: TokenTree) -> torch.Tensor:
    """(B, W, V) log-probs after the prompts, or after the nodes that were added last."""
    logits = tree.forward()
    tree.note(logits.amax(-1))
    return logits.log_softmax(-1)


def _pad(values: torch.Tensor, width: int, fill: float) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)


@dataclass(frozen=True)
class Teacher:
    """The `teacher` artifact in memory.

    Attributes:
        prompts: the prompts that were searched, those of one shard after another.
        trees: the results.
        config: the settings.
    """

    prompts: Prompts
    trees: Trees
    config: TeacherConfig

    @classmethod
    def load(cls, path: Path) -> Teacher:
        """Read the artifact.

        Raises:
            ArtifactError: it is missing, or a shard is incomplete.
        """
        manifest = read_manifest(path, KIND)
        values = {k: v for k, v in manifest.config.items() if k != "seed"}
        try:
            shards = [load_file(file) for file in sorted(path.glob(SHARDS))]
            prompts = Prompts(
                Histories.of(
                    items
                    for shard in shards
                    for items in Histories(shard["offsets"], shard["items"])
                ),
                np.concatenate([shard["following"] for shard in shards]),
            )
            names = [field.name for field in fields(Trees)]
            trees = Trees.concatenate([Trees(**{n: shard[n] for n in names}) for shard in shards])
        except (KeyError, OSError, ValueError) as error:
            raise ArtifactError(
                f"{path}: {error}; run `recsys train teacher --force` again"
            ) from error
        return cls(prompts, trees, build(TeacherConfig, values, where=KIND))


def stage(context: Context, on_levels: bool | None = None, minutes: float = math.inf) -> Path:
    """Write the `teacher` artifact of a run: `shard-<n>.safetensors`.

    Args:
        context: of the run.
        on_levels: as the setting `level_tokens`; None: if the objective of the draft needs them.
        minutes: time limit of the searches, unless the settings say how many histories there are.

    Raises:
        ConfigError: settings that do not fit each other or the data.
        ArtifactError: data set, IDs, target or (for a mixture) draft are missing.
    """
    workspace = context.workspace
    config = context.settings.section(KIND, TeacherConfig)
    if config.level_tokens is None:
        if on_levels is None:
            on_levels = context.settings.section("draft", DraftConfig).alignment.on_levels
        config = replace(config, level_tokens=on_levels)
    limited = not (math.isinf(minutes) or context.settings.sets(KIND, "histories"))
    end = time.monotonic() + 60 * minutes if limited else math.inf
    parents = workspace.digests("dataset", "ids", "target")
    if config.draft is not None:
        parents["draft"] = read_manifest(config.draft, "draft").digest
    settings = as_dict(config) | {"seed": context.settings.seed}
    output = context.output(KIND, settings, parents)
    if output.is_current():
        return output.path
    accelerator = Accelerator()
    partial = workspace.run(f"{KIND}.partial")
    size = LIMITED_BATCHES * config.batch if limited else config.shard
    if accelerator.is_main_process:
        _open_partial(partial, {**settings, "parents": parents, "size": size}, anew=context.force)
    accelerator.wait_for_everyone()
    target = TrainedTarget.load(workspace)
    dataset = Dataset.load(workspace.dataset)
    held_out = [dataset.examples(split).users for split in ("valid", "test")]
    prompts = Prompts.sample(
        dataset.train_histories, config.histories, context.settings.seed,
        item_dropout=config.item_dropout, held_out=np.unique(np.concatenate(held_out)),
    )  # fmt: skip
    if not len(prompts):
        raise ConfigError("no training history has an item")
    device = accelerator.device if accelerator.num_processes > 1 else torch.device(target.device)
    trie = DeviceTrie.of(ItemTrie.build(target.encoder.item_tokens), device)
    model = target.load_model(device)
    draft = None if config.draft is None else load_trained(config.draft, device)
    levels_of = level_tokens(trie) if config.level_tokens else ()

    def search(part: Prompts) -> Trees:
        return search_trees(
            model, target.encoder.encode_all(part.histories), trie, config.beams,
            draft=draft, mixture=config.mixture, levels_of=levels_of,
        )  # fmt: skip

    count = -(-len(prompts) // size)
    # Every shard has prompts of all lengths, so that those written before the end are a sample.
    shards = {
        partial / f"shard-{number:05d}.safetensors": prompts.take(
            np.arange(number, len(prompts), count)
        )
        for number in range(count)
    }
    mine = list(shards)[accelerator.process_index :: accelerator.num_processes]
    _write_shards({file: shards[file] for file in mine}, search, config.batch, end)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        written = [len(part) for file, part in shards.items() if file.exists()]
        info = {"histories": sum(written), "shards": len(written)}
        with output.write(info) as folder:
            for file in sorted(partial.glob(SHARDS)):
                shutil.copyfile(file, folder / file.name)
            info["bytes"] = sum(file.stat().st_size for file in folder.iterdir())
        shutil.rmtree(partial)
    accelerator.wait_for_everyone()
    return output.path


def _write_shards(
    shards: dict[Path, Prompts], search: Callable[[Prompts], Trees], batch: int, end: float
) -> None:
    """Search the prompts of each shard that has no file yet; after `end` begin no other one."""
    missing = {file: part for file, part in shards.items() if not file.exists()}
    if len(missing) < len(shards):
        say(f"teacher: {len(shards) - len(missing)} of {len(shards)} shards are there already")
    with track("teacher", sum(map(len, missing.values()))) as bar:
        for file, part in missing.items():
            if time.monotonic() > end and any(file.exists() for file in shards):
                break
            searches = []
            for at in range(0, len(part), batch):
                some = part.take(np.arange(at, min(at + batch, len(part))))
                searches.append(search(some))
                bar.advance(len(some))
            _save_shard(file, part, Trees.concatenate(searches))


def _open_partial(folder: Path, run: dict[str, Any], *, anew: bool) -> None:
    """Keep the shards of an interrupted run with the same identity, delete those of another."""
    run = json.loads(json.dumps(run, default=str))
    identity = folder / "run.json"
    known = json.loads(identity.read_text(encoding="utf-8")) if identity.is_file() else None
    if anew or known != run:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    identity.write_text(json.dumps(run), encoding="utf-8")


def _save_shard(file: Path, prompts: Prompts, trees: Trees) -> None:
    """Write a shard under another name and rename it, so that it is always complete."""
    temporary = file.with_name(f".{file.name}")
    histories = prompts.histories
    arrays = {
        "offsets": histories.offsets,
        "items": histories.items,
        "following": prompts.following,
        **vars(trees),
    }
    save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, temporary)
    with temporary.open("rb") as stream:
        os.fsync(stream.fileno())
    temporary.rename(file)
