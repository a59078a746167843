"""From a shop's export to a bundle: what `recsys run EVENTS` and `recsys.fit` share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsys.config import SHIPPED, Settings
from recsys.errors import ConfigError
from recsys.pipeline import SECTIONS, Context, check
from recsys.pipeline import run as run_stages

if TYPE_CHECKING:  # the functions load it when they run
    from recsys.data.sources import Tables

RECIPE = SHIPPED / "shop.yaml"
"""Settings of a run that names no configuration."""


def table_sections(
    tables: Tables, columns: Mapping[str, str] | None = None
) -> dict[str, dict[str, object]]:
    """The settings that make the stage `data` read the tables.

    Args:
        tables: the files.
        columns: role -> name of the column, such as `{"item": "sku"}`.
    """
    data: dict[str, object] = {"source": "table", "path": tables.events, "items": tables.items}
    return {"data": data, "data.columns": dict(columns or {})}


def check_settings(settings: Settings, columns: Mapping[str, str] | None = None) -> None:
    """Check the settings of a run on tables that are not there yet, before they are written.

    Raises:
        ConfigError: see `recsys.pipeline.check`.
    """
    from recsys.data.sources import Tables

    check(settings.merged(table_sections(Tables(Path("events")), columns)))


def fit(
    events: Any,
    items: Any | None = None,
    *,
    name: str,
    columns: Mapping[str, str] | None = None,
    config: Path | None = None,
    minutes: float | None = None,
    force: bool = False,
    **sections: Mapping[str, object],
) -> Path:
    """Run the whole pipeline on a shop's events and items, as `recsys run EVENTS` does.

    Tables in memory are first written to `$RECSYS_HOME/raw/NAME`. Stages that are up to date are
    skipped.

        bundle = recsys.fit(events, items, name="shop", minutes=5)
        recsys.Recommender.load(bundle).recommend([["sku-1", "sku-2"]], k=10)

    Args:
        events: a table with one row per event: a pandas or polars frame, a pyarrow table, or any
            object with `__arrow_c_stream__`; or the path of a file or a folder.
        items: a table with one row per item, or its path.
        name: of the run and of its folders.
        columns: role -> name of the column, such as `{"item": "sku"}`.
        config: settings instead of `RECIPE`.
        minutes: time budget of the whole run.
        force: make everything again, and replace the data of another source.
        **sections: settings that differ, such as `target={"epochs": 5}`.

    Returns:
        the folder of the bundle, for `Recommender.load`.

    Raises:
        ConfigError: wrong settings, or data of another source under the same name.
        DataError: events or items that cannot be read.
    """
    from recsys.data.sources import export_tables

    unknown = sorted(set(sections) - set(SECTIONS))
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is not one of the sections {', '.join(SECTIONS)}")
    settings = Settings.load(
        config or RECIPE, sections=sections, known=SECTIONS, name=name, minutes=minutes
    )
    check_settings(settings, columns)
    tables = export_tables(events, items, settings.name, force=force)
    settings = settings.merged(table_sections(tables, columns))
    context = Context.of(settings, force=force)
    run_stages(context)
    return context.workspace.bundle
