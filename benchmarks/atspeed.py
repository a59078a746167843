"""AtSpeed's tables and ablations with this project's models, beside the published figures.

    python benchmarks/atspeed.py --config configs/atspeed-beauty.yaml --out var/reports/atspeed
    python benchmarks/atspeed.py --quick

Makes the target, the teacher data and a draft for each objective where they are missing, and
measures them on test users. Drafts are kept as they end: a run that was stopped continues there.
The parts are in `atspeed_tables/`; docs/alignment.md says how to read the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atspeed_tables.report import report as report_atspeed
from atspeed_tables.run import Options, experiment
from reporting import begin, publish, read_options

from recsys.config import Settings
from recsys.errors import ConfigError
from recsys.pipeline import SECTIONS, Context

# Settings and options of a toy run, which takes seconds and learns nothing.
QUICK: dict[str, Any] = {
    "name": "atspeed-quick",
    "data": {"source": "synthetic", "synthetic": {"users": 300, "items": 240}},
    "ids": {"method": "rq-kmeans", "levels": 3, "codebook_size": 8},
    "target": {
        "epochs": 1, "evaluate_every": 0, "precision": "float32",
        "architecture": {"hidden_size": 32, "intermediate_size": 64},
        "prompt": {"max_items": 6, "block": 2},
    },
    "teacher": {"histories": 60, "beams": 5},
    "draft": {"precision": "float32"},
}  # fmt: skip
QUICK_OPTIONS: dict[str, Any] = {
    "users": 6, "timed": 2, "recall_users": 10, "ks": [1, 3], "drafts": 6,
    "recall_ks": [3], "steps": 3,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """Run the experiment, print its tables and one JSON line."""
    options, run = read_options(Options, __doc__, QUICK_OPTIONS, argv)
    if run.quick and options.config is not None:
        raise ConfigError("--quick has a data set of its own; leave --config out")
    settings = Settings(QUICK) if run.quick else Settings.load(options.config, known=SECTIONS)
    document = begin("atspeed", options, run) | experiment(Context.of(settings), options)
    publish(document, report_atspeed(document), run.out)


if __name__ == "__main__":
    main()
