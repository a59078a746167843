"""`recsys serve`. Nothing heavy is imported at the top; `recsys --help` reads this module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recsys.options import ConfigFile, Name, Overrides


def serve(
    bundle: Annotated[
        Path | None, typer.Option(help="Bundle to serve (default: that of --name).")
    ] = None,
    histories: Annotated[
        Path | None,
        typer.Option(
            help="Data set whose users are known to the service; imported at the first start "
            "(default: the data set of the bundle's name)."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address (default 127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port (default 8000; 0 takes a free one).")
    ] = None,
    insecure_listen: Annotated[
        bool,
        typer.Option("--insecure-listen", help="Accept that others on the network can ask."),
    ] = False,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Serve recommendations over REST until Ctrl-C.

    Every setting is also a key of the section `serve` in --config, and an environment variable
    RECSYS_SERVE_*.

    Example: recsys serve --bundle var/bundles/demo --port 8000
    """
    from serving.settings import ServingSettings

    settings = ServingSettings.load(
        config,
        set_ or (),
        name=name,
        bundle=bundle,
        histories=histories,
        host=host,
        port=port,
        insecure_listen=insecure_listen or None,
    )
    from recsys.artifacts import read_manifest

    read_manifest(settings.bundle, "bundle")  # a wrong path is told before torch is imported
    from serving.server import serve as run

    run(settings)
