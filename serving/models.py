"""The loaded models of a process, and the aliases that stand for them.

An alias changes when the new model is loaded, warmed up and ready: requests that begin after that
use the new model. Requests that began before hold a lease on the old one, which is unloaded when
the last of them is answered. A bundle that cannot be loaded changes nothing.

The earlier bundles of an alias are kept by name and digest. A bundle that was made again under the
same name is another version, and a rollback never takes it for the old one.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, model_validator

from recsys.artifacts import read_manifest
from recsys.bundle import DRAFT, TARGET
from recsys.errors import RecsysError
from recsys.recommender import Recommender
from recsys.retrieval import Retrieval
from recsys.serving.batcher import MUCH, Answer, Batcher
from recsys.serving.bundles import Bundles, Version
from recsys.serving.metrics import Metrics
from recsys.serving.schemas.common import CHAMPION, ModelRef, made
from recsys.serving.schemas.models import AliasInfo, ModelInfo
from recsys.serving.settings import ServingSettings
from recsys.serving.worker import DecodeWorker, Done, Work

logger = logging.getLogger("recsys.serving.models")
MAX_MODELS = 4
MAX_PREVIOUS = 10


class UnknownModelError(LookupError):
    """No alias has this name, or its model is not loaded yet."""


class BundleRefusedError(Exception):
    """The bundle cannot be served; the text names the file. Other models go on."""


class AliasConflictError(Exception):
    """The alias cannot be changed in this way; the text gives the reason."""


class UnsupportedError(Exception):
    """The model behind the alias does not support this; the text says what it lacks."""


@dataclass(eq=False)
class Model:
    """A loaded bundle and its queues; `unused` is set while there are no leases.

    The second queue is for requests of much work, which a thread of its own computes; None if there
    is no such thread.
    """

    name: str
    recommender: Recommender
    batcher: Batcher[Work, Done]
    aside: Batcher[Work, Done] | None = None
    leases: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    @cached_property
    def version(self) -> str:
        """Digest of the bundle."""
        return self.recommender.manifest.digest

    @property
    def bundle(self) -> Version:
        """Name and digest of the bundle."""
        return Version(self.name, self.version)

    @property
    def batchers(self) -> list[Batcher[Work, Done]]:
        """The queues."""
        return [self.batcher] if self.aside is None else [self.batcher, self.aside]

    @property
    def busy(self) -> bool:
        """Whether any request waits or is computed."""
        return any(batcher.busy for batcher in self.batchers)

    async def submit(self, request: Work, *, deadline: float, work: float) -> Answer[Done]:
        """As `Batcher.submit`, in the queue for this amount of work."""
        batcher = self.batchers[-1 if work > MUCH else 0]
        return await batcher.submit(request, deadline=deadline, work=work)

    async def close(self) -> None:
        """Refuse new requests, and return when the waiting ones are answered."""
        await asyncio.gather(*(batcher.close() for batcher in self.batchers))

    @property
    def retrieval(self) -> Retrieval:
        """The bundle's retrieval; `UnsupportedError` if it has none."""
        if self.recommender.retrieval is None:
            raise UnsupportedError(
                f"Bundle {self.name!r} has no part 'retrieval'; make one with the stage of that "
                "name."
            )
        return self.recommender.retrieval

    def ref(self, alias: str, epoch: int | None = None) -> ModelRef:
        """The model as answers name it, at an epoch of its catalog (by default the current one)."""
        number = self.recommender.epoch.number if epoch is None else epoch
        return made(
            ModelRef,
            {"name": self.name, "version": self.version, "alias": alias, "epoch": number},
        )


@dataclass(frozen=True)
class Alias:
    """What an alias stands for.

    Attributes:
        model: the model that answers; None before the first one is loaded.
        previous: earlier versions, the latest last.
        refused: why the last bundle was refused, if it was.
    """

    model: Model | None = None
    previous: tuple[Version, ...] = ()
    loading: bool = False
    refused: str | None = None


