"""Item features: each block by hand or against a slow twin, and what is left out."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from recsys.errors import ConfigError, DataError
from recsys.interactions import Histories
from recsys.semantic_ids.collaborative import ppmi_block, predict, sasrec_block
from recsys.semantic_ids.features import build_features
from recsys.semantic_ids.settings import FeatureConfig
from recsys.semantic_ids.words import MANY, POWER_ITERATIONS, truncated_svd

NOTHING = Histories.of([])


def items_table(texts=None, n=6, **columns):
    texts = texts or [""] * n
    ids = [f"i{k}" for k in range(len(texts))]
    titles = [text or i for i, text in zip(ids, texts, strict=True)]
    return pa.table({"item_id": ids, "title": titles, "text": texts, **columns})


def alone(table, **config):
    """Features of content, with nothing known of who took what."""
    return build_features(table, NOTHING, FeatureConfig(**config)).matrix


def cosine(matrix, one, other):
    return float(matrix[one] @ matrix[other])


TEXTS = [
    "red wool scarf", "warm wool scarf", "steel kitchen knife", "sharp steel knife", "garden hose",
    "",
]  # fmt: skip


def test_texts_that_share_words_are_near_and_empty_ones_are_zero():
    block = alone(items_table(TEXTS), text_dim=4)
    assert block.dtype == np.float32
    assert cosine(block, 0, 1) > 0.8
    assert cosine(block, 2, 3) > 0.8
    assert abs(cosine(block, 0, 2)) < 0.1
    assert not block[5].any()
    np.testing.assert_allclose(np.linalg.norm(block[:4], axis=1), 1, atol=1e-5)


def test_a_matrix_of_many_entries_is_decomposed_in_float32(monkeypatch):
    rng = np.random.default_rng(0)
    dense = rng.normal(size=(60, 4)) @ rng.normal(size=(4, 40)) * 10
    matrix = sparse.csr_array(dense + rng.normal(size=dense.shape) / 10)
    exact = truncated_svd(matrix, 4, 0)
    monkeypatch.setattr("recsys.semantic_ids.words.MANY", 0)
    for fast, slow in zip(truncated_svd(matrix, 4, 0), exact, strict=True):
        assert fast.dtype == np.float32
        np.testing.assert_allclose(fast, slow, rtol=1e-3, atol=1e-4)


def test_of_many_events_a_narrower_window_counts(monkeypatch):
    rng = np.random.default_rng(0)
    histories = Histories.of([rng.integers(0, 12, 20) for _ in range(10)])
    narrow = ppmi_block(histories, 12, 2, 4, 0)
    assert not np.allclose(ppmi_block(histories, 12, 9, 4, 0), narrow)
    monkeypatch.setattr("recsys.semantic_ids.collaborative.MOST_PAIRS", 0)
    np.testing.assert_array_equal(ppmi_block(histories, 12, 9, 4, 0), narrow)


def test_a_title_that_is_the_id_says_nothing():
    features = build_features(
        items_table(["", "", ""], brand=list("xyz")), NOTHING, FeatureConfig()
    )
    assert list(features.blocks) == ["attributes"]


def test_a_title_counts_without_a_text():
    titles = ["red wool scarf", "warm wool scarf", "steel knife", "garden hose"]
    table = pa.table({"item_id": list("abcd"), "title": titles, "text": ["", None, "", ""]})
    block = alone(table, text_dim=4)
    assert cosine(block, 0, 1) > 0.5 > 0.1 > abs(cosine(block, 0, 2))


def test_a_title_counts_even_where_the_text_does_not_repeat_it():
    table = pa.table(
        {
            "item_id": ["a", "b", "c", "d"],
            "title": ["blue lamp", "blue lamp", "chair", "chair"],
            "text": ["for desks", "for ceilings", "chair of oak", "for desks of oak"],
        }
    )
    block = alone(table)
    assert cosine(block, 0, 1) > cosine(block, 0, 3) > cosine(block, 0, 2)


def test_ready_embeddings_are_only_normalised():
    table = items_table(n=2, emb=[[3.0, 4.0], [0.0, 2.0]])
    features = build_features(table, NOTHING, FeatureConfig(embedding_column="emb"))
    np.testing.assert_allclose(features.matrix, [[0.6, 0.8], [0, 1]])
    assert features.blocks == {"text": 2}  # the column is not read again as an attribute


def test_a_wrong_embedding_column_is_named():
    with pytest.raises(ConfigError, match=r"no column 'emd'.*item_id"):
        alone(items_table(), embedding_column="emd")
    table = items_table(n=2, emb=[[1.0], [1.0, 2.0]])
    with pytest.raises(DataError, match=r"items\.emb"):
        alone(table, embedding_column="emb")


def test_words_get_tfidf_and_numbers_get_standard_scores():
    columns = {
        "brand": ["acme", "acme", "zeta", None],
        "tags": [["a", "b"], ["a"], ["c"], []],
        "price": [1.0, 1.0, None, 4.0],
    }
    block = alone(items_table(n=4, **columns), attribute_weight=1)
    assert cosine(block, 0, 1) > cosine(block, 0, 2)
    prices = alone(items_table(n=4, price=columns["price"]), attribute_weight=1)
    root = np.sqrt(2)  # mean 2 and variance 2 of the three that are known
    np.testing.assert_allclose(prices[:, 0], [-1 / root, -1 / root, 0, root], rtol=1e-5)


def slow_ppmi(sequences, num_items, window):
    counts = np.zeros((num_items, num_items))
    for sequence in sequences:
        for i, one in enumerate(sequence):
            for j, other in enumerate(sequence):
                if i != j and abs(i - j) <= window and one != other:
                    counts[one, other] += 1
    context = counts.sum(axis=0) ** 0.75
    out = np.zeros_like(counts)
    for one, other in np.argwhere(counts > 0):
        expected = counts[one].sum() * context[other] / context.sum()
        out[one, other] = max(np.log(counts[one, other] / expected), 0)
    return out


@given(seed=st.integers(0, 10_000), users=st.integers(1, 12), window=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_the_ppmi_block_is_the_svd_of_a_plain_python_ppmi(seed, users, window):
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 12, rng.integers(0, 9)).tolist() for _ in range(users)]
    block = ppmi_block(Histories.of(sequences), 12, window, 4, seed)
    left, values, _ = np.linalg.svd(slow_ppmi(sequences, 12, window))
    if values[0] < 1e-9:
        assert not block.any()
        return
    if values[3] - values[4] < 1e-2 * values[0]:
        return  # where the fourth and fifth values tie, the subspace is not one
    plain = left[:, :4] * np.sqrt(values[:4])
    norms = np.linalg.norm(plain, axis=1, keepdims=True)
    known = norms[:, 0] > 1e-4
    gram = (plain / np.where(norms > 0, norms, 1)) @ (plain / np.where(norms > 0, norms, 1)).T
    np.testing.assert_allclose((block @ block.T)[known][:, known], gram[known][:, known], atol=1e-3)


@pytest.mark.parametrize("many", [MANY, 0])
def test_a_matrix_of_low_rank_gives_the_same_svd_each_time(monkeypatch, many):
    """Twenty equal blocks: rank 20, asked for 40 values."""
    monkeypatch.setattr("recsys.semantic_ids.words.MANY", many)
    blocks = sparse.csr_array(np.kron(np.diag(np.arange(1.0, 21)), np.ones((10, 10))))
    first, again = truncated_svd(blocks, 40, 0), truncated_svd(blocks, 40, 0)
    assert first[0].tobytes() == again[0].tobytes()
    assert first[1].tobytes() == again[1].tobytes()
    assert first[0].shape == (200, 20)
    np.testing.assert_allclose(first[0] @ first[0].T, blocks.toarray(), atol=1e-4)
    assert truncated_svd(blocks * 0, 40, 0)[0].shape == (200, 0)


class Counted(sparse.csr_array):
    """A matrix that counts how often it is multiplied."""

    products = 0

    def __matmul__(self, other):
        Counted.products += 1
        return super().__matmul__(other)


def test_the_svd_of_a_matrix_without_large_values_has_a_bound_on_its_work():
    """All singular values are nearly equal, so methods that iterate until they converge do not."""
    values = 1 + np.random.default_rng(0).random(3000) * 1e-3
    rows, _ = truncated_svd(Counted(sparse.diags_array(values).tocsr()), 64, 0)
    assert rows.shape == (3000, 64)
    assert Counted.products <= 2 * (POWER_ITERATIONS + 2)


def slow_ridge(content, collaborative, new):
    """Ridge regression with penalty 1 by the normal equations."""
    gram = content.T @ content + np.eye(content.shape[1])
    return new @ np.linalg.inv(gram) @ content.T @ collaborative


def test_an_items_prediction_does_not_depend_on_its_own_events():
    rng = np.random.default_rng(0)
    content = rng.random((40, 3)) * (rng.random((40, 3)) < 0.7)
    collaborative = rng.normal(size=(40, 4)).astype(np.float32)
    collaborative[5] = 0  # never seen
    rows = sparse.csr_array(content)
    before, prediction = predict(collaborative, rows)
    known = collaborative.any(axis=1) & content.any(axis=1)
    wanted = slow_ridge(content[known], collaborative[known], np.eye(3))
    np.testing.assert_allclose(prediction, wanted, atol=1e-6)
    changed = collaborative.copy()
    changed[7] *= -1
    after, _ = predict(changed, rows)
    np.testing.assert_array_equal(before[7], after[7])
    assert (before != after).any()
    assert before[5].any()  # from its content


def test_model_vectors_are_centred_and_normalised():
    vectors = np.array([[13, 24], [7, 24], [100, -50], [10, 12]], np.float32)
    block = sasrec_block(Histories.of([[0, 1], [1, 3]]), vectors)  # mean of the three: 10, 20
    assert block.dtype == np.float32
    np.testing.assert_allclose(block, [[0.6, 0.8], [-0.6, 0.8], [0, 0], [0, -1]], rtol=1e-6)


def test_an_unseen_item_gets_a_vector_predicted_from_content():
    a, b = [1.0, 0.0], [0.0, 1.0]
    table = items_table(emb=[a, a, b, b, a, [0.0, 0.0]])  # nobody took the last two
    vectors = np.array([[4, 6], [4, 6], [-2, -2], [-2, -2], [100, 9], [9, 100]], np.float32)
    config = FeatureConfig(collaborative="sasrec", collaborative_weight=3.0, embedding_column="emb")
    features = build_features(table, Histories.of([[0, 2], [3, 1]]), config, vectors=vectors)
    assert features.blocks == {"text": 2, "collaborative": 2}
    one, other = [0.6, 0.8], [-0.6, -0.8]
    np.testing.assert_allclose(
        features.matrix[:, 2:] / 3, [one, one, other, other, one, [0, 0]], rtol=1e-5
    )
    np.testing.assert_allclose(features.encoder.encode(table)[4:], features.matrix[4:], rtol=1e-5)


def test_empty_blocks_are_left_out_and_weights_scale_the_rest():
    histories = Histories.of([[0, 1, 2], [3, 4, 5], [0, 1], [3, 5]])
    config = FeatureConfig(collaborative_weight=2.0, collaborative_dim=3)
    features = build_features(items_table(n=6), histories, config)
    assert list(features.blocks) == ["collaborative"]
    np.testing.assert_allclose(np.linalg.norm(features.matrix, axis=1), 2, atol=1e-5)

    features = build_features(items_table(TEXTS), histories, FeatureConfig(attribute_weight=0))
    assert list(features.blocks) == ["text", "collaborative"]
    assert features.matrix.shape == (6, sum(features.blocks.values()))
    assert features.matrix.dtype == np.float32


def test_no_feature_at_all_is_an_error_that_says_so():
    with pytest.raises(DataError, match="there is nothing to make semantic IDs of"):
        build_features(items_table(n=3), NOTHING, FeatureConfig())
