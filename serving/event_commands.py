"""`recsys events`. Nothing heavy is imported at the top; `recsys --help` reads this module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _events() -> None:
    """Bring events from elsewhere to a running service."""


@app.command("consume")
def consume(
    brokers: Annotated[str, typer.Option(help="Brokers of Kafka: HOST:PORT, comma-separated.")],
    topic: Annotated[str, typer.Option(help="Topic of the events.")],
    url: Annotated[str, typer.Option(help="URL of the running service.")] = "http://127.0.0.1:8000",
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with the API key (default: RECSYS_API_KEY); its scope is write."),
    ] = None,
    group: Annotated[str, typer.Option(help="Consumer group.")] = "recsys",
    settings: Annotated[
        Path | None,
        typer.Option(help="File with name=value lines for Kafka's client, such as TLS and SASL."),
    ] = None,
    dead_letters: Annotated[
        Path, typer.Option(help="File for the messages that the service refuses.")
    ] = Path("dead-letters.ndjson"),
    dead_letter_topic: Annotated[
        str | None, typer.Option(help="Topic for them, in place of the file.")
    ] = None,
) -> None:
    """Send the events of a Kafka topic to a running service, until SIGTERM or Ctrl-C.

    A message is an event as in POST /v1/events, or {"events": [...]}. Each is delivered at least
    once, and repeated ones are recognised. Needs the extra 'kafka'.

    Example: recsys events consume --brokers localhost:9092 --topic shop-events
    """
    import signal
    import threading

    from recsys.errors import ConfigError, RecsysError
    from recsys.progress import say
    from recsys.serving import kafka
    from recsys.serving.client import Client, ServiceError

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url}: it must begin with http:// or https://")
    secret = os.environ.get("RECSYS_API_KEY")
    if key_file is not None:
        try:
            secret = key_file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--key-file {key_file}: {error}") from error
    given = {} if settings is None else kafka.read_settings(settings)
    consumer = kafka.open_consumer(brokers, topic, group, given)
    if dead_letter_topic is None:
        bury = kafka.file_of_letters(dead_letters)
    else:
        bury = kafka.topic_of_letters(dead_letter_topic, given | {"bootstrap.servers": brokers})
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with Client(url, key=secret or None, retries=0) as client:
        forwarder = kafka.Forwarder(consumer, client, bury, stop)
        say(f"Reading topic {topic} as group {group}; Ctrl-C ends it.")
        try:
            forwarder.run()
        except ServiceError as error:
            raise RecsysError(f"the service at {url} refuses the events: {error}") from error
    done = forwarder.totals
    say(
        f"{done['accepted']} events stored, {done['duplicates']} were there, {done['ignored']} of "
        f"erased users left out, {done['dead_letters']} messages refused."
    )
