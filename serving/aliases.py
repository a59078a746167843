"""Aliases: what the names of models stand for, and how that changes.

An alias changes when the new model is loaded, warmed up and ready, and the store has the change for
the next start: requests that begin after that use the new model. Requests that began before have
the old one until they are answered. What cannot be loaded or stored changes nothing.

The earlier bundles of an alias are kept by name and digest. A bundle that was made again under the
same name is another version, and a rollback never takes it for the old one.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from recsys.artifacts import MANIFEST, read_manifest
from recsys.bundle import check_models
from recsys.errors import RecsysError
from recsys.recommender import Recommender
from recsys.serving.catalog_changes import CatalogChanges
from recsys.serving.errors import ProblemError
from recsys.serving.metrics import Metrics
from recsys.serving.models import Alias, Model, Models, Version
from recsys.serving.rules import Rules
from recsys.serving.schemas.common import CHAMPION
from recsys.serving.schemas.models import AliasInfo
from recsys.serving.settings import ServingSettings
from recsys.serving.shared_changes import ChangeLock
from recsys.serving.stores.store import Store
from recsys.serving.worker import DecodeWorker

logger = logging.getLogger("recsys.serving.models")
STATE = "aliases"  # its name in stores
MAX_MODELS = 4
MAX_PREVIOUS = 10
MOST_ALIASES = 100


class Bundles:
    """The bundles of `models_dir`, or of the folder of `settings.bundle`, by the folders' names."""

    def __init__(self, settings: ServingSettings) -> None:
        self._own = settings.bundle.absolute()
        self._folder = settings.models_dir or self._own.parent

    def names(self) -> list[str]:
        """Names of the bundles, sorted."""
        folders = [self._own]
        if self._folder.is_dir():
            folders += self._folder.iterdir()
        names = {folder.name for folder in folders if (folder / MANIFEST).is_file()}
        return sorted(name for name in names if not name.startswith("."))

    def path(self, name: str) -> Path:
        """The folder of a bundle, which is never outside of the folder of bundles."""
        if name == self._own.name:
            return self._own
        path = self._folder / name
        if path.name != name or not path.is_dir():
            raise ProblemError(
                "unknown_bundle", f"There is no bundle {name!r}; /v1/models lists them."
            )
        return path

    def find(self, version: Version) -> str | None:
        """The name of a bundle of this version: its own name, or one it was given since."""
        for name in dict.fromkeys([version.bundle, *self.names()]):
            with contextlib.suppress(ProblemError, RecsysError):
                if read_manifest(self.path(name), "bundle").digest == version.digest:
                    return name
        return None


