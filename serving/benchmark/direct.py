"""A recommender without a service around it: reads requests as lines, writes their times.

It runs as its own process (`python -m recsys.serving.benchmark.direct`), so that the load generator
imports no torch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    """Answer {"history", "k"} of each line of standard input with its wall and CPU time, in ms."""
    import torch

    from recsys.recommender import Recommender
    from recsys.serving.settings import ServingSettings

    settings = ServingSettings.load(None, sys.argv[2:], bundle=Path(sys.argv[1]))
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(settings.threads or max(min(2, cores), cores - 1))
    recommender = Recommender.load(
        settings.bundle,
        device=settings.device,
        dtype=settings.dtype,
        mode=settings.mode,
        prefix_bytes=settings.prefix_mb << 20,
        max_batch=settings.max_batch,
    )
    recommender.warm_up()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        request = json.loads(line)
        start, cpu = time.perf_counter(), time.process_time()
        recommender.recommend([request["history"]], request["k"])
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        sys.stdout.write(f"{wall * 1000:.3f} {cpu * 1000:.3f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
