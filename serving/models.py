"""Models: which bundles are loaded, and which alias stands for which; swapped while they answer.

An alias changes when the new model is loaded, warm and has answered: from then on requests that
begin get the new one. Those that began before hold a lease on the old one, which is let go when the
last of them is answered. A bundle that cannot be loaded changes nothing.

What an alias stood for is kept by name and version: a bundle that was made anew under its name is
another one, and no rollback gives it for the old.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from recsys.artifacts import MANIFEST, read_manifest
from recsys.errors import RecsysError
from recsys.serving.batcher import Batcher
from recsys.serving.engine import Done, Engine, Recommends, Work
from recsys.serving.metrics import Metrics
from recsys.serving.schemas.common import CHAMPION, ModelRef
from recsys.serving.schemas.models import AliasInfo, ModelInfo
from recsys.serving.settings import ServingSettings

logger = logging.getLogger("recsys.serving.models")
MAX_MODELS = 4
MAX_PREVIOUS = 10


class UnknownModelError(LookupError):
    """No alias has this name."""


class UnknownBundleError(LookupError):
    """No bundle has this name."""


class BundleRefusedError(Exception):
    """The bundle cannot be served; the text names the file, and those that answer go on."""


class AliasConflictError(Exception):
    """The alias cannot be changed like this; the text tells why."""


@dataclass(eq=False)
class Model:
    """One loaded bundle and its queue.

    Attributes:
        name: of the bundle.
        recommender: that answers.
        batcher: that gathers its requests.
        leases: requests under way.
        unused: set when it has no leases.
    """

    name: str
    recommender: Recommends
    batcher: Batcher[Work, Done]
    leases: int = 0
    unused: asyncio.Event = field(default_factory=asyncio.Event)

    @cached_property
    def version(self) -> str:
        """Digest of the bundle."""
        return self.recommender.manifest.digest

    @property
    def bundle(self) -> Version:
        """The bundle that it is."""
        return Version(self.name, self.version)

    def ref(self, alias: str, epoch: int | None = None) -> ModelRef:
        """The model as answers name it, at an epoch of its catalog; None for the one of now."""
        return ModelRef.model_construct(
            name=self.name,
            version=self.version,
            alias=alias,
            epoch=self.recommender.epoch.number if epoch is None else epoch,
        )


class Version(NamedTuple):
    """One bundle as it was: made again under the same name it has another digest."""

    bundle: str
    digest: str


@dataclass(frozen=True)
class Alias:
    """What an alias stands for.

    Attributes:
        model: that answers; None before its first is loaded.
        previous: what it stood for before, the latest last.
        loading: a change is under way.
        refused: why the bundle given last was refused.
    """

    model: Model | None = None
    previous: tuple[Version, ...] = ()
    loading: bool = False
    refused: str | None = None


@dataclass(frozen=True)
class KeptAlias:
    """What a store keeps of an alias.

    Attributes:
        bundle: that it stands for.
        digest: of it; None if that was not kept.
        previous: what it stood for before, the latest last.
    """

    bundle: str
    digest: str | None = None
    previous: tuple[Version, ...] = ()

    @classmethod
    def of(cls, kept: Any) -> KeptAlias:
        """From JSON; of older stores the bundle's name alone."""
        if isinstance(kept, str):
            return cls(kept)
        return cls(
            kept["bundle"], kept["digest"], tuple(Version(*pair) for pair in kept["previous"])
        )

    def to_json(self) -> dict[str, Any]:
        """As `of` reads it."""
        pairs = [list(version) for version in self.previous]
        return {"bundle": self.bundle, "digest": self.digest, "previous": pairs}