class KeptAlias(BaseModel):
    """An alias as the store keeps it, as JSON; `digest` is None in old stores."""

    bundle: str
    digest: str | None = None
    previous: tuple[Version, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _read_old_form(cls, kept: Any) -> Any:
        return {"bundle": kept} if isinstance(kept, str) else kept


class Models:
    """The loaded models of a process, by alias."""

    def __init__(
        self,
        settings: ServingSettings,
        worker: DecodeWorker,
        metrics: Metrics,
        *,
        prepare: Callable[[Model], Awaitable[None]],
        changed: Callable[[str, Mapping[str, KeptAlias]], Awaitable[None]],
        check: Callable[[str, Model], Awaitable[None]],
        standing: Callable[[str], Sequence[str]],
    ) -> None:
        """Start without models.

        `prepare` brings a model's catalog up to date before an alias stands for it; `changed` gets
        the alias that was changed, and all aliases to keep. `check` raises `BundleRefusedError` if
        a model does not fit the `standing` rules of an alias.
        """
        self._settings, self._worker, self._metrics = settings, worker, metrics
        self._prepare, self._changed = prepare, changed
        self._check_rules, self._standing = check, standing
        self._aliases: dict[str, Alias] = {}
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retiring: set[Model] = set()
        self._bundles = Bundles(settings)

    # Readers

    @contextmanager
    def lease(self, alias: str = CHAMPION) -> Iterator[Model]:
        """Hold the model of an alias, which stays loaded until the block is left."""
        model = self.get(alias)
        model.leases += 1
        model.unused.clear()
        try:
            yield model
        finally:
            model.leases -= 1
            if not model.leases:
                model.unused.set()

    def get(self, alias: str = CHAMPION) -> Model:
        """Return the model of an alias, without a lease.

        Raises:
            UnknownModelError: there is no such alias, or its model is not loaded yet.
        """
        found = self._aliases.get(alias)
        if found is None or found.model is None:
            raise UnknownModelError(f"No model has the alias {alias!r}; /v1/aliases lists them.")
        return found.model

    @property
    def loaded(self) -> list[Model]:
        """The models of all aliases, each once, the champion first."""
        aliases = sorted(self._aliases, key=lambda name: (name != CHAMPION, name))
        models = (self._aliases[name].model for name in aliases)
        return list(dict.fromkeys(model for model in models if model is not None))

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the worker."""
        models = (*self.loaded, *self._retiring)
        return sum(len(batcher) for model in models for batcher in model.batchers)

    @property
    def idle(self) -> bool:
        """Whether no request waits or is computed."""
        return not any(model.busy for model in (*self.loaded, *self._retiring))

    @property
    def available(self) -> list[str]:
        """Names of the bundles that an alias may be given."""
        return self._bundles.names()

    def info(self) -> list[ModelInfo]:
        """Describe the loaded models."""
        return [
            ModelInfo(
                name=model.name,
                version=model.version,
                epoch=epoch.number,
                items=epoch.num_items,
                levels=epoch.catalog.codes.shape[1],
                aliases=self._names(model),
            )
            for model in self.loaded
            for epoch in [model.recommender.epoch]
        ]

    def aliases(self) -> list[AliasInfo]:
        """Describe all aliases, sorted by name."""
        return [self.alias(name) for name in sorted(self._aliases)]

    def alias(self, name: str) -> AliasInfo:
        """Describe an alias; `UnknownModelError` if there is none."""
        found = self._find(name)
        model = found.model
        before = found.previous[-1] if found.previous else None
        return AliasInfo(
            name=name,
            bundle=None if model is None else model.name,
            version=None if model is None else model.version,
            previous=None if before is None else before.bundle,
            previous_version=None if before is None else before.digest,
            status="loading" if found.loading else "ready",
            refused=found.refused,
            rules=list(self._standing(name)),
        )

    # Changes

    async def put(self, alias: str, bundle: str, *, loaded: Recommender | None = None) -> AliasInfo:
        """Let an alias, new or not, stand for a bundle; returns when the bundle's model answers.

        A `loaded` recommender of the bundle is not loaded again.

        Raises:
            UnknownBundleError: there is no such bundle.
            BundleRefusedError: the bundle is damaged, or cannot be served.
            AliasConflictError: the limit of loaded models is reached.
        """
        if loaded is None:
            await self._check(alias, bundle)
        async with self._changing:
            previous = self._aliases.get(alias, Alias()).previous
            return await self._change(alias, bundle, previous, loaded=loaded)

    async def restore(self, alias: str, kept: KeptAlias) -> AliasInfo:
        """Let an alias stand again for the bundle that it stood for when it was kept.

        If that version is gone, the alias gets the bundle that has its name now, and the lost
        version becomes its latest previous one.
        """
        async with self._changing:
            bundle, previous = kept.bundle, kept.previous
            if kept.digest is not None:
                version = Version(kept.bundle, kept.digest)
                found = await asyncio.to_thread(self._bundles.find, version)
                if found is None:
                    logger.warning(
                        "alias %s: version %s of bundle %s is gone", alias, kept.digest, bundle
                    )
                    previous = (*previous, version)
                else:
                    bundle = found
            return await self._change(alias, bundle, previous)

    def put_later(self, alias: str, bundle: str) -> AliasInfo:
        """Start `put` in the background; `alias` reports its outcome."""
        self._bundles.path(bundle)
        self._mark(alias, loading=True, refused=None)
        self._run(self._put_in_background(alias, bundle), f"load {bundle}")
        return self.alias(alias)

    async def rollback(self, alias: str) -> AliasInfo:
        """Let an alias stand for its latest previous version.

        Raises:
            AliasConflictError: there is no previous version, or it is gone.
            BundleRefusedError: as `put`.
        """
        async with self._changing:
            previous = self._find(alias).previous
            if not previous:
                raise AliasConflictError(f"The alias {alias!r} stood for no other bundle before.")
            version = previous[-1]
            found = await asyncio.to_thread(self._bundles.find, version)
            if found is None:
                raise AliasConflictError(_gone(alias, version))
            return await self._change(alias, found, previous[:-1], back=version)

    async def remove(self, alias: str) -> None:
        """Remove an alias; its model is unloaded if no other alias stands for it.

        Raises:
            AliasConflictError: the alias is the champion.
        """
        async with self._changing:
            self._find(alias)
            if alias == CHAMPION:
                raise AliasConflictError(f"The alias {CHAMPION!r} always stands for a model.")
            old = self._aliases.pop(alias).model
            await self._publish(alias, old)

    async def close(self) -> None:
        """Answer the waiting requests, and stop all models."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(m.close() for m in (*self.loaded, *self._retiring)))

    async def _check(self, alias: str, bundle: str) -> None:
        """Refuse a bundle whose models cannot be as large as they say, before others must wait."""
        from recsys.models.checkpoint import check_sizes

        path = self._bundles.path(bundle)
        for part in (TARGET, DRAFT):
            if (path / part).is_dir():
                try:
                    await asyncio.to_thread(check_sizes, path / part)
                except RecsysError as error:
                    refused = _refused(error, path, bundle)
                    if alias in self._aliases:
                        self._mark(alias, loading=False, refused=str(refused))
                        logger.error("alias %s stays with its model: %s", alias, refused)
                    self._metrics.swaps.labels(alias, "refused").inc()
                    raise refused from error

    async def _put_in_background(self, alias: str, bundle: str) -> None:
        try:
            await self.put(alias, bundle)
        except Exception as error:  # `alias` reports it, and the log
            expected = isinstance(error, BundleRefusedError | AliasConflictError)
            if not expected:
                logger.exception("alias %s could not be changed", alias)
            self._mark(alias, loading=False, refused=str(error) if expected else "it failed")

    async def _change(
        self,
        alias: str,
        bundle: str,
        previous: tuple[Version, ...],
        *,
        loaded: Recommender | None = None,
        back: Version | None = None,
    ) -> AliasInfo:
        before = self._aliases.get(alias)
        self._mark(alias, loading=True, refused=None)
        try:
            model = await self._model(bundle, loaded)
            if back is not None and model.version != back.digest:  # replaced just now
                self._retire(model)
                raise AliasConflictError(_gone(alias, back))
            try:
                await self._check_rules(alias, model)
            except BundleRefusedError:
                if model not in self.loaded:
                    self._retire(model)
                raise
        except BaseException as error:
            if before is None:
                del self._aliases[alias]
            else:
                reason = str(error) if isinstance(error, BundleRefusedError) else None
                self._mark(alias, loading=False, refused=reason)
                logger.error("alias %s stays with its model: %s", alias, error)
            self._metrics.swaps.labels(alias, "refused").inc()
            raise
        old = before.model if before is not None else None
        if old is not None and old is not model and back is None:
            previous = (*previous, old.bundle)[-MAX_PREVIOUS:]
        self._aliases[alias] = Alias(model, previous)
        self._metrics.swaps.labels(alias, "rolled_back" if back else "done").inc()
        if old is not None:
            logger.info("alias", extra={"fields": {"alias": alias, "bundle": bundle}})
        await self._publish(alias, None if old is model else old)
        return self.alias(alias)

    async def _model(self, bundle: str, loaded: Recommender | None) -> Model:
        """Return a model of the bundle as it is on disk: a loaded one, or a new one."""
        path = self._bundles.path(bundle)
        try:
            if loaded is None:
                version = Version(bundle, read_manifest(path, "bundle").digest)
                for model in self.loaded:
                    if model.bundle == version:
                        return model
                if len(self.loaded) >= MAX_MODELS:
                    raise AliasConflictError(
                        f"{MAX_MODELS} models are loaded already; drop an alias first."
                    )
            recommender = await self._worker.load(path, loaded)
        except RecsysError as error:
            raise _refused(error, path, bundle) from error
        except (OSError, RuntimeError, ValueError, TypeError, LookupError) as error:
            logger.exception("bundle %s refused", bundle)
            raise BundleRefusedError(
                f"{bundle}: the bundle is complete, but cannot be loaded here "
                f"({type(error).__name__}; the service's log has the details)."
            ) from error

        settings = self._settings

        def batcher(*, aside: bool) -> Batcher[Work, Done]:
            async def run(batch: Sequence[Work]) -> list[Done]:
                start = time.perf_counter()
                done = await self._worker.run(recommender, batch, aside=aside)
                self._metrics.batch(len(batch), time.perf_counter() - start)
                return done

            return Batcher(
                run,
                max_batch=settings.max_batch,
                max_wait_ms=settings.max_wait_ms,
                queue_limit=settings.queue_limit,
            )

        second = batcher(aside=True) if recommender.device.type == "cpu" else None
        model = Model(bundle, recommender, batcher(aside=False), second)
        await self._prepare(model)
        for each in model.batchers:
            each.start()
        return model

    async def _publish(self, alias: str, old: Model | None) -> None:
        """After a change of an alias: unload an old model that is unused, report the aliases."""
        if old is not None and old not in self.loaded:
            self._retire(old)
        models = {name: a.model for name, a in self._aliases.items() if a.model is not None}
        self._metrics.models((*model.bundle, name) for name, model in models.items())
        await self._changed(
            alias,
            {
                name: KeptAlias(
                    bundle=model.name,
                    digest=model.version,
                    previous=self._aliases[name].previous,
                )
                for name, model in models.items()
            },
        )

    def _retire(self, model: Model) -> None:
        self._retiring.add(model)
        self._run(self._unload(model), f"retire {model.name}")

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run work in the background until `close`."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _unload(self, model: Model) -> None:
        if model.leases:
            await model.unused.wait()
        await model.close()
        self._retiring.discard(model)
        if all(other.name != model.name for other in self.loaded):
            self._metrics.forget(model.name)
        logger.info("unloaded", extra={"fields": {"bundle": model.name}})
        # Without reference cycles its memory is freed at once. A run of the garbage collector over
        # all objects would block the event loop, whichever thread it ran on.
        model.recommender.close()
        del model
        await asyncio.wrap_future(
            self._worker.read(self._worker.freeze)
        )  # the objects of the new models

    def _names(self, model: Model) -> list[str]:
        return sorted(name for name, alias in self._aliases.items() if alias.model is model)

    def _mark(self, alias: str, *, loading: bool, refused: str | None) -> None:
        before = self._aliases.get(alias, Alias())
        self._aliases[alias] = replace(before, loading=loading, refused=refused)

    def _find(self, alias: str) -> Alias:
        try:
            return self._aliases[alias]
        except KeyError:
            raise UnknownModelError(f"There is no alias {alias!r}.") from None


def _refused(error: RecsysError, path: Path, bundle: str) -> BundleRefusedError:
    text = str(error).replace(str(path), bundle)  # clients do not learn paths
    return BundleRefusedError(f"{text}.")


def _gone(alias: str, version: Version) -> str:
    return (
        f"The previous version of the alias {alias!r} is {version.digest} of bundle "
        f"{version.bundle!r}, which no bundle here has; bring it back, or give the alias a bundle "
        "of /v1/models."
    )
