"""Aliases: what the names of models stand for, and how that changes.

An alias changes when the new model is loaded, warmed up and ready: requests that begin after that
use the new model. Requests that began before have the old one until they are answered. A bundle
that cannot be loaded changes nothing. The store keeps the aliases for the next start.

The earlier bundles of an alias are kept by name and digest. A bundle that was made again under the
same name is another version, and a rollback never takes it for the old one.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel

from recsys.artifacts import read_manifest
from recsys.bundle import DRAFT, TARGET
from recsys.errors import RecsysError
from recsys.recommender import Recommender
from recsys.serving.batcher import Batcher
from recsys.serving.bundles import Bundles, Version
from recsys.serving.catalog_changes import CatalogChanges
from recsys.serving.metrics import Metrics
from recsys.serving.models import (
    Alias,
    AliasConflictError,
    BundleRefusedError,
    Model,
    Models,
    UnknownModelError,
)
from recsys.serving.rules import RuleReferenceError, Rules
from recsys.serving.schemas.common import CHAMPION
from recsys.serving.schemas.models import AliasInfo
from recsys.serving.settings import ServingSettings
from recsys.serving.stores.records import StoreError
from recsys.serving.stores.store import Store
from recsys.serving.worker import DecodeWorker, Done, Work

logger = logging.getLogger("recsys.serving.models")
STATE = "aliases"  # its name in stores
MAX_MODELS = 4
MAX_PREVIOUS = 10
KEEP_S = 1.0  # between attempts to keep the aliases


class KeptAlias(BaseModel):
    """An alias as the store keeps it, as JSON."""

    bundle: str
    digest: str
    previous: tuple[Version, ...] = ()

    @classmethod
    def of(cls, alias: Alias) -> Self:
        """An alias that has a model."""
        assert alias.model is not None  # noqa: S101 - the caller has looked
        return cls(bundle=alias.model.name, digest=alias.model.version, previous=alias.previous)


class Aliases:
    """Changes the aliases of the loaded models."""

    def __init__(
        self,
        settings: ServingSettings,
        store: Store,
        worker: DecodeWorker,
        metrics: Metrics,
        models: Models,
        rules: Rules,
        catalog_changes: CatalogChanges,
    ) -> None:
        """Models fit the standing rules of their aliases, and have all changes of items."""
        self._settings, self._store, self._worker, self._metrics = settings, store, worker, metrics
        self._models, self._rules, self._catalog_changes = models, rules, catalog_changes
        self._bundles = Bundles(settings)
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = False
        self._unrestored: dict[str, KeptAlias] = {}  # their bundles could not be loaded
        self._unkept: Mapping[str, Any] | None = None  # what the store could not take
        self._keeping: asyncio.Task[None] | None = None

    async def start(self, loaded: Recommender | None = None) -> None:
        """Load the models of the stored aliases, or the bundle of the settings.

        A `loaded` recommender is the champion's. Errors are those of `put`.
        """
        own = self._settings.bundle.absolute()
        state = await self._store.state.get(STATE) or {}
        kept = state.get("aliases", {}) if state.get("bundle") == str(own) else {}
        aliases = {name: KeptAlias.model_validate(value) for name, value in kept.items()}
        champion = aliases.pop(CHAMPION, None)
        if loaded is not None:
            await self.put(CHAMPION, own.name, loaded=loaded)
        elif champion is not None:
            await self._restore(CHAMPION, champion)
        if not self._models.loaded:
            await self.put(CHAMPION, own.name)
        for alias, value in aliases.items():
            await self._restore(alias, value)
        self._started = True

    @property
    def available(self) -> list[str]:
        """Names of the bundles that an alias may be given."""
        return self._bundles.names()

    def all(self) -> list[AliasInfo]:
        """Describe all aliases, sorted by name."""
        return [self.info(name) for name in sorted(self._models.aliases)]

    def info(self, name: str) -> AliasInfo:
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
            rules=list(self._rules.standing(name)),
        )

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
            previous = self._models.aliases.get(alias, Alias()).previous
            return await self._change(alias, bundle, previous, loaded=loaded)

    async def _restore(self, alias: str, kept: KeptAlias) -> None:
        """Let an alias stand again for the version that it stood for when it was kept.

        If that is gone, the alias gets the bundle that has its name now, and the lost version
        becomes its latest previous one. An alias that cannot be restored is logged.
        """
        version, previous = Version(kept.bundle, kept.digest), kept.previous
        async with self._changing:
            try:
                bundle = await asyncio.to_thread(self._bundles.find, version)
                if bundle is None:
                    logger.warning(
                        "alias %s: version %s of bundle %s is gone", alias, *version[::-1]
                    )
                    bundle, previous = kept.bundle, (*previous, version)
                await self._change(alias, bundle, previous)
            except Exception as error:
                logger.error("alias %s is not restored: %s", alias, error)
                self._unrestored[alias] = kept

    def put_later(self, alias: str, bundle: str) -> AliasInfo:
        """Start `put` in the background; `info` reports its outcome."""
        self._bundles.path(bundle)
        self._mark(alias, loading=True, refused=None)
        self._run(self._put_in_background(alias, bundle), f"load {bundle}")
        return self.info(alias)

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
            old = self._models.aliases.pop(alias).model
            await self._publish(alias, old)

    async def close(self) -> None:
        """Answer the waiting requests, and stop all models."""
        tasks = [*self._tasks, *([] if self._keeping is None else [self._keeping])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        models = (*self._models.loaded, *self._models.retiring)
        await asyncio.gather(*(model.close() for model in models))

    async def _check_rules(self, alias: str, model: Model) -> None:
        """Refuse a model that the standing rules of its alias do not fit."""
        try:
            await asyncio.to_thread(self._rules.check, self._rules.of(alias, ()), model)
        except RuleReferenceError as error:
            raise BundleRefusedError(
                f"{error}; change the rule, or take it out of the 'rules' of the alias {alias!r}."
            ) from error

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
                    if alias in self._models.aliases:
                        self._mark(alias, loading=False, refused=str(refused))
                        logger.error("alias %s stays with its model: %s", alias, refused)
                    self._metrics.swaps.labels(alias, "refused").inc()
                    raise refused from error

    async def _put_in_background(self, alias: str, bundle: str) -> None:
        try:
            await self.put(alias, bundle)
        except Exception as error:  # `info` reports it, and the log
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
        before = self._models.aliases.get(alias)
        self._mark(alias, loading=True, refused=None)
        try:
            model = await self._model(bundle, loaded)
            if back is not None and model.version != back.digest:  # replaced just now
                self._retire(model)
                raise AliasConflictError(_gone(alias, back))
            try:
                if self._started:
                    await self._check_rules(alias, model)
            except BundleRefusedError:
                if model not in self._models.loaded:
                    self._retire(model)
                raise
        except BaseException as error:
            if before is None:
                del self._models.aliases[alias]
            else:
                reason = str(error) if isinstance(error, BundleRefusedError) else None
                self._mark(alias, loading=False, refused=reason)
                logger.error("alias %s stays with its model: %s", alias, error)
            self._metrics.swaps.labels(alias, "refused").inc()
            raise
        old = before.model if before is not None else None
        if old is not None and old is not model and back is None:
            previous = (*previous, old.bundle)[-MAX_PREVIOUS:]
        self._models.aliases[alias] = Alias(model, previous)
        self._metrics.swaps.labels(alias, "rolled_back" if back else "done").inc()
        if old is not None:
            logger.info("alias", extra={"fields": {"alias": alias, "bundle": bundle}})
        await self._publish(alias, None if old is model else old)
        return self.info(alias)

    async def _model(self, bundle: str, loaded: Recommender | None) -> Model:
        """Return a model of the bundle as it is on disk: a loaded one, or a new one."""
        path = self._bundles.path(bundle)
        try:
            if loaded is None:
                version = Version(bundle, read_manifest(path, "bundle").digest)
                for model in self._models.loaded:
                    if model.bundle == version:
                        return model
                if len(self._models.loaded) >= MAX_MODELS:
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

        is_cpu = recommender.device.type == "cpu"
        model = Model(
            bundle,
            recommender,
            self._batcher(recommender, aside=False),
            self._batcher(recommender, aside=True) if is_cpu else None,
        )
        await self._catalog_changes.replay(model)
        for each in model.batchers:
            each.start()
        return model

    def _batcher(self, recommender: Recommender, *, aside: bool) -> Batcher[Work, Done]:
        settings = self._settings
        return Batcher(
            partial(self._worker.run, recommender, aside=aside),
            max_batch=settings.max_batch,
            max_wait_ms=settings.max_wait_ms,
            queue_limit=settings.queue_limit,
        )

    async def _publish(self, alias: str, old: Model | None) -> None:
        """After a change of an alias: unload an old model that is unused, and keep the aliases."""
        if old is not None and old not in self._models.loaded:
            self._retire(old)
        loaded = {n: a for n, a in self._models.aliases.items() if a.model is not None}
        models = [(*a.model.bundle, name) for name, a in loaded.items() if a.model is not None]
        self._metrics.models(models)
        if not self._started:
            return  # the stored aliases are being restored
        self._unrestored.pop(alias, None)
        kept = {name: KeptAlias.of(one) for name, one in loaded.items()} | self._unrestored
        aliases = {name: one.model_dump(mode="json") for name, one in kept.items()}
        bundle = str(self._settings.bundle.absolute())
        self._unkept = {"bundle": bundle, "aliases": aliases}
        try:
            await self._keep()
        except StoreError as error:  # the change is in effect, until a restart
            logger.error("aliases are not kept yet: %s", error)
            if self._keeping is None or self._keeping.done():
                self._keeping = asyncio.create_task(self._keep_later(), name="aliases")

    async def _keep(self) -> None:
        """Write the aliases to the store, unless that is done; `StoreError` if it cannot be."""
        state = self._unkept
        if state is not None:
            await self._store.state.put(STATE, state)
            if self._unkept is state:
                self._unkept = None

    async def _keep_later(self) -> None:
        """Try again until the store has the aliases: it may have been full, or away."""
        while self._unkept is not None:
            await asyncio.sleep(KEEP_S)
            with contextlib.suppress(StoreError):
                await self._keep()
        logger.info("aliases are kept")

    def _retire(self, model: Model) -> None:
        self._models.retiring.add(model)
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
        self._models.retiring.discard(model)
        if all(other.name != model.name for other in self._models.loaded):
            self._metrics.forget(model.name)
        logger.info("unloaded", extra={"fields": {"bundle": model.name}})
        # Without reference cycles its memory is freed at once. A run of the garbage collector over
        # all objects would block the event loop, whichever thread it ran on.
        model.recommender.close()
        del model
        await asyncio.wrap_future(
            self._worker.read(self._worker.freeze)
        )  # the objects of the new models

    def _mark(self, alias: str, *, loading: bool, refused: str | None) -> None:
        before = self._models.aliases.get(alias, Alias())
        self._models.aliases[alias] = replace(before, loading=loading, refused=refused)

    def _find(self, alias: str) -> Alias:
        try:
            return self._models.aliases[alias]
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
