"""The item encoder: what it keeps, what it makes of items it has seen and of those it has not."""

import numpy as np
import pyarrow as pa
import pytest

from recsys.errors import ArtifactError
from recsys.interactions import Histories
from recsys.semantic_ids.encoder import FILE, ItemEncoder, load, save
from recsys.semantic_ids.features import build_features
from recsys.semantic_ids.rqkmeans import RQKMeans
from recsys.semantic_ids.rqvae import RQVAE
from recsys.semantic_ids.settings import FeatureConfig, RQKMeansConfig, RQVAEConfig

CONFIG = FeatureConfig(text_dim=16, collaborative_dim=8, attribute_dim=8)
KINDS = ("lamp oak desk", "wool scarf warm", "steel knife sharp", "garden hose long")


def make(n=80, seed=0):
    """Items of four kinds, bought within their kind."""
    rng = np.random.default_rng(seed)
    kind = np.arange(n) % 4
    texts = [f"{KINDS[k]} number{i % 7} size{i % 5}" for i, k in enumerate(kind)]
    table = pa.table(
        {
            "item_id": [f"i{i}" for i in range(n)],
            "title": texts,
            "text": texts,
            "brand": [f"brand{k}" if i % 9 else None for i, k in enumerate(kind)],
            "tags": [[f"t{k}", f"u{i % 3}"] for i, k in enumerate(kind)],
            "price": rng.normal(10 * kind, 1.0),
        }
    )
    of_kind = [np.flatnonzero(kind == k) for k in range(4)]
    histories = [rng.choice(of_kind[i % 4], 6).tolist() for i in range(120)]
    return table, Histories.of(histories), kind


@pytest.fixture(scope="module")
def made():
    table, histories, kind = make()
    return table, kind, build_features(table, histories, CONFIG, seed=1)


def test_items_that_it_was_made_from_get_their_own_features_back(made, tmp_path):
    table, _, features = made
    save(features.encoder, tmp_path / "encoder")
    again = load(tmp_path / "encoder").encode(table)
    known = sum(features.blocks[name] for name in ("text", "attributes"))
    np.testing.assert_allclose(again[:, :known], features.matrix[:, :known], atol=1e-4)
    assert again.shape == features.matrix.shape
    assert again.dtype == np.float32


@pytest.mark.parametrize("method", ["rq-kmeans", "rq-vae"])
def test_new_items_get_the_first_code_of_their_kind(made, tmp_path, method):
    _, kind, features = made
    save(features.encoder, tmp_path / "encoder")
    sizes = [8, 8, 6]
    if method == "rq-kmeans":
        quantizer = RQKMeans.fit(features.matrix, sizes, RQKMeansConfig(), 0)
    else:
        quantizer = RQVAE.fit(
            features.matrix, sizes, RQVAEConfig(latent_dim=8, hidden=(16,), steps=60), 0
        )
    quantizer.save(tmp_path / "quantizer")
    firsts = [set(quantizer.encode(features.matrix)[kind == k, 0].tolist()) for k in range(4)]
    coder = ItemEncoder(tmp_path / "encoder", tmp_path / "quantizer")
    new = pa.table(
        {
            "item_id": ["n0", "n1", "n2", "n3"],
            "title": [f"another {words} unheard" for words in KINDS],
            "text": [""] * 4,
            "brand": [f"brand{k}" for k in range(4)],
            "tags": [[f"t{k}", "new"] for k in range(4)],
            "price": [0.0, 10.0, 20.0, 30.0],
        }
    ).set_column(2, "text", pa.array([f"{words} of a new make" for words in KINDS]))
    codes, far = coder.encode(new)
    assert codes.shape == (4, 3)
    assert far.shape == (4, 6)
    assert all(int(codes[k, 0]) in firsts[k] for k in range(4))
    np.testing.assert_array_equal(codes[:, -1], far.argmin(1))
    assert coder.beside(5).argmin() == 5


def test_a_damaged_encoder_is_named(made, tmp_path):
    save(made[2].encoder, tmp_path / "encoder")
    (tmp_path / "encoder" / FILE).write_text("{}")
    with pytest.raises(ArtifactError, match=r"encoder: unreadable item encoder"):
        load(tmp_path / "encoder")
