"""Quality of a target against the passes that it needs, by the size of its draft.

    python benchmarks/frontier.py configs/atspeed-beauty.yaml --agreements 0 0.8 --out FOLDER

A target that is trained with an early-exit loss (`target.agreement`) is easier to predict and
recommends less well. For each weight of that loss a target is trained, then drafts of several
sizes: one from scratch and those cut from the target's first layers, by one objective, with equal
steps. Passes are those of strict speculative search over test users, by the number of nodes of a
draft tree; every list is compared with beam search's before it counts. The target's Recall@10 is
that of its validation users. FLOPs are those of layers and head for a token, without attention. The
table is followed by one JSON line; the plot is written to `--out`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from speculation import flops_per_node

from recsys.artifacts import read_manifest
from recsys.benchmark.decode import ROUNDING, Agreement, Answer
from recsys.benchmark.environment import environment
from recsys.config import Settings
from recsys.decoding import ModelDrafter, beam_search, speculative_beam_search
from recsys.models.tree_forward import TreeModel
from recsys.pipeline import SECTIONS, Context
from recsys.pipeline import run as run_stages
from recsys.training.atspeed.lineup import DraftSpace, Limits, Variant
from recsys.training.atspeed.measure import Scene, cell, load_scene
from recsys.training.atspeed.produce import run_stage
from recsys.training.target import load_trained


def list_sizes(objective: str, layers: list[int]) -> dict[str, Variant]:
    """Drafts by their names in the table: a small one from scratch, and cuts of the target."""
    sizes = {"from scratch": Variant(objective, "scratch", budget="steps")}
    for n in layers:
        change = f"{n} layers", {"layers": n}
        sizes[f"target's first {n} layers"] = Variant(objective, "target", 0, *change, "steps")
    return sizes


def main() -> None:
    """Train, measure, print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("config", type=Path)
    arguments.add_argument("--agreements", type=float, nargs="+", default=[0.0, 0.8])
    arguments.add_argument("--objective", default="margin-kd")
    arguments.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--nodes", type=int, nargs="+", default=[64, 128, 256, 400])
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--beams", type=int, default=20)
    arguments.add_argument("--users", type=int, default=500)
    arguments.add_argument("--out", type=Path)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    rows = []
    for agreement in args.agreements:
        context = prepare(args.config, agreement)
        target = read_manifest(context.workspace.run("target"), "target").info
        scene = load_scene(context.workspace, args.users)
        whole = flops_per_node(load_trained(context.workspace.run("target")))
        for name, variant in list_sizes(args.objective, args.layers).items():
            for kind in ("teacher", "draft"):
                run_stage(kind, variant, context, Limits(1.0, args.steps))
            folder = DraftSpace.seen_by(context.workspace, variant).run("draft")
            model = load_trained(folder)
            draft, share = TreeModel.of(model), flops_per_node(model) / whole
            for nodes in args.nodes:
                row = {
                    "agreement": agreement,
                    "recall@10": round(target["validation"]["recall@10"], 4),
                    "draft": name,
                    "flops": round(share, 3),
                    "nodes": nodes,
                    "passes": count_passes(scene, draft, nodes, args.beams),
                }
                rows.append(row)
    show(rows, args.nodes)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        draw(rows, args.nodes, args.beams, args.out / "frontier.svg")
    options = {k: v for k, v in vars(args).items() if k != "out"} | {"config": args.config.name}
    print(json.dumps({"benchmark": "frontier", **options, "rows": rows, **environment()}))


def prepare(config: Path, agreement: float) -> Context:
    """The run of a target with this weight of the early-exit loss, trained if it is missing."""
    settings = Settings.load(config, [], known=SECTIONS)
    if settings.values["target"].get("agreement", 0.0) != agreement:
        name = f"{settings.name}-agreement-{agreement:g}"
        overrides = [f"target.agreement={agreement}"]
        settings = Settings.load(config, overrides, known=SECTIONS, name=name)
    context = Context.of(settings)
    run_stages(context, ("data", "ids", "target"))
    return context


def count_passes(scene: Scene, draft: TreeModel, nodes: int, beams: int) -> dict[str, float]:
    """Passes of a request: the mean over users, and half its 95 % interval."""
    drafter, passes = ModelDrafter(draft, nodes), []
    for group, _ in scene.batches():
        found = speculative_beam_search(scene.target, drafter, group, scene.trie, beams)
        plain = Answer.of(beam_search(scene.target, group, scene.trie, beams)).rankings
        agreement = Agreement.of(Answer.of(found).rankings, plain, *ROUNDING)
        assert agreement.requests == 1, f"{nodes} nodes: {agreement}"
        passes += [s.target_passes for s in found.stats]
    return cell(np.asarray(passes, np.float64))


def show(rows: list[dict], nodes: list[int]) -> None:
    """Print a line for each draft."""
    table = Table("agreement", "target R@10", "draft", "FLOPs", *[f"{n} nodes" for n in nodes])
    for start in range(0, len(rows), len(nodes)):
        line = rows[start : start + len(nodes)]
        cells = [f"{r['passes']['mean']:.2f} ± {r['passes']['error']:.2f}" for r in line]
        first = line[0]
        quality, cost = f"{first['recall@10']:.4f}", f"{first['flops']:.1%}"
        table.add_row(f"{first['agreement']:g}", quality, first["draft"], cost, *cells)
    Console(width=140).print(table)


def draw(rows: list[dict], nodes: list[int], beams: int, path: Path) -> None:
    """A panel for each target: passes by the draft's share of its FLOPs, a line for each tree."""
    agreements = list(dict.fromkeys(row["agreement"] for row in rows))
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "frontier"}):
        figure = Figure(figsize=(4.2 * len(agreements), 3.6), layout="constrained")
        panels = figure.subplots(1, len(agreements), sharey=True, squeeze=False)[0]
        for panel, agreement in zip(panels, agreements, strict=True):
            own = [row for row in rows if row["agreement"] == agreement]
            for count in nodes:
                points = [row for row in own if row["nodes"] == count]
                means = [row["passes"]["mean"] for row in points]
                errors = [row["passes"]["error"] for row in points]
                shares = [100 * row["flops"] for row in points]
                panel.errorbar(shares, means, errors, marker="o", label=f"{count} nodes")
            panel.set_title(f"agreement {agreement:g}: R@10 {own[0]['recall@10']:.4f}")
            panel.set_xlabel("draft's FLOPs for a token, % of the target's")
            panel.grid(alpha=0.3)
        panels[0].set_ylabel(f"target passes for a request, K = {beams}")
        panels[-1].legend()
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
