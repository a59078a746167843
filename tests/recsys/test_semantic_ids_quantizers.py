"""Residual coding against a slow twin, and both quantisers on data with known structure."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_as_exact
from quantizer_suite import QuantizerSuite, blobs
from vector_quantize_pytorch import ResidualVQ

from recsys.semantic_ids.quantizer import decode, residual_codes
from recsys.semantic_ids.rqkmeans import RQKMeans
from recsys.semantic_ids.rqvae import RQVAE, _residual_vq, losses
from recsys.semantic_ids.settings import RQKMeansConfig, RQVAEConfig
from recsys.semantic_ids.words import unit_rows

EPSILON = float(np.finfo(np.float32).eps)


class TestRQKMeans(QuantizerSuite):
    quantizer = RQKMeans
    config = RQKMeansConfig(iterations=20, restarts=1)
    tensors = "centroids.safetensors"


class TestRQVAE(QuantizerSuite):
    quantizer = RQVAE
    config = RQVAEConfig(latent_dim=4, hidden=(16,), steps=100, batch_size=64, learning_rate=1e-2)
    tensors = "rqvae.safetensors"


@given(
    seed=st.integers(0, 10_000),
    items=st.integers(0, 20),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    dim=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_residual_codes_equal_a_plain_python_loop(seed, items, sizes, dim):
    rng = np.random.default_rng(seed)
    latents = rng.standard_normal((items, dim)).astype(np.float32)
    centroids = [rng.standard_normal((size, dim)).astype(np.float32) for size in sizes]
    codes = residual_codes(latents, centroids)
    for latent, row in zip(latents, codes, strict=True):
        rest = latent.astype(np.float64)
        for level in range(len(sizes)):
            books = centroids[level].astype(np.float64)
            distances = ((rest - books) ** 2).sum(-1)
            # Sums of three squares of at most five terms, in any order.
            allowed = 16 * EPSILON * ((rest**2).sum() + (books**2).sum(-1).max())
            assert distances[row[level]] <= distances.min() + allowed
            rest = rest - books[row[level]]
        reached = [centroids[level][code] for level, code in enumerate(row)]
        exact = np.sum(reached, axis=0, dtype=np.float64)
        allowed = 4 * EPSILON * np.abs(reached).sum()
        np.testing.assert_allclose(decode(row[None], centroids)[0], exact, rtol=0, atol=allowed)


def test_each_level_of_rq_kmeans_clusters_what_the_last_one_left():
    features = blobs()
    quantizer = TestRQKMeans().fit(features)
    codes = quantizer.encode(features)
    errors = [
        ((features - decode(codes[:, :depth], quantizer.centroids)) ** 2).sum(1).mean()
        for depth in range(4)
    ]
    assert errors == sorted(errors, reverse=True)
    rest = features - decode(codes[:, :1], quantizer.centroids)
    for code in np.unique(codes[:, 1]):  # a fixed point of Lloyd's algorithm
        members = rest[codes[:, 1] == code]
        np.testing.assert_allclose(members.mean(axis=0), quantizer.centroids[1][code], atol=0.05)


class _Identity(torch.nn.Module):
    def forward(self, x):
        return x


class _Shift:
    """A quantiser of two levels and two items: the first code is 1 off, the second corrects it."""

    def __init__(self, latents):
        self.codebooks = latents + 1, -torch.ones_like(latents)

    def __call__(self, latents):
        for book in self.codebooks:
            book += 100  # as moving averages do, when the codes have been chosen
        return latents, torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 0.0])


def test_the_loss_breakdown_adds_up_by_hand():
    batch = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    parts = losses(_Identity(), _Identity(), _Shift(batch), batch, commitment=0.25)
    # By the first code 1² + 1² an item, by both 0, which counts twice.
    assert parts.reconstruction.item() == pytest.approx(2 / 3)
    assert parts.commitment.item() == 2.0
    assert parts.total.item() == pytest.approx(2 / 3 + 0.5)


def test_the_gradient_passes_straight_through_the_codes_once():
    torch.manual_seed(0)
    quantizer = ResidualVQ(dim=2, num_quantizers=3, codebook_size=4)
    untouched = deepcopy(quantizer).eval()
    batch = torch.randn(16, 2)
    encoder = torch.nn.Linear(2, 2, bias=False)
    losses(encoder, _Identity(), quantizer, batch, commitment=0.0).total.backward()
    with torch.no_grad():
        codes = untouched(encoder(batch), return_all_codes=True)[-1]
        weights = torch.tensor([1.0, 2.0, 4.0])[:, None, None] / 7  # of the prefixes
        error = ((codes.double().cumsum(0) - batch) * weights).sum(0)
    # As if the codes moved with the latents.
    expected = [(2 * e / len(batch)).T @ batch.to(e.dtype) for e in (error.float(), error)]
    assert_as_exact(encoder.weight.grad, *expected)


def test_without_steps_the_codes_are_those_of_residual_k_means():
    features = blobs()  # as wide as the latents: the axes only turn them
    config = RQVAEConfig(latent_dim=6, hidden=(16,), steps=0)
    quantizer = RQVAE.fit(features, [8, 8, 8], config, seed=0)
    latents = quantizer.latents(features)
    np.testing.assert_allclose(
        latents @ latents.T, (features - features.mean(0)) @ (features - features.mean(0)).T,
        atol=1e-2,
    )  # fmt: skip
    books = RQKMeans.fit(latents, [8, 8, 8], RQKMeansConfig(), 0)
    np.testing.assert_array_equal(quantizer.encode(features), books.encode(latents))
    np.testing.assert_allclose(
        quantizer.reconstruct(quantizer.encode(features)),
        books.reconstruct(books.encode(latents)) @ _axes(quantizer) + features.mean(0),
        atol=1e-3,
    )


def _axes(quantizer):
    return quantizer.encoder.linear.weight.detach().numpy()


def test_codebooks_leave_the_k_means_they_start_from():
    features = np.tanh(blobs(items=600, dim=12))
    start, trained = (
        RQVAE.fit(features, [8, 8], RQVAEConfig(**steps)) for steps in ({"steps": 0}, {})
    )
    before, after = (
        ((features - quantizer.reconstruct(quantizer.encode(features))) ** 2).sum()
        for quantizer in (start, trained)
    )
    assert after < 0.8 * before
    assert (start.encode(features) != trained.encode(features)).mean(axis=0)[1] > 0.1


@pytest.mark.parametrize("revive_below", [0.0, 0.5])
def test_no_code_stays_dead(revive_below):
    features = blobs(items=400)
    config = RQVAEConfig(
        latent_dim=4, hidden=(16,), steps=150, batch_size=128, revive_below=revive_below
    )
    codes = RQVAE.fit(features, [32, 16], config, seed=2).encode(features)
    assert [len(np.unique(column)) for column in codes.T] == [32, 16]


def test_a_code_is_dead_by_the_size_of_its_own_level():
    start = RQKMeans.fit(blobs(), [16, 4], RQKMeansConfig(iterations=2, restarts=1))
    layers = _residual_vq(start, blobs(), RQVAEConfig(batch_size=32, revive_below=0.5)).layers
    for layer, size in zip(layers, (16, 4), strict=True):
        assert layer._codebook.embed.shape == (1, size, 6)
        assert layer._codebook.threshold_ema_dead_code == 0.5 * 32 / size
        assert layer._codebook.reset_cluster_size == 0.5 * 32 / size
        assert layer._codebook.decay == 1 - 32 / 200  # the codebooks remember one pass


def test_a_time_limit_is_shared_by_training_and_both_k_means(monkeypatch):
    limits = []

    def fit(*arguments, seconds=None, **options):
        limits.append(seconds)
        return RQKMeans.fit_unlimited(*arguments, **options)

    monkeypatch.setattr(RQKMeans, "fit_unlimited", RQKMeans.fit, raising=False)
    monkeypatch.setattr(RQKMeans, "fit", fit)
    features = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    RQVAE.fit(features, [4, 4], TestRQVAE.config, seconds=12.0)
    RQVAE.fit(features, [4, 4], TestRQVAE.config)
    assert limits == [4.0, 2.0, None, None]


def test_what_is_made_of_many_rows_is_computed_a_part_at_a_time(monkeypatch):
    features = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    fitted = RQVAE.fit(features, [4, 4], TestRQVAE.config)
    codes = fitted.encode(features)
    whole = fitted.latents(features), fitted.reconstruct(codes), unit_rows(features)
    for module in ("rqvae", "words"):
        monkeypatch.setattr(f"recsys.semantic_ids.{module}.ROWS_AT_A_TIME", 7)
    parts = fitted.latents(features), fitted.reconstruct(codes), unit_rows(features)
    for part, right in zip(parts, whole, strict=True):
        np.testing.assert_allclose(part, right, rtol=1e-5, atol=1e-6)
