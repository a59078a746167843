"""Events from a Kafka topic, sent to a running service through `POST /v1/events`.

Delivery is at least once: the offsets of messages are committed after the service has stored their
events. A message that arrives again gives the same event ids, so its events count as duplicates.
The service alone validates events. What it refuses for good is kept as a dead letter, with the
reason. It does not know what events mean, nor the store.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx

from recsys.errors import ConfigError, RecsysError
from recsys.progress import say
from recsys.serving.bodies import MalformedError, parse
from recsys.serving.client import MAX_WAIT_S, Client, ServiceError

BATCH = 500  # messages that are asked for at once
MAX_BYTES = 256 * 1024  # of their values in one request; the service takes 1 MiB
MAX_TOPIC = 150  # characters that ids of events begin with; a longer name is hashed
POLL_S = 1.0
FLUSH_S = 30.0  # until a dead letter is in its topic
FIRST_WAIT_S = 0.1
AGAIN = (408, 429, 500, 502, 503, 504)  # statuses that say nothing about the events
REFUSED = (400, 409, 413, 422)  # statuses that will be the same next time
PASSING = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_MAX_POLL_EXCEEDED", "_TIMED_OUT", "_RESOLVE")


class KafkaError(RecsysError):
    """Kafka refused what is needed: a setting, the topic, or the group."""


class Message(Protocol):
    """The parts of `confluent_kafka.Message` that are used."""

    def error(self) -> Any:
        """The error that stands in place of a message, or None."""

    def topic(self) -> str:
        """Name of the topic."""

    def partition(self) -> int:
        """Number of the partition."""

    def offset(self) -> int:
        """Place in the partition."""

    def timestamp(self) -> tuple[int, int]:
        """Its kind (0: none) and Unix milliseconds."""

    def key(self) -> bytes | None:
        """The key, which says nothing here."""

    def value(self) -> bytes | None:
        """The content; None deletes earlier messages with the same key."""


Bury = Callable[[Message, str], None]
Part = tuple[Message, list[dict[str, Any]]]  # a message and its events


def read_events(message: Message) -> list[dict[str, Any]]:
    """The events of a message: one event, or `{"events": [...]}`, as in `POST /v1/events`.

    An event without an `event_id` gets one from the message's topic, partition, offset and time; so
    a repeated message is recognised, and a topic that was made again has other ids. An event
    without a `timestamp` gets the message's.

    Raises:
        MalformedError: the message is not JSON, or of another form.
    """
    value = message.value()
    if value is None:
        raise MalformedError("it has no value")
    found = parse(value)
    is_batch = isinstance(found, dict) and found.keys() == {"events"}
    events = found["events"] if is_batch else [found]
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise MalformedError('it is neither an event nor {"events": [...]}')
    kind, time_ms = message.timestamp()
    topic = message.topic()
    if len(topic) > MAX_TOPIC:  # an id has 256 characters at most
        topic = hashlib.sha256(topic.encode()).hexdigest()
    place = f"{topic}-{message.partition()}-{message.offset()}-{time_ms}"
    defaults = {"timestamp": time_ms / 1000} if kind else {}
    return [
        {"event_id": f"{place}-{number}"}
        | defaults
        | {name: value for name, value in event.items() if value is not None}
        for number, event in enumerate(events)
    ]


class Forwarder:
    """Moves the messages of a consumer to a service, until it is told to stop.

    Attributes:
        totals: numbers of events by outcome (`accepted`, `duplicates`, `ignored`, `unlinked`), and
            of messages that became `dead_letters`.
    """

    def __init__(
        self, consumer: Any, client: Client, bury: Bury, stop: threading.Event | None = None
    ) -> None:
        """Create it from parts that are open.

        Args:
            consumer: a subscribed `confluent_kafka.Consumer` that does not commit by itself; it is
                closed at the end.
            client: of the service, without retries of its own.
            bury: keeps a message that the service refuses, with the reason, before it returns.
            stop: ends `run` when it is set.
        """
        self.totals: Counter[str] = Counter()
        self._consumer, self._client, self._bury = consumer, client, bury
        self._stop = stop or threading.Event()
        self._early: list[Message] = []  # arrived while the service was waited for

    def run(self) -> None:
        """Forward messages until `stop` is set; what is not acknowledged then is not committed.

        Raises:
            KafkaError: the topic or the group cannot be read.
            ServiceError: the service refuses the requests themselves, for example the key.
        """
        try:
            while not self._stop.is_set():
                found = [*self._early, *self._consumer.consume(BATCH, POLL_S)]
                self._early = []
                for messages in _in_parts([m for m in found if self._is_message(m)]):
                    if not self._deliver(messages):
                        return
                    self._commit(messages)
        finally:
            self._consumer.close()

    def _is_message(self, message: Message) -> bool:
        error = message.error()
        if error is None:
            return True
        if error.fatal() or error.name() not in PASSING:
            raise KafkaError(f"Kafka: {error.name()}: {error.str()}")
        say(f"Kafka: {error.str()}")
        return False

    def _deliver(self, messages: Sequence[Message]) -> bool:
        parts: list[Part] = []
        for message in messages:
            try:
                parts.append((message, read_events(message)))
            except MalformedError as error:
                self._refuse(message, f"malformed_body: {error}")
        return self._send(parts)

    def _send(self, parts: Sequence[Part]) -> bool:
        """Send the events of messages; halves of what is refused, down to the message that is.

        Returns:
            False if it was stopped before the service answered.
        """
        events = [event for _, found in parts for event in found]
        if not events:
            return True
        try:
            return self._post(events)
        except ServiceError as error:
            # A proxy that refuses the size answers with a text of its own.
            if error.status not in REFUSED or (error.problem is None and error.status != 413):
                raise
            if len(parts) > 1:
                half = len(parts) // 2
                return self._send(parts[:half]) and self._send(parts[half:])
            errors = (error.problem and error.problem.errors) or ()
            fields = [f"{field.pointer}: {field.detail}" for field in errors]
            self._refuse(parts[0][0], "; ".join([str(error), *fields]))
            return True

    def _post(self, events: Sequence[Mapping[str, Any]]) -> bool:
        """Send events until the service answers; waits as it asks, and longer each time."""
        attempt, told = 0, ""
        while not self._stop.is_set():
            backoff = min(FIRST_WAIT_S * 2**attempt, MAX_WAIT_S)
            try:
                done = self._client.send_events(events)
            except httpx.TransportError as error:
                reason, wait_s = f"it cannot be reached ({type(error).__name__})", backoff
            except ServiceError as error:
                if error.status not in AGAIN:
                    raise
                reason, wait_s = str(error), error.retry_after_s or backoff
            else:
                if attempt:
                    say("The service takes events again.")
                self.totals.update(done.model_dump())
                return True
            if reason != told:
                say(f"The service takes no events now: {reason}. They are sent again.")
            attempt, told = attempt + 1, reason
            self._wait(wait_s * random.uniform(1.0, 1.25))  # noqa: S311
        return False

    def _wait(self, seconds: float) -> None:
        """Wait without fetching; a consumer that does not poll for minutes leaves its group."""
        end = time.monotonic() + seconds
        while not self._stop.is_set() and (left := end - time.monotonic()) > 0:
            # in the loop: a rebalance brings partitions that are not paused
            self._consumer.pause(self._consumer.assignment())
            message = self._consumer.poll(min(left, POLL_S))
            if message is not None:
                self._early.append(message)
        self._consumer.resume(self._consumer.assignment())

    def _refuse(self, message: Message, reason: str) -> None:
        self._bury(message, reason)
        self.totals["dead_letters"] += 1
        place = f"{message.topic()}, partition {message.partition()}, offset {message.offset()}"
        say(f"A message was refused ({place}): {reason[:300]}")

    def _commit(self, messages: Sequence[Message]) -> None:
        from confluent_kafka import KafkaException, TopicPartition

        after = {(m.topic(), m.partition()): m.offset() + 1 for m in messages}
        ours = {(place.topic, place.partition) for place in self._consumer.assignment()}
        offsets = [TopicPartition(*place, after[place]) for place in sorted(after.keys() & ours)]
        if not offsets:
            return
        try:
            self._consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:  # of a rebalance, or of brokers that are away
            say(f"Kafka: the offsets were not committed: {error.args[0].str()}; the messages may "
                "be delivered again")  # fmt: skip


def _in_parts(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Consecutive messages of at most `MAX_BYTES`; a larger message is alone."""
    part: list[Message] = []
    size = 0
    for message in messages:
        length = len(message.value() or b"")
        if part and size + length > MAX_BYTES:
            yield part
            part, size = [], 0
        part.append(message)
        size += length
    if part:
        yield part