class Models:
    """The loaded models of a process, by alias."""

    def __init__(
        self,
        settings: ServingSettings,
        engine: Engine,
        metrics: Metrics,
        *,
        prepare: Callable[[Model], Awaitable[None]],
        changed: Callable[[Mapping[str, KeptAlias]], Awaitable[None]],
    ) -> None:
        """Begin without any.

        Args:
            settings: of the process.
            engine: that loads and runs them.
            metrics: to count in.
            prepare: called with a model before an alias stands for it; brings its catalog up to
                date.
            changed: called with what is to be kept of each alias after every change.
        """
        self._settings, self._engine, self._metrics = settings, engine, metrics
        self._prepare, self._changed = prepare, changed
        self._aliases: dict[str, Alias] = {}
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._retiring: set[Model] = set()
        self._own = settings.bundle.absolute()
        self._folder = settings.models_dir or self._own.parent

    # Readers

    @contextmanager
    def lease(self, alias: str = CHAMPION) -> Iterator[Model]:
        """The model behind an alias; it stays loaded until the block is left.

        Raises:
            UnknownModelError: there is no such alias, or nothing is loaded for it yet.
        """
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
        """The model behind an alias, for a look at it.

        Raises:
            UnknownModelError: there is no such alias, or nothing is loaded for it yet.
        """
        found = self._aliases.get(alias)
        if found is None or found.model is None:
            raise UnknownModelError(f"No model answers to the alias {alias!r}; /v1/aliases lists.")
        return found.model

    @property
    def loaded(self) -> list[Model]:
        """Models behind aliases, each once, the champion first."""
        aliases = sorted(self._aliases, key=lambda name: (name != CHAMPION, name))
        models = (self._aliases[name].model for name in aliases)
        return list(dict.fromkeys(model for model in models if model is not None))

    @property
    def waiting(self) -> int:
        """Requests that wait for the worker."""
        return sum(len(model.batcher) for model in (*self.loaded, *self._retiring))

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing is computed."""
        return not any(model.batcher.busy for model in (*self.loaded, *self._retiring))

    @property
    def available(self) -> list[str]:
        """Names of bundles that an alias may be given."""
        folders = [self._own]
        if self._folder.is_dir():
            folders += self._folder.iterdir()
        there = {p.name for p in folders if (p / MANIFEST).is_file()}
        return sorted(name for name in there if not name.startswith("."))

    def info(self) -> list[ModelInfo]:
        """What is loaded."""
        answers = []
        for model in self.loaded:
            epoch = model.recommender.epoch
            answers.append(
                ModelInfo(
                    name=model.name,
                    version=model.version,
                    epoch=epoch.number,
                    items=epoch.num_items,
                    levels=epoch.catalog.codes.shape[1],
                    aliases=self._names(model),
                )
            )
        return answers

    def aliases(self) -> list[AliasInfo]:
        """All aliases, by name."""
        return [self.alias(name) for name in sorted(self._aliases)]

    def alias(self, name: str) -> AliasInfo:
        """One alias.

        Raises:
            UnknownModelError: there is no such alias.
        """
        found = self._aliases.get(name)
        if found is None:
            raise UnknownModelError(f"There is no alias {name!r}.")
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
        )

    # Changes

    async def put(self, alias: str, bundle: str, *, loaded: Recommends | None = None) -> AliasInfo:
        """Let an alias stand for a bundle; returns when the bundle's model answers.

        Raises:
            UnknownBundleError: there is no such bundle.
            BundleRefusedError: it is damaged, or cannot be served.
            AliasConflictError: as many models are loaded as may be.
        """
        async with self._changing:
            previous = self._aliases.get(alias, Alias()).previous
            return await self._change(alias, bundle, previous, loaded=loaded)

    async def restore(self, alias: str, kept: KeptAlias) -> AliasInfo:
        """Let an alias stand again for what it stood for when it was kept.

        Where that version is gone, for the one that has its name now; the version counts as one
        that the alias stood for before.

        Raises:
            UnknownBundleError, BundleRefusedError, AliasConflictError: as `put`.
        """
        async with self._changing:
            bundle, previous = kept.bundle, kept.previous
            if kept.digest is not None:
                version = Version(kept.bundle, kept.digest)
                found = await asyncio.to_thread(self._find, version)
                if found is None:
                    logger.warning(
                        "alias %s: version %s of bundle %s is gone", alias, kept.digest, bundle
                    )
                    previous = (*previous, version)
                else:
                    bundle = found
            return await self._change(alias, bundle, previous)

    def put_later(self, alias: str, bundle: str) -> AliasInfo:
        """Begin `put` and return; what becomes of it is told by `alias`.

        Raises:
            UnknownBundleError: there is no such bundle.
        """
        self._path(bundle)
        self._mark(alias, loading=True, refused=None)
        task = asyncio.create_task(self._put_quietly(alias, bundle), name=f"load {bundle}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return self.alias(alias)

    async def rollback(self, alias: str) -> AliasInfo:
        """Let an alias stand for the bundle that it stood for before, in that very version.

        Raises:
            UnknownModelError: there is no such alias.
            AliasConflictError: it stood for no other before, or that version is gone.
            BundleRefusedError: as `put`.
        """
        async with self._changing:
            if alias not in self._aliases:
                raise UnknownModelError(f"There is no alias {alias!r}.")
            previous = self._aliases[alias].previous
            if not previous:
                raise AliasConflictError(f"The alias {alias!r} stood for no other bundle before.")
            version = previous[-1]
            found = await asyncio.to_thread(self._find, version)
            if found is None:
                raise AliasConflictError(_gone(alias, version))
            return await self._change(alias, found, previous[:-1], back=version)

    async def remove(self, alias: str) -> None:
        """Drop an alias; its model is let go if no other stands for it.

        Raises:
            UnknownModelError: there is no such alias.
            AliasConflictError: it is the champion.
        """
        async with self._changing:
            if alias not in self._aliases:
                raise UnknownModelError(f"There is no alias {alias!r}.")
            if alias == CHAMPION:
                raise AliasConflictError(f"The alias {CHAMPION!r} always stands for a model.")
            old = self._aliases.pop(alias).model
            await self._published(old)

    async def close(self) -> None:
        """Answer what waits, and let go of all models."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(m.batcher.close() for m in (*self.loaded, *self._retiring)))

    async def _put_quietly(self, alias: str, bundle: str) -> None:
        try:
            await self.put(alias, bundle)
        except Exception as error:  # told by `alias`, and in the log
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
        loaded: Recommends | None = None,
        back: Version | None = None,
    ) -> AliasInfo:
        before = self._aliases.get(alias)
        self._mark(alias, loading=True, refused=None)
        try:
            model = await self._model(bundle, loaded)
            if back is not None and model.version != back.digest:  # it was replaced just now
                self._retire(model)
                raise AliasConflictError(_gone(alias, back))
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
        await self._published(None if old is model else old)
        return self.alias(alias)

    async def _model(self, bundle: str, loaded: Recommends | None) -> Model:
        """A model of the bundle as it lies on disk: one that is loaded, or a new one."""
        path = self._path(bundle)
        try:
            if loaded is None:
                version = read_manifest(path, "bundle").digest
                for model in self.loaded:
                    if (model.name, model.version) == (bundle, version):
                        return model
                if len(self.loaded) >= MAX_MODELS:
                    raise AliasConflictError(
                        f"{MAX_MODELS} models are loaded already; drop an alias first."
                    )
            recommender = await self._engine.load(path, loaded)
        except RecsysError as error:
            text = str(error).replace(str(path), bundle)  # whoever asks need not learn paths
            raise BundleRefusedError(f"{text}.") from error
        except (OSError, RuntimeError, ValueError, TypeError, LookupError) as error:
            logger.exception("bundle %s refused", bundle)
            raise BundleRefusedError(
                f"{bundle}: it is whole, but cannot be loaded here ({type(error).__name__}, "
                "explained in the service's log)."
            ) from error

        async def run(batch: Sequence[Work]) -> list[Done]:
            start = time.perf_counter()
            done = await self._engine.run(recommender, batch)
            self._metrics.batch(len(batch), time.perf_counter() - start)
            return done

        settings = self._settings
        model = Model(
            bundle,
            recommender,
            Batcher(
                run,
                max_batch=settings.max_batch,
                max_wait_ms=settings.max_wait_ms,
                queue_limit=settings.queue_limit,
            ),
        )
        await self._prepare(model)
        model.batcher.start()
        return model

    async def _published(self, old: Model | None) -> None:
        """After a change: let go of what no alias stands for, and tell everybody."""
        if old is not None and old not in self.loaded:
            self._retire(old)
        self._report()
        await self._changed(
            {
                name: KeptAlias(*alias.model.bundle, alias.previous)
                for name, alias in self._aliases.items()
                if alias.model is not None
            }
        )

    def _retire(self, model: Model) -> None:
        self._retiring.add(model)
        task = asyncio.create_task(self._let_go(model), name=f"retire {model.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let_go(self, model: Model) -> None:
        if model.leases:
            await model.unused.wait()
        await model.batcher.close()
        self._retiring.discard(model)
        if Counter(other.name for other in self.loaded)[model.name] == 0:
            self._metrics.forget(model.name)
        logger.info("unloaded", extra={"fields": {"bundle": model.name}})
        # Without circles it leaves the memory by itself: a collector that walked everything for
        # it would hold up the event loop, on whatever thread it ran.
        model.recommender.close()
        del model
        await self._engine.read(self._engine.freeze)  # the new ones out of the collector's way

    def _report(self) -> None:
        self._metrics.models(
            (model.name, model.version, name)
            for model in self.loaded
            for name in self._names(model)
        )

    def _names(self, model: Model) -> list[str]:
        return sorted(name for name, alias in self._aliases.items() if alias.model is model)

    def _mark(self, alias: str, *, loading: bool, refused: str | None) -> None:
        before = self._aliases.get(alias, Alias())
        self._aliases[alias] = replace(before, loading=loading, refused=refused)

    def _find(self, version: Version) -> str | None:
        """The name of a bundle of this very version: its own, or one that it has been given."""
        for name in dict.fromkeys([version.bundle, *self.available]):
            with contextlib.suppress(UnknownBundleError, RecsysError):
                if read_manifest(self._path(name), "bundle").digest == version.digest:
                    return name
        return None

    def _path(self, bundle: str) -> Path:
        """The folder of a bundle; never one outside of the bundles' own."""
        if bundle == self._own.name:
            return self._own
        path = self._folder / bundle
        if path.name != bundle or not path.is_dir():
            raise UnknownBundleError(f"There is no bundle {bundle!r}; /v1/models lists them.")
        return path


def _gone(alias: str, version: Version) -> str:
    return (
        f"The alias {alias!r} stood for version {version.digest} of bundle {version.bundle!r} "
        "before, and no bundle here is of that version any more; bring it back, or give the alias "
        "a bundle of /v1/models."
    )
