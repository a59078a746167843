"""Measured times of one replica, request by request.

A cost model keeps measured batches, not their means. The simulation draws from them, so its tail
latencies are those of the measurement. Besides the time of its batch a request takes the time of
network, HTTP and event loop: the latency at the client less the time in queue and batch.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from recsys.errors import ArtifactError

SCHEMA = 1
DRAWS = 4096  # values of each batch size that a simulation takes from
ENOUGH = 32  # measured requests of a size; a size with fewer borrows from its neighbours


@dataclass(frozen=True)
class Level:
    """Requests measured at one rate.

    Attributes:
        rate: requests a second of each replica.
        size: (n,) requests in the batch of each request.
        batch_ms: (n,) time of its batch, as if all histories in it had been kept.
        other_ms: (n,) the rest of the latency at the client, without the queue.
    """

    rate: float
    size: NDArray[np.int64]
    batch_ms: NDArray[np.float64]
    other_ms: NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Times of one replica.

    Attributes:
        levels: the measurements, by ascending rate. Costs depend on the rate, which changes how
            cores are shared and how deep they sleep between requests.
        cold_ms: time that a request whose history is not kept adds to its batch.
        about: bundle, replicas and k of the measurement.
    """

    levels: tuple[Level, ...]
    cold_ms: float = 0.0
    about: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def line(self) -> tuple[float, float]:
        """(a, b): a batch of n takes a + b n ms on average, b >= 0; a least-squares fit."""
        size = np.concatenate([level.size for level in self.levels])
        batch = np.concatenate([level.batch_ms for level in self.levels])
        if len(np.unique(size)) == 1:
            return float(batch.mean()), 0.0
        weight = size**-0.5  # each batch once, whatever its size
        slope, offset = np.polyfit(size, batch, 1, w=weight)
        if slope < 0:
            return float(np.average(batch, weights=weight**2)), 0.0
        return float(offset), float(slope)

    def mean_ms(self, size: int) -> float:
        """Mean time of a batch."""
        offset, slope = self.line
        return max(offset + slope * size, 1e-6)

    def summary(self) -> dict[str, Any]:
        """Its description for a report."""
        return {
            "line_ms": [round(part, 4) for part in self.line],
            "cold_ms": round(self.cold_ms, 4),
            "rates": [round(level.rate, 2) for level in self.levels],
            "requests": sum(len(level.size) for level in self.levels),
            "about": self.about,
        }

    def draws(
        self, rate: float, max_batch: int, rng: np.random.Generator
    ) -> list[tuple[list[float], list[float]]]:
        """Batch times and other times in seconds, `DRAWS` of each for every size from 0 on.

        Between two measured rates both contribute, the nearer one more. A size with few
        measurements borrows those of the nearest sizes, scaled by the line of means.
        """
        rates = np.array([level.rate for level in self.levels])
        above = int(np.searchsorted(rates, rate))
        if above in (0, len(rates)):
            mixed = [(self.levels[min(above, len(rates) - 1)], DRAWS)]
        else:
            near = (rate - rates[above - 1]) / (rates[above] - rates[above - 1])
            upper = round(DRAWS * float(near))
            mixed = [(self.levels[above - 1], DRAWS - upper), (self.levels[above], upper)]
        found: list[tuple[list[float], list[float]]] = [([], [])]
        for size in range(1, max_batch + 1):
            parts = [self._take(level, size, count, rng) for level, count in mixed if count]
            batch, other = np.concatenate(parts, axis=1) / 1e3
            order = rng.permutation(DRAWS)
            found.append((batch[order].tolist(), other[order].tolist()))
        return found

    def _take(
        self, level: Level, size: int, count: int, rng: np.random.Generator
    ) -> NDArray[np.float64]:
        """(2, count) batch and other times of measured requests in batches like `size`."""
        seen = np.unique(level.size)
        seen = seen[np.argsort(np.abs(np.log(seen / size)), kind="stable")]
        chosen = level.size == seen[0]
        for other in seen[1:]:
            if chosen.sum() >= ENOUGH:
                break
            chosen |= level.size == other
        (rows,) = chosen.nonzero()
        # Each measured value occurs as often as any other, up to one.
        rows = rows[rng.permutation(np.arange(count) % len(rows))]
        stretch = self.mean_ms(size) / np.array([self.mean_ms(int(n)) for n in level.size[rows]])
        return np.stack([level.batch_ms[rows] * stretch, level.other_ms[rows]])

    def save(self, file: Path) -> None:
        """Write a JSON file."""
        levels = [
            {
                "rate": level.rate,
                "size": level.size.tolist(),
                "batch_ms": level.batch_ms.round(4).tolist(),
                "other_ms": level.other_ms.round(4).tolist(),
            }
            for level in self.levels
        ]
        document = {
            "schema": SCHEMA,
            "about": self.about,
            "cold_ms": self.cold_ms,
            "line_ms": self.line,
            "levels": levels,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(document) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Self:
        """Read what `save` wrote; an `ArtifactError` tells that it is another kind of file."""
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
            if document["schema"] != SCHEMA:
                raise ValueError(f"schema {document['schema']}, expected {SCHEMA}")
            levels = tuple(
                Level(
                    float(level["rate"]),
                    np.array(level["size"], np.int64),
                    np.array(level["batch_ms"], np.float64),
                    np.array(level["other_ms"], np.float64),
                )
                for level in document["levels"]
            )
            return cls(levels, float(document["cold_ms"]), document["about"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"{file} is not a cost model ({error}); make one with "
                "`recsys benchmark capacity --out FOLDER`"
            ) from error