def file_of_letters(path: Path) -> Bury:
    """Dead letters as lines of a file, which only its owner can read.

    A line has `reason`, `topic`, `partition`, `offset`, `timestamp` (Unix seconds, or null), and
    `value` as text or, if it is not UTF-8, `value_base64`. It is on the disk before
    the offset is committed.

    Raises:
        ConfigError: the file cannot be written.
    """

    def bury(message: Message, reason: str) -> None:
        value, (kind, time_ms) = message.value(), message.timestamp()
        letter: dict[str, Any] = {
            "reason": reason,
            "topic": message.topic(),
            "partition": message.partition(),
            "offset": message.offset(),
            "timestamp": time_ms / 1000 if kind else None,
        }
        try:
            letter["value"] = None if value is None else value.decode()
        except UnicodeDecodeError:
            letter["value_base64"] = base64.b64encode(value or b"").decode()
        append(json.dumps(letter, ensure_ascii=False) + "\n")

    def append(text: str) -> None:
        try:
            place = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(place, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"--dead-letters {path}: {error.strerror or error}") from error

    append("")
    return bury


def topic_of_letters(topic: str, settings: Mapping[str, str]) -> Bury:
    """Dead letters as messages of a topic: key and value as they were, with a header `reason`.

    The headers `topic`, `partition` and `offset` name the place of the message.

    Raises:
        KafkaError: in use, where the broker does not take a letter.
    """
    import_kafka()
    from confluent_kafka import Producer

    producer = Producer(dict(settings))

    def bury(message: Message, reason: str) -> None:
        errors: list[Any] = []
        headers = {
            "reason": reason,
            "topic": message.topic(),
            "partition": str(message.partition()),
            "offset": str(message.offset()),
        }
        producer.produce(
            topic,
            key=message.key(),
            value=message.value(),
            headers=list(headers.items()),
            on_delivery=lambda error, _: errors.append(error),
        )
        if producer.flush(FLUSH_S) or errors != [None]:
            text = errors[0].str() if errors else f"no answer within {FLUSH_S:.0f} s"
            raise KafkaError(f"Kafka: a dead letter was not written to topic {topic!r}: {text}")

    return bury


