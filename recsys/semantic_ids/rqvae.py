"""RQ-VAE: an autoencoder whose latent is a sum of one learned code per level.

Lee et al., "Autoregressive Image Generation using Residual Quantization" (2022), as TIGER (Rajput
et al., 2023) uses it for items. Training starts from residual k-means: the encoder begins as the
projection on the features' principal axes, the decoder as the way back, and the codebooks as
RQ-KMeans of these latents. The quantiser is vector-quantize-pytorch's; after training only the
encoder, the decoder and the centroids are kept.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from vector_quantize_pytorch import ResidualVQ

from recsys.errors import ArtifactError
from recsys.progress import track
from recsys.semantic_ids.quantizer import (
    ANEW,
    Codebooks,
    Quantizer,
    centroid_tensors,
    check_sizes,
    decode,
    pop_centroids,
)
from recsys.semantic_ids.rqkmeans import RQKMeans
from recsys.semantic_ids.settings import RQKMeansConfig, RQVAEConfig
from recsys.semantic_ids.words import ROWS_AT_A_TIME

WEIGHTS = "rqvae.safetensors"
CONFIG = "rqvae.json"
WARMUP = 0.1  # of the steps, in which the learning rate rises
LEAST_BATCHES = 5  # of a pass, so that few items get enough steps
LAST = RQKMeansConfig(iterations=10, restarts=1)  # k-means steps behind training


class Losses(NamedTuple):
    """Losses of one step.

    Attributes:
        reconstruction: squared error of an item, summed over its features; mean over the items, and
            over what is decoded: its first code, its first two, ..., all of them. Each counts twice
            as much as the one before.
        commitment: squared distance of each level's residual to its code, summed over levels and
            dimensions. The codebooks are updated by moving averages.
        total: reconstruction + weight × commitment.
    """

    reconstruction: Tensor
    commitment: Tensor
    total: Tensor


class Coder(nn.Module):
    """An affine map plus an MLP whose output is zero at first: (n, F) to (n, D).

    Args:
        axes: (F, D) the map.
        before: (F,) what is subtracted from its input.
        after: (D,) what is added to its output.
        hidden: widths of the MLP's layers.
    """

    def __init__(
        self, axes: Tensor, before: Tensor, after: Tensor, hidden: tuple[int, ...] | list[int]
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(*axes.shape)
        self.mlp = _mlp([axes.shape[0], *hidden, axes.shape[1]])
        with torch.no_grad():
            self.linear.weight.copy_(axes.T)
            self.linear.bias.copy_(after - before @ axes)
            for last in self.mlp[-1].parameters():
                last.zero_()

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows."""
        out: Tensor = self.linear(rows) + self.mlp(rows)
        return out


class RQVAE(Quantizer):
    """A fitted RQ-VAE; `centroids`, L arrays (V_l, D), lie in the encoder's latent space.

    >>> features = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    >>> config = RQVAEConfig(latent_dim=4, hidden=(8,), steps=3)
    >>> quantizer = RQVAE.fit(features, sizes=[4, 2, 2], config=config)
    >>> quantizer.encode(features).shape, [book.shape for book in quantizer.centroids]
    ((20, 3), [(4, 4), (2, 4), (2, 4)])
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, centroids: Codebooks) -> None:
        self.encoder, self.decoder = encoder.eval(), decoder.eval()
        self.centroids = centroids

    @classmethod
    def fit(
        cls,
        features: NDArray[np.float32],
        sizes: Sequence[int],
        config: RQVAEConfig,
        seed: int = 0,
        *,
        seconds: float | None = None,
    ) -> RQVAE:
        """Train V_l = `sizes[l]` codes of each level l on the catalog's (items, F) features.

        Without steps, this is residual k-means of the features' principal components. The seed
        decides weights, batches, k-means and revived codes; torch's global generator is not
        changed. `seconds` is a time limit, a third of it for the first k-means and a sixth for the
        last one.

        Raises:
            ValueError: a size that does not fit the number of items.
        """
        check_sizes(len(features), sizes)
        end = time.monotonic() + (math.inf if seconds is None else seconds)
        first_seconds = last_seconds = None
        if seconds is not None:
            first_seconds, last_seconds = seconds / 3, seconds / 6
            end -= last_seconds
        items = torch.from_numpy(np.ascontiguousarray(features, np.float32))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder, decoder = _coders(items, config)
            model = cls(encoder, decoder, [])
            latents = model.latents(features)
            first = RQKMeans.fit(latents, sizes, RQKMeansConfig(), seed, seconds=first_seconds)
            model.centroids = first.centroids
            if config.steps and config.passes:
                quantizer = _residual_vq(first, latents, config)
                _train(encoder, decoder, quantizer, items, config, end)
                # Moving averages lag behind the encoder, and a code may have died: k-means goes on
                # from them with all items for which there is time.
                books = [book.numpy().astype(np.float32) for book in quantizer.codebooks]
                latents = model.latents(features)
                last = RQKMeans.fit(latents, sizes, LAST, seed, start=books, seconds=last_seconds)
                model.centroids = last.centroids
        return model

    @torch.no_grad()
    def latents(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n, F) features to (n, D) latents."""
        rows = torch.from_numpy(np.ascontiguousarray(features, np.float32))
        parts = [self.encoder(some) for some in torch.split(rows, ROWS_AT_A_TIME)]
        return np.asarray(torch.cat(parts).numpy())

    @torch.no_grad()
    def reconstruct(self, codes: NDArray[np.integer]) -> NDArray[np.float32]:
        """(n, L) codes to (n, F) features."""
        rows = torch.from_numpy(decode(codes, self.centroids))
        parts = [self.decoder(some) for some in torch.split(rows, ROWS_AT_A_TIME)]
        return np.asarray(torch.cat(parts).numpy())

    def save(self, folder: Path) -> None:
        """Write weights, centroids and the layers' widths into `folder`."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"encoder.{k}": v for k, v in self.encoder.state_dict().items()}
        tensors |= {f"decoder.{k}": v for k, v in self.decoder.state_dict().items()}
        tensors |= centroid_tensors(torch.from_numpy(book) for book in self.centroids)
        save_file(tensors, folder / WEIGHTS)
        layers = [m for m in self.encoder.modules() if isinstance(m, nn.Linear)]
        widths = [m.in_features for m in layers[1:]]  # without the affine map
        text = json.dumps({"widths": [*widths, self.centroids[0].shape[1]]})
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RQVAE:
        """Read what `save` wrote; ArtifactError if it is missing, unreadable or contradictory."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            widths = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["widths"]
            tensors = load_file(folder / WEIGHTS)
            centroids = [book.numpy() for book in pop_centroids(tensors)]
            encoder, decoder = _empty(widths), _empty(widths[::-1])
            nn.ModuleDict({"encoder": encoder, "decoder": decoder}).load_state_dict(tensors)
        except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise ArtifactError(f"{folder}: unreadable RQ-VAE: {error}; {ANEW}") from error
        return cls(encoder, decoder, centroids)


