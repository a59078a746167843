"""The health report, by hand."""

import json

import numpy as np
import pytest

from recsys.semantic_ids.report import compare, health, reconstruction_error

# five items, two levels of four codes: prefixes {0, 1}, leaves (0,0) twice, (0,3), (1,0), (1,2)
CODES = np.array([[0, 0], [0, 0], [0, 3], [1, 0], [1, 2]], np.int32)


class Table:
    """A quantiser of one-dimensional features: code c of level l is worth 10 c or c."""

    centroids = (
        10 * np.arange(4, dtype=np.float32)[:, None],
        np.arange(5, dtype=np.float32)[:, None],
    )

    def reconstruct(self, codes):
        return (10.0 * codes[:, :1] + codes[:, 1:]).astype(np.float32)


def test_every_figure_of_the_report_by_hand():
    report = health(CODES, [4, 5])
    assert report == {
        "items": 5,
        "levels": 2,
        "codebook_size": [4, 5],
        "used_codes": [2, 3],
        "perplexity": [
            round(float(np.exp(-(0.6 * np.log(0.6) + 0.4 * np.log(0.4)))), 3),
            round(float(np.exp(-(0.6 * np.log(0.6) + 2 * 0.2 * np.log(0.2)))), 3),
        ],
        "prefixes": [2, 4],
        "branching": [2.0, 2.0],
        "colliding_items": 2,
        "colliding_leaves": 1,
        "largest_leaf": 2,
    }


def test_reconstruction_error_is_the_unexplained_variance():
    features = Table().reconstruct(CODES)
    assert reconstruction_error(Table(), features, CODES) == 0
    off = features + 1
    expected = 5 / ((off - off.mean()) ** 2).sum()
    assert reconstruction_error(Table(), off, CODES) == pytest.approx(expected, abs=1e-5)


def test_the_comparison_tells_before_from_after():
    after = CODES.copy()
    after[1] = [0, 1]
    features = Table().reconstruct(CODES)
    report = compare(CODES, after, Table(), features)
    assert report["codebook_size"] == [4, 5]
    assert report["moved_items"] == 1
    assert report["colliding_items"] == 0
    assert report["largest_leaf"] == 1
    before = report["before_assignment"]
    assert (before["colliding_items"], before["largest_leaf"]) == (2, 2)
    assert before["reconstruction_error"] == 0 < report["reconstruction_error"]
    json.dumps(report)
