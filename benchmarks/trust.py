"""Whether evaluation speaks up where it must, and keeps quiet where there is nothing to say.

    python benchmarks/trust.py BUNDLE DATASET

Copies of a bundle are evaluated by `recsys evaluate`, on validation users, and paired by
`recsys compare`:

- one whose target has other weights altogether: a real difference, which must be found;
- one whose target has its weights moved by a ten-thousandth: none, so none may be found;
- one whose retrieval has counted the events that are asked about, one whose semantic IDs were
  learned from them: leaks, which must end the command with a word about it.

Ends with an error if one of these does not happen. One JSON line at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from environment import environment

from recsys.artifacts import read_manifest, write_artifact
from recsys.bundle import RETRIEVAL, TARGET
from recsys.dataset import Dataset
from recsys.models.checkpoint import load_model, save_model
from recsys.retrieval import Retrieval, digest

RECSYS = [sys.executable, "-c", "from recsys.cli import main; main()"]


def main() -> None:
    """Try all four and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--users", type=int, default=2000)
    options = parser.parse_args()
    torch.manual_seed(0)
    everything = Dataset.load(options.dataset).interactions.histories
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)

        def evaluate(bundle: Path) -> subprocess.CompletedProcess[str]:
            command = ["evaluate", "--bundle", bundle, "--dataset", options.dataset]
            command += ["--out", work / f"report-{bundle.name}", "--set", "evaluate.split=valid"]
            for setting in (f"users={options.users}", "ks=[1,5,10,20]", "beams=20", "seen=masked"):
                command += ["--set", f"evaluate.{setting}"]
            return run(*command)

        def copied(kind: str, change: Callable[[Path], None], **info: str) -> Path:
            manifest = read_manifest(options.bundle, "bundle")
            made = {"config": manifest.config, "parents": manifest.parents}
            with write_artifact(
                work / kind, "bundle", info={**manifest.info, **info}, **made
            ) as out:
                left = shutil.ignore_patterns("manifest.json")
                shutil.copytree(options.bundle, out, dirs_exist_ok=True, ignore=left)
                change(out)
            return work / kind

        def reweighted(noise: float) -> Callable[[Path], None]:
            def change(folder: Path) -> None:
                model = load_model(folder / TARGET)
                with torch.no_grad():
                    for weights in model.parameters():
                        weights += noise * weights.std() * torch.randn_like(weights)
                shutil.rmtree(folder / TARGET)
                save_model(model, folder / TARGET)

            return change

        def counting(folder: Path) -> None:
            known = Retrieval.load(folder / RETRIEVAL)
            replace(known, fitted_on=digest(everything)).save(folder / RETRIEVAL)

        def nothing(_: Path) -> None:
            pass

        bundles = {
            "original": copied("original", nothing),
            "other weights": copied("other", reweighted(10.0)),
            "weights moved a little": copied("moved", reweighted(1e-4)),
        }
        for bundle in bundles.values():
            evaluate(bundle).check_returncode()
        found: dict[str, Any] = {}
        for what, expected in (("other weights", "A"), ("weights moved a little", "level")):
            reports = [work / f"report-{bundles[w].name}" for w in ("original", what)]
            compared = run(
                "compare", *reports, "--ranker-a", "model", "--ranker-b", "model", "--json"
            )
            row = json.loads(compared.stdout)["rows"][0]
            verdict = "A" if row["low"] > 0 else "B" if row["high"] < 0 else "level"
            text = f"{row['a']:.4f} - {row['b']:.4f} = {row['mean']:+.4f} "
            print(f"{what}: Recall@10 {text}({row['low']:+.4f} to {row['high']:+.4f}): {verdict}")
            found[what] = {key: row[key] for key in ("a", "b", "mean", "low", "high")}
            if verdict != expected:
                raise SystemExit(f"expected {expected}")
        leaks = {
            "retrieval has seen the answers": copied("retrieval", counting),
            "semantic IDs have": copied("ids", nothing, ids_fitted_on=digest(everything)),
        }
        for what, bundle in leaks.items():
            ended = evaluate(bundle)
            said = " ".join(ended.stderr.split())
            print(f"{what}: exit status {ended.returncode}: {said[-240:]}")
            found[what] = ended.returncode
            if not ended.returncode or "leak" not in said:
                raise SystemExit("expected an error that says leak")
    print(json.dumps({**found, **environment()}))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line's answer."""
    command = [*RECSYS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    main()