def losses(
    encoder: nn.Module,
    decoder: nn.Module,
    quantizer: ResidualVQ,
    batch: Tensor,
    commitment: float,
) -> Losses:
    """Losses of one step on a (B, F) batch; in training mode the codebooks are updated."""
    latents = encoder(batch)
    # The codes were chosen from the codebooks before their moving averages take this batch in, so
    # these are decoded, too.
    books = [book.clone() for book in quantizer.codebooks]
    # indices: (B, L); distances: (L,), means over batch and dimensions
    _, indices, distances = quantizer(latents)
    codes = [book[chosen] for book, chosen in zip(books, indices.unbind(-1), strict=True)]
    prefixes = torch.stack(codes).cumsum(dim=0)
    # Straight-through estimator, once: the library would add the gradient L times, once per level.
    quantized = latents + (prefixes - latents).detach()
    errors = (decoder(quantized) - batch).square().sum(dim=2).mean(dim=1)
    weights = 2.0 ** torch.arange(len(errors))
    reconstruction = (errors * weights / weights.sum()).sum()
    committed = distances.sum() * latents.shape[1]
    return Losses(reconstruction, committed, reconstruction + commitment * committed)


def _train(
    encoder: nn.Module,
    decoder: nn.Module,
    quantizer: ResidualVQ,
    items: Tensor,
    config: RQVAEConfig,
    end: float,
) -> None:
    size = _batch_size(config, len(items))
    total = min(config.steps, config.passes * (len(items) // size))
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=total + 1, pct_start=WARMUP
    )
    order = torch.randperm(len(items))
    with track("rq-vae", total=total) as bar:
        for _ in range(total):
            if time.monotonic() > end:
                break
            if len(order) < size:
                order = torch.randperm(len(items))
            batch, order = items[order[:size]], order[size:]
            parts = losses(encoder, decoder, quantizer, batch, config.commitment)
            optimizer.zero_grad()
            parts.total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            bar.advance(**{key: value.item() for key, value in parts._asdict().items()})


def _batch_size(config: RQVAEConfig, items: int) -> int:
    """Items per step."""
    return min(config.batch_size, max(items // LEAST_BATCHES, 1))


def _residual_vq(start: RQKMeans, latents: NDArray[np.float32], config: RQVAEConfig) -> ResidualVQ:
    """The library's quantiser with the codebooks of residual k-means on (items, D) latents."""
    batch = _batch_size(config, len(latents))
    quantizer = ResidualVQ(
        dim=latents.shape[1],
        codebook_size=tuple(len(book) for book in start.centroids),
        decay=max(1 - batch / (config.memory * len(latents)), 0.0),
        threshold_ema_dead_code=config.revive_below,  # set for each level below
        commitment_weight=1.0,  # `losses` applies the weight
        rotation_trick=False,
    )
    share = batch / len(latents)
    for layer, book, codes in zip(
        quantizer.layers, start.centroids, start.encode(latents).T, strict=True
    ):
        # The library takes no codebooks to begin with, so its moving averages are set here.
        centroids = torch.from_numpy(book)[None]
        counts = torch.from_numpy(np.bincount(codes, minlength=len(book)) * share).float()[None]
        layer._codebook.embed.copy_(centroids)
        layer._codebook.embed_avg.copy_(centroids * counts[..., None])
        layer._codebook.cluster_size.copy_(counts)
        dead = config.revive_below * batch / len(book)
        layer._codebook.threshold_ema_dead_code = layer._codebook.reset_cluster_size = dead
    return quantizer


def _coders(items: Tensor, config: RQVAEConfig) -> tuple[Coder, Coder]:
    """Encoder and decoder that begin as the principal axes of (items, F) features."""
    mean, width = items.mean(dim=0), min(config.latent_dim, items.shape[1])
    centred = items - mean
    covariance = centred.T @ centred
    axes = torch.linalg.eigh(covariance)[1][:, -width:].flip(1)  # of the largest values, first
    zero = torch.zeros(width)
    return (
        Coder(axes, mean, zero, config.hidden),
        Coder(axes.T, zero, mean, config.hidden[::-1]),
    )


def _empty(widths: list[int]) -> Coder:
    """A coder whose weights will be loaded."""
    first, *hidden, last = widths
    return Coder(torch.zeros(first, last), torch.zeros(first), torch.zeros(last), hidden)


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.GELU()]
    return nn.Sequential(*layers[:-1])
