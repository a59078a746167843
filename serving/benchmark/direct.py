"""A recommender without a service around it: reads requests as lines, writes milliseconds.

A process of its own (`python -m serving.benchmark.direct`), so that the load generator stays light.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Answer {"history", "k"} of each line of standard input with the time that it took."""
    import torch

    from recsys.recommender import Recommender
    from serving.settings import ServingSettings

    settings = ServingSettings.load(None, sys.argv[2:], bundle=Path(sys.argv[1]))
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
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
        start = time.perf_counter()
        recommender.recommend([request["history"]], request["k"])
        sys.stdout.write(f"{(time.perf_counter() - start) * 1000:.3f}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
