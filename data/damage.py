"""Counts the rows of a file that cannot be read, and refuses a file with too many of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from recsys.data.report import sentence
from recsys.errors import DataError


@dataclass
class Damage:
    """Rows of a file that could not be read.

    Attributes:
        rows: number of damaged rows.
        examples: the first few, as line and content.
        good: number of rows that were read.
    """

    rows: int = 0
    examples: list[str] = field(default_factory=list)
    good: int = 0

    def add(self, line: int | None, text: str, rows: int = 1) -> None:
        """Count damaged rows, of which `text` is the first."""
        self.rows += rows
        if len(self.examples) < 3:
            where = f"line {line}: " if line else ""
            self.examples.append(f"{where}{text[:60]}")

    def check(self, path: Path, share: float) -> None:
        """Refuse a file of which more than a share of the rows is damaged.

        Raises:
            DataError: it is; the message shows the first damaged row.
        """
        damaged = self.rows / max(self.rows + self.good, 1)
        if damaged > share:
            said = {"every": self.rows + self.good, "shown": "; ".join(self.examples[:1])}
            enough = math.ceil(100 * damaged) / 100
            raise DataError(sentence("damaged", path=path, rows=self.rows, share=enough, **said))
