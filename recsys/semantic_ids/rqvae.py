"""RQ-VAE: an autoencoder whose latent is a sum of one learned code per level.

Lee et al., "Autoregressive Image Generation using Residual Quantization" (2022), as TIGER (Rajput
et al., 2023) uses it for items. The quantiser is vector-quantize-pytorch's; after training only the
encoder, the decoder and the centroids are kept.
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
from torch.nn import functional as F
from vector_quantize_pytorch import ResidualVQ

from recsys.errors import ArtifactError
from recsys.progress import track
from recsys.semantic_ids.quantizer import Quantizer, check_size, decode
from recsys.semantic_ids.settings import RQVAEConfig

WEIGHTS = "rqvae.safetensors"
CONFIG = "rqvae.json"
INIT_ROWS = 1 << 15  # items that k-means initialises the codebooks from


class Losses(NamedTuple):
    """Losses of one step.

    Attributes:
        reconstruction: mean squared error of an item, summed over its features.
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
    >>> config = RQVAEConfig(latent_dim=4, hidden=(8,), warmup_steps=2, steps=3)
    >>> quantizer = RQVAE.fit(features, levels=3, codebook_size=4, config=config)
    >>> quantizer.encode(features).shape, quantizer.centroids.shape
    ((20, 3), (3, 4, 4))
    """

    def __init__(
        self, encoder: nn.Sequential, decoder: nn.Sequential, centroids: NDArray[np.float32]
    ) -> None:
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
            encoder, decoder = _mlps(features.shape[1], config)
            quantizer = _residual_vq(levels, codebook_size, config)
            _train(encoder, decoder, quantizer, items, config)
        return cls(encoder, decoder, quantizer.codebooks.numpy().astype(np.float32))

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
        widths = [m.in_features for m in self.encoder if isinstance(m, nn.Linear)]
        text = json.dumps({"widths": [*widths, self.centroids.shape[2]]})
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
            encoder, decoder = _mlp(widths), _mlp(widths[::-1])
            nn.ModuleDict({"encoder": encoder, "decoder": decoder}).load_state_dict(tensors)
        except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise ArtifactError(f"{folder}: unreadable RQ-VAE: {error}") from error
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
    quantized, _, distances = quantizer(latents)  # distances: (L,), means over batch and dimensions
    # Straight-through estimator, once: the library would add the gradient L times, once per level.
    quantized = latents + (quantized - latents).detach()
    reconstruction = (decoder(quantized) - batch).square().sum(dim=1).mean()
    committed = distances.sum() * latents.shape[1]
    return Losses(reconstruction, committed, reconstruction + commitment * committed)


def _train(
    encoder: nn.Sequential,
    decoder: nn.Sequential,
    quantizer: ResidualVQ,
    items: Tensor,
    config: RQVAEConfig,
) -> None:
    parameters = [*encoder.parameters(), *decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate)
    total = config.warmup_steps + config.steps
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(total, 1))
    size = min(config.batch_size, len(items))
    order = torch.randperm(len(items))
    with track("rq-vae", total=total) as bar:
        for step in range(total):
            if len(order) < size:
                order = torch.randperm(len(items))
            batch, order = items[order[:size]], order[size:]
            if step == config.warmup_steps:
                with torch.no_grad():  # the first call initialises the codebooks by k-means
                    quantizer(encoder(items[torch.randperm(len(items))[:INIT_ROWS]]))
            if step < config.warmup_steps:
                loss = F.mse_loss(decoder(encoder(batch)), batch) * batch.shape[1]
                shown = {"reconstruction": loss.item()}
            else:
                parts = losses(encoder, decoder, quantizer, batch, config.commitment)
                loss, shown = parts.total, {k: v.item() for k, v in parts._asdict().items()}
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            bar.advance(**shown)


def _residual_vq(levels: int, codebook_size: int, config: RQVAEConfig) -> ResidualVQ:
    return ResidualVQ(
        dim=config.latent_dim,
        num_quantizers=levels,
        codebook_size=codebook_size,
        kmeans_init=True,
        kmeans_iters=20,
        decay=config.decay,
        threshold_ema_dead_code=config.revive_below,
        commitment_weight=1.0,  # `losses` applies the weight
        rotation_trick=False,
    )


def _mlps(width: int, config: RQVAEConfig) -> tuple[nn.Sequential, nn.Sequential]:
    widths = [width, *config.hidden, config.latent_dim]
    return _mlp(widths), _mlp(widths[::-1])


def _mlp(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), nn.GELU()]
    return nn.Sequential(*layers[:-1])