def read_settings(path: Path) -> dict[str, str]:
    """Settings of Kafka's client from a file with a `name=value` in each line.

    Empty lines and lines that begin with `#` are left out.

    Raises:
        ConfigError: the file cannot be read, or a line has another form; no value is shown.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--settings {path}: {error}") from error
    found = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, sign, value = line.partition("=")
            if not sign or not name.strip():
                raise ConfigError(f"--settings {path}, line {number}: expected name=value")
            found[name.strip()] = value.strip()
    return found


def open_consumer(
    brokers: str, topic: str, group: str, settings: Mapping[str, str] | None = None
) -> Any:
    """A consumer of a topic, from its beginning where the group has committed no offset.

    Args:
        brokers: `host:port`, comma-separated.
        topic: its name.
        group: consumers of one group share the partitions.
        settings: of `confluent_kafka`, for example for TLS and SASL.

    Raises:
        ConfigError: `confluent_kafka` is not installed.
        KafkaError: it refuses a setting; no value of `settings` is shown.
    """
    import_kafka()
    from confluent_kafka import Consumer, KafkaException

    own = {
        "bootstrap.servers": brokers,
        "group.id": group,
        "enable.auto.commit": False,
        "error_cb": _Told(),
    }
    try:
        consumer = Consumer({"auto.offset.reset": "earliest"} | dict(settings or {}) | own)
        consumer.subscribe([topic])
    except KafkaException as error:
        text = error.args[0].str()
        for value in sorted((settings or {}).values(), key=len, reverse=True):
            text = text.replace(value, "***") if value else text
        raise KafkaError(f"Kafka refuses the settings: {text}") from None
    return consumer


class _Told:
    """Says each error of the connection once, until another one comes."""

    def __init__(self) -> None:
        self._last = ""

    def __call__(self, error: Any) -> None:
        if error.name() != self._last:
            self._last = error.name()
            say(f"Kafka: {error.str()}")


def import_kafka() -> None:
    """Import the client of Kafka.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import confluent_kafka  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Kafka needs the package confluent-kafka: pip install 'recbeam[kafka]'"
        ) from error
