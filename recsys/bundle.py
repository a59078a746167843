"""Bundle: the directory that evaluation and serving load, its parts and how they are read.

manifest.json       format, parents, sha256 of each file
target/ draft/      Hugging Face checkpoints (draft is optional)
catalog/            items.parquet: item id, semantic ID, title, attributes; quantizer/ and
                    item_encoder/ if codes were learned: they compute codes of new items
vocabulary.json     the tokens of the codes
prompts.json        how many items of a history the model reads
retrieval/          neighbours, popularity, item vectors, and the blend (optional);
                    trained/ has what was counted of training events alone, for evaluations
eval/               validation metrics of the training run, and its SASRec, a source of the blend
                    and a baseline (optional)
trained/            SASRec as it was evaluated, if the one that is served has learned from all
                    events
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from recsys.artifacts import Manifest, read_manifest, verify
from recsys.catalog import Catalog
from recsys.errors import ArtifactError
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.retrieval import Retrieval, SasRec
from recsys.retrieval.reranker import SASREC as SASREC_SOURCE
from recsys.retrieval.retrieval import TRAINED
from recsys.retrieval.sasrec import FILE as SASREC
from recsys.semantic_ids.encoder import ItemEncoder
from recsys.vocabulary import Vocabulary

KIND = "bundle"
TARGET, DRAFT, CATALOG, EVAL = "target", "draft", "catalog", "eval"
QUANTIZER, ITEM_ENCODER = "quantizer", "item_encoder"
PROMPTS, RETRIEVAL, VALIDATION = "prompts.json", "retrieval", "validation.json"


@dataclass(frozen=True)
class Bundle:
    """A bundle's parts, without its models.

    Attributes:
        path: the directory.
        manifest: format, parents, checksums; `manifest.digest` is the model's version.
        catalog: items and their semantic IDs.
        vocabulary: codes <-> tokens.
        prompt: the history window.
        trained: whether counts and SASRec are of training events alone, as an evaluation needs
            them, and not of all events.
    """

    path: Path
    manifest: Manifest
    catalog: Catalog
    vocabulary: Vocabulary
    prompt: PromptConfig
    trained: bool = False

    @classmethod
    def load(cls, path: Path | str, *, check: bool = True, trained: bool = False) -> Bundle:
        """Read a bundle.

        Args:
            path: the directory.
            check: compare every file with its checksum first.
            trained: as the attribute.

        Raises:
            ArtifactError: not a bundle, or a file is missing, altered or contradictory; the text
                names it.
        """
        path = Path(path)
        manifest = verify(path, KIND) if check else read_manifest(path, KIND)
        try:
            catalog = Catalog.load(path / CATALOG)
            prompt = PromptConfig(**json.loads((path / PROMPTS).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: {error}") from error
        vocabulary = Vocabulary.load(path)
        try:
            vocabulary.encode(catalog.codes)
        except ValueError as error:
            raise ArtifactError(f"{path}: catalog and vocabulary disagree: {error}") from error
        return cls(path, manifest, catalog, vocabulary, prompt, trained)

    @property
    def target(self) -> Path:
        """Checkpoint of the target."""
        return self.path / TARGET

    @property
    def draft(self) -> Path | None:
        """Checkpoint of the draft, if the bundle has one."""
        folder = self.path / DRAFT
        return folder if folder.is_dir() else None

    @property
    def coder(self) -> ItemEncoder | None:
        """The encoder of new items; None if the bundle has none."""
        from recsys.semantic_ids.encoder import ItemEncoder

        encoder, quantizer = (self.path / CATALOG / name for name in (ITEM_ENCODER, QUANTIZER))
        there = encoder.is_dir() and quantizer.is_dir()
        return ItemEncoder(encoder, quantizer) if there else None

    @property
    def retrieval(self) -> Retrieval | None:
        """The source of similar items, fallbacks and blends; None if the bundle has none.

        Raises:
            ArtifactError: it is damaged, or was made for another catalog.
        """
        folder = self.path / RETRIEVAL
        if not folder.is_dir():
            return None
        loaded = Retrieval.load(folder, trained=self.trained)
        if len(loaded) != len(self.catalog):
            raise ArtifactError(
                f"{folder} is of {len(loaded)} items, the catalog has {len(self.catalog)}; make "
                "the bundle again"
            )
        if loaded.reranker is not None and SASREC_SOURCE in loaded.reranker.sources:
            loaded = replace(
                loaded, sasrec=load_sasrec(self.path, len(loaded), trained=self.trained)
            )
        return loaded

    @property
    def encoder(self) -> PromptEncoder:
        """History -> tokens."""
        return PromptEncoder.of(self.vocabulary, self.catalog.codes, self.prompt)


def check_models(path: Path) -> None:
    """Refuse models of a bundle by their configs, before they are loaded.

    Raises:
        ArtifactError: as `recsys.models.checkpoint.check_config`.
    """
    from recsys.models.checkpoint import check_config

    for part in (TARGET, DRAFT):
        if (path / part).is_dir():
            check_config(path / part)


def load_sasrec(bundle: Path, items: int, *, trained: bool = False) -> SasRec | None:
    """The SASRec that taught a bundle's target; None without one.

    Args:
        bundle: its directory.
        items: of its catalog.
        trained: as of `Bundle`.

    Raises:
        ArtifactError: it is damaged, or was made for another catalog.
    """
    folder = Path(bundle) / EVAL
    if trained and (folder.parent / TRAINED / SASREC).is_file():
        folder = folder.parent / TRAINED
    if not (folder / SASREC).is_file():
        return None
    try:
        loaded = SasRec.load(folder)
    except ValueError as error:
        raise ArtifactError(f"{folder}: {error}; copy the bundle again") from error
    if len(loaded) != items:
        raise ArtifactError(
            f"{folder / SASREC} is of {len(loaded)} items, the catalog has {items}; make the "
            "bundle again"
        )
    return loaded