class Aliases:
    """Changes the aliases of the loaded models.

    Attributes:
        bundles: that an alias may be given.
    """

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
        self.bundles = Bundles(settings)
        self._changing = ChangeLock()
        self._unloading: set[asyncio.Task[None]] = set()
        self._started = False

    async def start(self, loaded: Recommender | None = None) -> None:
        """Load the models of the stored aliases, or the bundle of the settings.

        A `loaded` recommender is the champion's. Errors are those of `put`.
        """
        own = self._settings.bundle.absolute()
        state = await self._store.state.get(STATE) or {}
        stored = state.get("aliases", {}) if state.get("bundle") == str(own) else {}
        champion = stored.pop(CHAMPION, None)
        if loaded is not None:
            await self.put(CHAMPION, own.name, loaded=loaded)
        elif champion is not None:
            await self._restore(CHAMPION, **champion)
        if not self._models.loaded:
            await self.put(CHAMPION, own.name)
        for alias, fields in stored.items():
            await self._restore(alias, **fields)
        self._started = True

    def info(self, name: str) -> AliasInfo:
        """Describe an alias; `ProblemError` if there is none."""
        alias = self._models.find(name)
        before = alias.previous[-1] if alias.previous else None
        return AliasInfo(
            name=name,
            bundle=alias.model.name,
            version=alias.model.version,
            previous=None if before is None else before.bundle,
            previous_version=None if before is None else before.digest,
            rules=list(self._rules.standing(name)),
        )

    async def put(
        self, alias: str, bundle: str, rules: Sequence[str] = (), loaded: Recommender | None = None
    ) -> AliasInfo:
        """Let an alias, new or not, stand for a bundle; returns when the bundle's model answers.

        The model must fit `rules`, which the alias will have, and those that it has. A `loaded`
        recommender of the bundle is not loaded again.

        Raises:
            ProblemError: there is no such bundle, it is damaged or cannot be served, or the limit
                of aliases or of loaded models is reached.
            QueueFullError: too many changes wait.
            StoreError: the store cannot take the change.
        """
        with self._changing.counted(), self._refusals(alias):
            if loaded is None:  # before others must wait
                path = self.bundles.path(bundle)
                try:
                    await asyncio.to_thread(check_models, path)
                except RecsysError as error:
                    raise _refused(error, path, bundle) from error
            async with self._changing:
                before = self._models.aliases.get(alias)
                if before is None and len(self._models.aliases) >= MOST_ALIASES:
                    raise ProblemError(
                        "alias_conflict", f"There are {MOST_ALIASES} aliases; remove one first."
                    )
                previous = () if before is None else before.previous
                return await self._change(alias, bundle, previous, rules, loaded=loaded)

    async def _restore(
        self, alias: str, bundle: str, digest: str, previous: Sequence[tuple[str, str]]
    ) -> None:
        """Let an alias stand again for the version that it stood for when it was kept (`_keep`).

        If that is gone, the alias gets the bundle that has its name now, and the lost version
        becomes its latest previous one. An alias that cannot be restored is logged, and stays in
        the store until it is changed.
        """
        version, versions = Version(bundle, digest), tuple(Version(*pair) for pair in previous)
        async with self._changing:
            try:
                name = await asyncio.to_thread(self.bundles.find, version)
                if name is None:
                    logger.warning(
                        "alias %s: version %s of bundle %s is gone", alias, digest, bundle
                    )
                    name, versions = bundle, (*versions, version)
                await self._change(alias, name, versions)
            except Exception as error:
                logger.error("alias %s is not restored: %s", alias, error)

    async def rollback(self, alias: str) -> AliasInfo:
        """Let an alias stand for its latest previous version.

        Raises:
            ProblemError: there is no previous version, it is gone, or it cannot be served.
            StoreError: as `put`.
        """
        async with self._changing.for_client():
            previous = self._models.find(alias).previous
            if not previous:
                raise ProblemError(
                    "alias_conflict", f"The alias {alias!r} stood for no other bundle before."
                )
            version = previous[-1]
            bundle = await asyncio.to_thread(self.bundles.find, version)
            if bundle is None:
                raise ProblemError("alias_conflict", _gone(alias, version))
            with self._refusals(alias):
                return await self._change(alias, bundle, previous[:-1], back=version)

    async def remove(self, alias: str) -> None:
        """Remove an alias; its model is unloaded if no other alias stands for it.

        Raises:
            ProblemError: the alias is the champion.
            StoreError: as `put`.
        """
        async with self._changing.for_client():
            self._models.find(alias)
            if alias == CHAMPION:
                raise ProblemError(
                    "alias_conflict", f"The alias {CHAMPION!r} always stands for a model."
                )
            others = {key: value for key, value in self._models.aliases.items() if key != alias}
            await self._keep(others, alias)
            self._publish(others)
            self._metrics.swaps.remove_by_labels({"alias": alias})

    async def close(self) -> None:
        """Answer the waiting requests, and stop all models."""
        for task in self._unloading:
            task.cancel()
        await asyncio.gather(*self._unloading, return_exceptions=True)
        models = (*self._models.loaded, *self._models.retiring)
        await asyncio.gather(*(model.close() for model in models))

    async def _check_rules(self, alias: str, rules: Sequence[str], model: Model) -> None:
        """Refuse a model that the standing rules of its alias, or these, do not fit."""
        try:
            await asyncio.to_thread(self._rules.check, self._rules.of(alias, rules), model)
        except ProblemError as error:
            raise ProblemError(
                "bundle_refused",
                f"{error}; change the rule, or take it out of the 'rules' of the alias {alias!r}.",
            ) from error

    @contextlib.contextmanager
    def _refusals(self, alias: str) -> Iterator[None]:
        """Count and log a change of an alias that fails in the block."""
        try:
            yield
        except Exception as error:
            known = alias in self._models.aliases  # a series for each other name would be too many
            self._metrics.swaps.labels(alias if known else "", "refused").inc()
            if known:
                logger.error("alias %s is not changed: %s", alias, error)
            raise

    async def _change(
        self,
        alias: str,
        bundle: str,
        previous: tuple[Version, ...],
        rules: Sequence[str] = (),
        *,
        loaded: Recommender | None = None,
        back: Version | None = None,
    ) -> AliasInfo:
        before = self._models.aliases.get(alias)
        old = None if before is None else before.model
        model = await self._model(bundle, loaded)
        try:
            if back is not None and model.version != back.digest:  # replaced just now
                raise ProblemError("alias_conflict", _gone(alias, back))
            async with self._catalog_changes.joining(model), self._rules.unchanged:
                if self._started:
                    await self._check_rules(alias, rules, model)
                if old is not None and old is not model and back is None:
                    previous = (*previous, old.bundle)[-MAX_PREVIOUS:]
                aliases = {**self._models.aliases, alias: Alias(model, previous)}
                await self._keep(aliases, alias)
                self._publish(aliases)
        except BaseException:
            if model not in self._models.loaded:
                self._retire(model)
            raise
        self._metrics.swaps.labels(alias, "rolled_back" if back else "done").inc()
        if old is not None:
            logger.info("alias", extra={"fields": {"alias": alias, "bundle": bundle}})
        return self.info(alias)

    async def _model(self, bundle: str, loaded: Recommender | None) -> Model:
        """Return a model of the bundle as it is on disk: a loaded one, or a new one."""
        path = self.bundles.path(bundle)
        try:
            if loaded is None:
                version = Version(bundle, read_manifest(path, "bundle").digest)
                for model in self._models.loaded:
                    if model.bundle == version:
                        return model
                if len(self._models.loaded) >= MAX_MODELS:
                    raise ProblemError(
                        "alias_conflict",
                        f"{MAX_MODELS} models are loaded already; drop an alias first.",
                    )
            recommender = await self._worker.load(path, loaded)
        except RecsysError as error:
            raise _refused(error, path, bundle) from error
        except (OSError, RuntimeError, ValueError, TypeError, LookupError) as error:
            logger.exception("bundle %s refused", bundle)
            raise ProblemError(
                "bundle_refused",
                f"{bundle}: the bundle is complete, but cannot be loaded here "
                f"({type(error).__name__}; the service's log has the details).",
            ) from error

        model = Model.of(bundle, recommender, self._worker, self._settings)
        for batcher in model.batchers:
            batcher.start()
        return model

    async def _keep(self, aliases: Mapping[str, Alias], changed: str) -> None:
        """Write the aliases to the store, of which one was changed."""
        if not self._started:
            return  # the stored aliases are being restored
        values = {
            name: {**alias.model.bundle._asdict(), "previous": alias.previous}
            for name, alias in aliases.items()
        }
        bundle = str(self._settings.bundle.absolute())

        def change(state: dict[str, Any]) -> None:
            if state.get("bundle") != bundle:
                state.update(bundle=bundle, aliases=values)
            elif changed in values:
                state["aliases"][changed] = values[changed]
            else:
                state["aliases"].pop(changed, None)

        await self._store.state.change(STATE, change)

    def _publish(self, aliases: dict[str, Alias]) -> None:
        """Let requests use the aliases, and unload models that none of them stands for."""
        before = self._models.loaded
        self._models.aliases = aliases
        for model in before:
            if model not in self._models.loaded:
                self._retire(model)

    def _retire(self, model: Model) -> None:
        """Unload a model in the background, when its last request is answered."""
        self._models.retiring.add(model)
        task = asyncio.create_task(self._unload(model), name=f"retire {model.name}")
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)

    async def _unload(self, model: Model) -> None:
        if model.leases:
            await model.unused.wait()
        await model.close()
        self._models.retiring.discard(model)
        logger.info("unloaded", extra={"fields": {"bundle": model.name}})
        # Without reference cycles its memory is freed at once. A run of the garbage collector over
        # all objects would block the event loop, whichever thread it ran on.
        model.recommender.close()
        del model
        await asyncio.wrap_future(
            self._worker.read(self._worker.freeze)
        )  # the objects of the new models


def _refused(error: RecsysError, path: Path, bundle: str) -> ProblemError:
    text = str(error).replace(str(path), bundle)  # clients do not learn paths
    return ProblemError("bundle_refused", f"{text}.")


def _gone(alias: str, version: Version) -> str:
    return (
        f"The previous version of the alias {alias!r} is {version.digest} of bundle "
        f"{version.bundle!r}, which no bundle here has; bring it back, or give the alias a bundle "
        "of /v1/models."
    )
