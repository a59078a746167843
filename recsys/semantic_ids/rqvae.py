"""RQ-VAE: an autoencoder whose latent is a sum of one learned code per level.

Lee et al., "Autoregressive Image Generation using Residual Quantization" (2022), as TIGER (Rajput
et al., 2023) uses it for items. Encoder and decoder are a linear map and an MLP side by side.
Training begins at principal components: the linear maps are their projections, and the MLPs are
zero. The codes are then those of residual k-means, which training can only leave for a lower loss.
It ends with steps of residual k-means on the final latents, so that every code is the mean of its
items. The quantiser in training is vector-quantize-pytorch's; only encoder, decoder and centroids
are kept.
"""

from __future__ import annotations

import json
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
from recsys.semantic_ids.quantizer import Quantizer, check_size, decode
from recsys.semantic_ids.rqkmeans import RQKMeans
from recsys.semantic_ids.settings import RQKMeansConfig, RQVAEConfig

WEIGHTS = "rqvae.safetensors"
CONFIG = "rqvae.json"
INIT_ROWS = 1 << 15  # items that k-means initialises the codebooks from
WARM_UP = 0.1  # share of the steps until the peak of the learning rate
POLISH = RQKMeansConfig(iterations=10, restarts=1)  # at the end


class Losses(NamedTuple):
    """Losses of one step.

    Attributes:
        reconstruction: squared error of an item, summed over its features: the weighted mean of the
            reconstructions from its first 1, 2, .. L codes.
        commitment: squared distance of each level's residual to its code, summed over levels and
            dimensions. The codebooks are updated by moving averages.
        total: reconstruction + weight × commitment.
    """

    reconstruction: Tensor
    commitment: Tensor
    total: Tensor


class RQVAE(Quantizer):
    """A fitted RQ-VAE; `centroids` (L, V, D) lie in the encoder's latent space.

    >>> features = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    >>> config = RQVAEConfig(latent_dim=4, hidden=(8,), steps=3)
    >>> quantizer = RQVAE.fit(features, levels=3, codebook_size=4, config=config)
    >>> quantizer.encode(features).shape, quantizer.centroids.shape
    ((20, 3), (3, 4, 4))
    """

    def __init__(self, encoder: Coder, decoder: Coder, centroids: NDArray[np.float32]) -> None:
        self.encoder, self.decoder = encoder.eval(), decoder.eval()
        self.centroids = centroids

    @classmethod
    def fit(
        cls,
        features: NDArray[np.float32],
        levels: int,
        codebook_size: int,
        config: RQVAEConfig,
        seed: int = 0,
    ) -> RQVAE:
        """Train on the (items, F) features of the whole catalog.

        The seed decides weights, batches, k-means and revived codes; torch's global generator is
        not changed.

        Raises:
            ValueError: fewer items than codes.
        """
        check_size(len(features), codebook_size)
        items = torch.from_numpy(np.ascontiguousarray(features, np.float32))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder, decoder = _principal_components(items, config)
            quantizer = _residual_vq(levels, codebook_size, encoder, config)
            _train(encoder, decoder, quantizer, items, config)
            with torch.no_grad():
                latents = encoder(items).numpy()
        books = quantizer.codebooks.numpy().astype(np.float32)
        final = RQKMeans.fit(latents, levels, codebook_size, POLISH, seed, books)
        return cls(encoder, decoder, final.centroids)

    @torch.no_grad()
    def latents(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """(n, F) features to (n, D) latents."""
        rows = torch.from_numpy(np.ascontiguousarray(features, np.float32))
        return np.asarray(self.encoder(rows).numpy())

    @torch.no_grad()
    def reconstruct(self, codes: NDArray[np.integer]) -> NDArray[np.float32]:
        """(n, L) codes to (n, F) features."""
        return np.asarray(self.decoder(torch.from_numpy(decode(codes, self.centroids))).numpy())

    def save(self, folder: Path) -> None:
        """Write weights, centroids and the layers' widths into `folder`."""
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"encoder.{k}": v for k, v in self.encoder.state_dict().items()}
        tensors |= {f"decoder.{k}": v for k, v in self.decoder.state_dict().items()}
        save_file({**tensors, "centroids": torch.from_numpy(self.centroids)}, folder / WEIGHTS)
        text = json.dumps({"widths": self.encoder.widths})
        (folder / CONFIG).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RQVAE:
        """Read what `save` wrote; ArtifactError if it is missing, unreadable or contradictory."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            widths = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["widths"]
            tensors = load_file(folder / WEIGHTS)
            centroids = tensors.pop("centroids").numpy()
            encoder, decoder = Coder(widths), Coder(widths[::-1])
            parts = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
            parts.load_state_dict(_with_linear(tensors, parts))
        except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise ArtifactError(f"{folder}: unreadable RQ-VAE: {error}") from error
        return cls(encoder, decoder, centroids)


class Coder(nn.Module):
    """A linear map and an MLP of the same input, added up; (B, widths[0]) to (B, widths[-1])."""

    def __init__(self, widths: list[int]) -> None:
        """Make it with an MLP whose output is zero."""
        super().__init__()
        self.widths = widths
        self.linear = nn.Linear(widths[0], widths[-1])
        layers: list[nn.Module] = []
        for inner, outer in pairwise(widths):
            last = nn.Linear(inner, outer)
            layers += [last, nn.GELU()]
        self.mlp = nn.Sequential(*layers[:-1])
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows."""
        mapped: Tensor = self.linear(rows) + self.mlp(rows)
        return mapped


