"""The published figures of AtSpeed (Lin et al., ICLR 2025, tables 1 and 2, Amazon Beauty).

Target LLaMA-7B, draft LLaMA-68M, N = 40, one request at a time on a GPU, against their own beam
search with tree attention.
"""

from __future__ import annotations

KS = (1, 3, 5, 10, 20)
TARGET_PARAMETERS, DRAFT_PARAMETERS = 6_738_000_000, 68_000_000
DRAFTS = 40

Figures = dict[str, dict[str, tuple[float, ...]]]
"""verification -> objective -> figures by K."""

ACCEPTED: Figures = {
    "strict": {
        "sft": (2.19, 1.66, 1.32, 0.66, 0.09),
        "wordkd": (2.33, 1.89, 1.60, 1.03, 0.16),
        "tvdkd": (2.15, 1.67, 1.31, 0.65, 0.09),
        "seqkd": (2.46, 2.10, 1.85, 1.27, 0.30),
        "atspeed-s": (2.58, 2.20, 2.00, 1.64, 0.57),
        "atspeed-r": (2.26, 1.96, 1.82, 1.33, 0.43),
    },
    "relaxed": {
        "sft": (2.15, 2.06, 2.03, 1.99, 1.48),
        "wordkd": (2.11, 2.04, 2.01, 1.87, 1.07),
        "tvdkd": (2.17, 2.07, 2.03, 1.99, 1.45),
        "seqkd": (2.21, 2.13, 2.10, 2.01, 1.40),
        "atspeed-s": (2.26, 2.14, 2.09, 2.03, 1.71),
        "atspeed-r": (2.37, 2.19, 2.13, 2.10, 1.77),
    },
}
SPEEDUP: Figures = {
    "strict": {
        "sft": (1.88, 1.55, 1.43, 1.37, 1.55),
        "wordkd": (2.02, 1.70, 1.58, 1.52, 1.58),
        "tvdkd": (1.84, 1.55, 1.44, 1.37, 1.57),
        "seqkd": (2.18, 1.88, 1.75, 1.67, 1.68),
        "atspeed-s": (2.33, 1.97, 1.84, 1.87, 1.82),
        "atspeed-r": (1.95, 1.71, 1.70, 1.71, 1.74),
    },
    "relaxed": {
        "sft": (1.77, 1.76, 1.80, 2.06, 2.36),
        "wordkd": (1.74, 1.75, 1.81, 1.99, 2.05),
        "tvdkd": (1.80, 1.77, 1.81, 2.06, 2.35),
        "seqkd": (1.85, 1.86, 1.90, 2.11, 2.31),
        "atspeed-s": (1.94, 1.87, 1.89, 2.12, 2.51),
        "atspeed-r": (2.05, 1.94, 1.94, 2.16, 2.47),
    },
}
# (name, temperature) -> recall by K, for the target alone and AtSpeed-R's relaxed verification.
RECALL: dict[tuple[str, float], dict[int, float]] = {
    ("target", 0.0): {5: 0.0056, 10: 0.0098},
    ("target", 0.5): {5: 0.0057, 10: 0.0095},
    ("atspeed-r", 0.5): {5: 0.0051, 10: 0.0091},
    ("target", 1.0): {5: 0.0053, 10: 0.0088},
    ("atspeed-r", 1.0): {5: 0.0058, 10: 0.0092},
}


def figure(table: Figures, verification: str, objective: str, k: int) -> float | None:
    """A cell of table 1; None where the paper has none.

    Its relaxed levels compare with those counted as `released`, and its times with `relaxed`.
    """
    if table is ACCEPTED:
        verification = {"released": "relaxed", "relaxed": ""}.get(verification, verification)
    values = table.get(verification, {}).get(objective)
    return values[KS.index(k)] if values is not None and k in KS else None
