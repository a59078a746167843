"""Starting weights."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.spatial.distance import pdist

from recsys.models.checkpoint import build
from recsys.training.draft import cut
from recsys.training.initialise import (
    centroid_embeddings,
    initialise_from_centroids,
)
from recsys.vocabulary import Vocabulary

SIZES = {"hidden_size": 16, "intermediate_size": 32, "layers": 3}


def test_embeddings_lie_to_each_other_as_the_centroids_do():
    centroids = np.random.default_rng(0).normal(3, 1, (2, 10, 6))
    for given, made in zip(
        centroids, centroid_embeddings(centroids, (10, 10), 16, 0.02), strict=True
    ):
        assert made.shape == (10, 16)
        assert_allclose(pdist(made) / pdist(given), (pdist(made) / pdist(given)).mean(), rtol=1e-4)


def test_every_level_is_centred_and_has_the_asked_spread():
    # The second level's residuals are a hundred times smaller than the first's.
    centroids = (
        np.random.default_rng(0).normal(size=(2, 10, 40)) * np.array([1, 0.01])[:, None, None]
    )
    for made in centroid_embeddings(centroids, (10, 8), 16, 0.02):
        assert np.sqrt((made**2).mean()) == pytest.approx(0.02, rel=1e-5)
        assert made.mean(axis=0) == pytest.approx(0, abs=1e-6)


def test_wide_centroids_keep_their_leading_axes():
    # All the variance is in two of 40 dimensions, so two dimensions are enough to keep distances.
    rng = np.random.default_rng(0)
    plane = np.linalg.qr(rng.normal(size=(40, 2)))[0]
    centroids = rng.normal(size=(1, 12, 2)) @ plane.T
    (made,) = centroid_embeddings(centroids, (12,), 2, 1.0)
    assert_allclose(
        pdist(made) / pdist(centroids[0]), (pdist(made) / pdist(centroids[0]))[0], rtol=1e-4
    )


@pytest.mark.parametrize("tied", [True, False])
def test_only_the_rows_of_semantic_tokens_change(tied):
    vocabulary = Vocabulary.from_levels([5, 3])
    torch.manual_seed(0)
    model = build({**SIZES, "tied": tied}, vocabulary)
    before = model.get_input_embeddings().weight.clone()
    rng = np.random.default_rng(0)
    initialise_from_centroids(model, vocabulary, [rng.normal(size=(size, 3)) for size in (5, 3)])
    after = model.get_input_embeddings().weight
    changed = (before != after).any(dim=1)
    assert changed.tolist() == [False] * 2 + [True] * 8 + [False] * 6
    head = model.get_output_embeddings().weight
    assert (head is after) is tied
    assert torch.nn.functional.cosine_similarity(head[2:10], after[2:10]).min() > 0.999


def test_a_cut_draft_starts_as_the_first_layers_of_its_target():
    torch.manual_seed(0)
    target = build(SIZES, Vocabulary.from_levels([4, 4]))
    draft = cut(target, 1)
    assert draft.config.num_hidden_layers == 1
    assert target.config.num_hidden_layers == 3
    for name, value in draft.state_dict().items():
        assert torch.equal(value, target.state_dict()[name]), name
    assert draft.get_input_embeddings().weight is not target.get_input_embeddings().weight