def losses(
    encoder: nn.Module,
    decoder: nn.Module,
    quantizer: ResidualVQ,
    batch: Tensor,
    config: RQVAEConfig,
) -> Losses:
    """Losses of one step on a (B, F) batch; in training mode the codebooks are updated."""
    latents = encoder(batch)
    # distances: (L,), means over batch and dimensions; codes: (L, B, D)
    _, _, distances, codes = quantizer(latents, return_all_codes=True)
    committed = distances.sum() * latents.shape[1]
    weights = [config.prefix**more for more in reversed(range(len(codes)))]
    reconstruction = batch.new_zeros(())
    for weight, prefix in zip(weights, codes.cumsum(0), strict=True):
        if weight:
            # Straight-through estimator, once: the library would add the gradient L times.
            quantized = latents + (prefix - latents).detach()
            error = (decoder(quantized) - batch).square().sum(dim=1).mean()
            reconstruction = reconstruction + weight / sum(weights) * error
    return Losses(reconstruction, committed, reconstruction + config.commitment * committed)


def _train(
    encoder: Coder,
    decoder: Coder,
    quantizer: ResidualVQ,
    items: Tensor,
    config: RQVAEConfig,
) -> None:
    with torch.no_grad():  # the first call initialises the codebooks by k-means
        quantizer(encoder(items[torch.randperm(len(items))[:INIT_ROWS]]))
    if not config.steps:
        return
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.steps, pct_start=WARM_UP
    )
    size = min(config.batch_size, len(items))
    order = torch.randperm(len(items))
    with track("rq-vae", total=config.steps) as bar:
        for _ in range(config.steps):
            if len(order) < size:
                order = torch.randperm(len(items))
            batch, order = items[order[:size]], order[size:]
            parts = losses(encoder, decoder, quantizer, batch, config)
            optimizer.zero_grad()
            parts.total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            bar.advance(**{name: value.item() for name, value in parts._asdict().items()})


def _principal_components(items: Tensor, config: RQVAEConfig) -> tuple[Coder, Coder]:
    """An encoder of (n, F) items to their first D principal components, and its decoder."""
    width = min(config.latent_dim, items.shape[1])
    widths = [items.shape[1], *config.hidden, width]
    encoder, decoder = Coder(widths), Coder(widths[::-1])
    mean = items.mean(0)
    centered = (items - mean).double()
    axes = torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -width:].flip(1)  # (F, D)
    axes = axes.to(items.dtype)
    with torch.no_grad():
        encoder.linear.weight.copy_(axes.T)
        encoder.linear.bias.copy_(-mean @ axes)
        decoder.linear.weight.copy_(axes)
        decoder.linear.bias.copy_(mean)
    return encoder, decoder


def _residual_vq(
    levels: int, codebook_size: int, encoder: Coder, config: RQVAEConfig
) -> ResidualVQ:
    return ResidualVQ(
        dim=encoder.widths[-1],
        num_quantizers=levels,
        codebook_size=codebook_size,
        kmeans_init=True,
        kmeans_iters=20,
        decay=config.decay,
        threshold_ema_dead_code=config.revive_below,
        commitment_weight=1.0,  # `losses` applies the weight
        rotation_trick=False,
    )


def _with_linear(tensors: dict[str, Tensor], parts: nn.Module) -> dict[str, Tensor]:
    """Tensors of this version; those of the versions before had an MLP alone."""
    if "encoder.linear.weight" in tensors:
        return tensors
    named = {
        f"{coder}.mlp.{rest}": value
        for key, value in tensors.items()
        for coder, rest in [key.split(".", 1)]
    }
    linear = {k: torch.zeros_like(v) for k, v in parts.state_dict().items() if ".linear." in k}
    return {**named, **linear}
