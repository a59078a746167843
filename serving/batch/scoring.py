"""Scorer: computes the parts of a job with a loaded bundle, in a worker.

Its answers equal those of `POST /v1/recommendations` to the bit, whatever the batches: it uses the
same request of the library, and the same fallback for users without a known history.
"""

from collections.abc import Sequence

import pyarrow as pa

from recsys.errors import ArtifactError
from recsys.recommender import Recommendation, Recommender, RecommendRequest, Source
from recsys.serving.batch.job import Job
from recsys.serving.schemas.common import MAX_HISTORY
from recsys.serving.schemas.recommendations import note_code
from recsys.serving.stores.records import TypedHistory
from recsys.warm_up import warm_up

ScoredItem = tuple[str, float, Source]

BATCH = 32
SCHEMA = pa.schema(
    {
        "user_id": pa.string(),
        "item_id": pa.list_(pa.string()),
        "score": pa.list_(pa.float32()),
        "source": pa.list_(pa.string()),
        "note": pa.string(),
    }
)


class Scorer:
    """Answers parts of a job, one thread at a time."""

    def __init__(self, job: Job) -> None:
        """Load the job's bundle.

        Raises:
            ArtifactError: the bundle is damaged, or not the one that the job was planned with.
        """
        import torch

        settings = job.settings
        torch.set_num_threads(settings.threads or 1)
        self._job = job
        self._recommender = Recommender.load(
            settings.bundle,
            device=settings.device,
            dtype=settings.dtype,
            mode=settings.mode,
            max_batch=BATCH,
        )
        planned = job.plan["bundle"]
        if self._recommender.manifest.digest != planned:
            raise ArtifactError(f"{settings.bundle}: this is not bundle {planned} any more")
        warm_up(self._recommender)

    def part(self, number: int) -> pa.Table:
        """The answers to the users of a part, in their order; columns as `SCHEMA` has them.

        Raises:
            DataError: a row of the users' file is malformed.
            FilterError, RequestError: the bundle does not support the request.
        """
        ids, histories = self._job.source.read(*self._job.rows(number))
        catalog = self._recommender.catalog
        notes = [
            note_code(catalog, None if history is None else history.items[-MAX_HISTORY:])
            for history in histories
        ]
        body, known = self._job.body, self._recommender.retrieval is not None
        falls_back = known and not body.needs_model
        lists: list[list[ScoredItem]] = [[] for _ in ids]
        requests: dict[int, RecommendRequest] = {}
        for row, (history, note) in enumerate(zip(histories, notes, strict=True)):
            if history is None and not body.fallback:
                continue  # the endpoint's 404
            latest = (history or TypedHistory([], [])).latest(MAX_HISTORY)
            request = body.request(latest, self._recommender)
            if note is not None and falls_back:
                lists[row] = _listed(self._recommender.fallback(request).recommendations)
            else:
                requests[row] = request
        # alike lengths share a batch; no answer depends on it
        order = sorted(requests, key=lambda row: len(requests[row].history))
        for start in range(0, len(order), BATCH):
            positions = order[start : start + BATCH]
            results = self._recommender.recommend_batch([requests[row] for row in positions])
            for row, result in zip(positions, results, strict=True):
                lists[row] = _listed(result.recommendations)
        return pa.table(
            {
                "user_id": ids,
                "item_id": [[item for item, _, _ in listed] for listed in lists],
                "score": [[score for _, score, _ in listed] for listed in lists],
                "source": [[source for _, _, source in listed] for listed in lists],
                "note": notes,
            },
            schema=SCHEMA,
        )


def _listed(recommendations: Sequence[Recommendation]) -> list[ScoredItem]:
    return [(item.item_id, item.score, item.source) for item in recommendations]
