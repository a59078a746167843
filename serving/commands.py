"""`recsys serve` and `keys`. `recsys --help` reads this module: nothing heavy at the top."""

from pathlib import Path
from typing import Annotated

import typer

from recsys.options import ConfigFile, Json, Name, Overrides


def serve(
    bundle: Annotated[
        Path | None, typer.Option(help="Bundle to serve (default: that of --name).")
    ] = None,
    histories: Annotated[
        Path | None,
        typer.Option(
            help="Data set whose histories are imported, once for each of its versions (default: "
            "the data set of the bundle's name)."
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address (default 127.0.0.1).")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port (default 8000; 0 takes a free one).")
    ] = None,
    insecure_listen: Annotated[
        bool,
        typer.Option("--insecure-listen", help="Accept requests from the network without keys."),
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
    from recsys.serving.memory import keep_memory
    from recsys.serving.settings import ServingSettings

    keep_memory()
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
    from recsys.serving.sockets import bind

    # fail on a wrong path or a taken port before torch is imported
    read_manifest(settings.bundle, "bundle")
    listener = bind(settings.host, settings.port)
    from recsys.serving.server import serve as run

    run(settings, listener)


keys = typer.Typer(no_args_is_help=True, add_completion=False)
KeysFile = Annotated[
    Path | None,
    typer.Option("--keys", help="File of keys (default: serve.keys of --config, or keys.json)."),
]


@keys.callback()
def _keys() -> None:
    """Create, list and revoke API keys of the service. The file holds only hashes."""


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Option(help="A plain word, for logs and revocation.")],
    scope: Annotated[
        str, typer.Option(help="read, write or admin; each includes the former.")
    ] = "read",
    expires: Annotated[
        str | None, typer.Option(help="How long it can be used: 90d or 12h (default: no limit).")
    ] = None,
    file: KeysFile = None,
    config: ConfigFile = None,
) -> None:
    """Create a key and print it once: it is stored nowhere.

    A service that runs with the file accepts the key within about a second. A service that was
    started without any key must be restarted.

    Example: recsys keys create --scope read --name shop-frontend
    """
    from recsys.progress import say
    from recsys.serving import auth

    path = _keys_file(file, config).absolute()
    typer.echo(auth.create(path, name, scope, expires))
    limit = f", for {expires}" if expires else ""
    say(f"Key {name} ({scope}{limit}) is in {path}, as a hash.")
    say("Send it as 'Authorization: Bearer KEY'.")


@keys.command("list")
def list_keys(file: KeysFile = None, config: ConfigFile = None, as_json: Json = False) -> None:
    """List the keys: name, scope, date of creation and, if any, end.

    Example: recsys keys list
    """
    import json

    from recsys.serving import auth

    known_keys = auth.read(_keys_file(file, config))
    if as_json:
        typer.echo(
            json.dumps([key.model_dump(mode="json", exclude={"sha256"}) for key in known_keys])
        )
        return
    for key in known_keys:
        state = "expired" if key.is_expired else "until"
        end = f"\t{state} {key.expires.isoformat()}" if key.expires else ""
        typer.echo(f"{key.name}\t{key.scope}\t{key.created.isoformat()}{end}")


@keys.command("revoke")
def revoke_key(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    file: KeysFile = None,
    config: ConfigFile = None,
) -> None:
    """Revoke a key; a running service refuses it within about a second.

    Example: recsys keys revoke shop-frontend
    """
    from recsys.progress import say
    from recsys.serving import auth

    auth.revoke(_keys_file(file, config), name)
    say(f"Key {name} is revoked.")


def _keys_file(file: Path | None, config: Path | None) -> Path:
    if file is not None:
        return file
    from recsys.serving.settings import ServingSettings, default_keys

    # the first key is created before the service may listen on the network
    return ServingSettings.load(config, insecure_listen=True).keys or default_keys()
