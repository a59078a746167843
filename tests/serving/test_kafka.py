"""Events from Kafka: a real client on librdkafka's mock cluster, which speaks its protocol."""

import ctypes
import json
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from contextlib import contextmanager, suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.errors import ConfigError, RecsysError
from recsys.serving import kafka
from recsys.serving.bodies import MalformedError
from recsys.serving.client import Client, ServiceError
from recsys.serving.schemas.events import EventsBody
from recsys.testing import PATIENCE_S

confluent = pytest.importorskip("confluent_kafka", reason="the extra 'kafka' is not installed")

OFFSET_COMMIT = 8  # number of the request in Kafka's protocol
# The mock lets the next member wait for the session of one that left.
QUICK = {"session.timeout.ms": "1500", "heartbeat.interval.ms": "200", "log_level": "0"}
ERROR = {"type": "urn:recsys:problem:x", "title": "x", "detail": "x", "code": "x"}


class Cluster:
    """Mock brokers of librdkafka, through its C interface."""

    def __init__(self):
        self._lib = lib = ctypes.CDLL(confluent.cimpl.__file__)
        for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_mock_cluster_new"):
            getattr(lib, name).restype = ctypes.c_void_p
        lib.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        text = ctypes.create_string_buffer(512)
        conf = ctypes.c_void_p(lib.rd_kafka_conf_new())
        lib.rd_kafka_conf_set(conf, b"log_level", b"0", text, ctypes.c_size_t(512))
        self._client = ctypes.c_void_p(lib.rd_kafka_new(0, conf, text, ctypes.c_size_t(512)))
        assert self._client.value, text.value
        self._cluster = ctypes.c_void_p(lib.rd_kafka_mock_cluster_new(self._client, 1))
        self.brokers = lib.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        lib.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 0)

    def make_topic(self, name, partitions):
        made = self._lib.rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, 1)
        assert made == 0

    def fail(self, request, error, times):
        """Answer the next requests of a kind with an error."""
        errors = [ctypes.c_int(error)] * times
        count = ctypes.c_size_t(times)
        self._lib.rd_kafka_mock_push_request_errors(
            self._cluster, ctypes.c_int16(request), count, *errors
        )

    def recover(self, request):
        """Answer a kind of requests without errors again."""
        self._lib.rd_kafka_mock_clear_request_errors(self._cluster, ctypes.c_int16(request))

    def close(self):
        self._lib.rd_kafka_mock_cluster_destroy(self._cluster)
        self._lib.rd_kafka_destroy(self._client)


@pytest.fixture(scope="module")
def cluster():
    made = Cluster()
    yield made
    made.close()


@pytest.fixture
def topic(cluster):
    """A new topic of three partitions."""
    name = f"events-{uuid.uuid4().hex[:8]}"
    cluster.make_topic(name, 3)
    return name


@pytest.fixture
def produce(cluster, topic):
    """Write values to the partitions of the topic in turn."""
    producer = confluent.Producer({"bootstrap.servers": cluster.brokers, "log_level": 0})

    def write(*values):
        for number, value in enumerate(values):
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            producer.produce(topic, content, partition=number % 3)
        assert producer.flush(PATIENCE_S) == 0

    return write


@pytest.fixture
def forward(cluster, topic):
    """Forward in a thread; the body of the context ends it. Exceptions are raised at its end."""

    @contextmanager
    def run(client, bury=None, group="1"):
        letters, failures = [], []
        keep = bury or (lambda message, reason: letters.append((message.value(), reason)))
        consumer = kafka.open_consumer(cluster.brokers, topic, f"{topic}-{group}", QUICK)
        forwarder = kafka.Forwarder(consumer, client, keep, stop := threading.Event())
        forwarder.letters = letters

        def work():
            try:
                forwarder.run()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield forwarder, thread
        finally:
            stop.set()
            thread.join(PATIENCE_S)
            if failures:
                raise failures[0]

    return run


@pytest.fixture
def committed(cluster, topic):
    """Offsets that a group has committed, by partition; 0 for none."""

    readers = {}
    places = [confluent.TopicPartition(topic, number) for number in range(3)]

    def read(group="1"):
        own = {"bootstrap.servers": cluster.brokers, "group.id": f"{topic}-{group}"}
        if group not in readers:
            readers[group] = confluent.Consumer(own | {"log_level": 0})
        found = readers[group].committed(places, PATIENCE_S)
        return [max(place.offset, 0) for place in found]

    yield read
    for reader in readers.values():
        reader.close()


TAKEN = {"accepted": 0, "duplicates": 0, "ignored": 0, "unlinked": 0}


class Service:
    """A service of our own: it answers as it is told, and notes the events that it took."""

    def __init__(self, answer):
        self.answer, self.taken, self.calls = answer, [], 0
        self.called = threading.Event()

    def __call__(self, request):
        events = json.loads(request.content)["events"]
        self.calls += 1
        self.called.set()
        status, headers = self.answer(self.calls, events)
        if status != 200:
            body = ERROR | {"status": status}
            return httpx.Response(status, json=body, headers=headers)
        self.taken += events
        return httpx.Response(200, json=TAKEN | {"accepted": len(events)})

    def client(self):
        return Client("http://service", transport=httpx.MockTransport(self), retries=0)


class Message:
    """A message without a broker."""

    def __init__(self, value, time=(1, 1_000), offset=7, topic="t"):
        self._value, self._time, self._offset, self._topic = value, time, offset, topic

    def value(self):
        return self._value

    def timestamp(self):
        return self._time

    def topic(self):
        return self._topic

    def partition(self):
        return 2

    def offset(self):
        return self._offset


def event(number, **fields):
    return {"user": f"u{number}", "item": "item-1", "type": "click", **fields}


def wait_for(condition):
    ended = threading.Event()
    for _ in range(PATIENCE_S * 50):
        if condition():
            return
        ended.wait(0.02)
    pytest.fail("it did not come")


def test_events_reach_the_service_once_each(
    settings, recommender, serving, produce, forward, committed
):
    with serving(settings, recommender=recommender) as url, Client(url, retries=0) as client:
        produce(*[event(number) for number in range(40)], {"events": [event(40), event(41)]})
        with forward(client) as (forwarder, _):
            wait_for(lambda: forwarder.totals["accepted"] == 42)
            produce(event(1, item="item-2", event_id="mine"))
            wait_for(lambda: forwarder.totals["accepted"] == 43)
            wait_for(lambda: sum(committed()) == 42)
        assert [e.item for e in client.history("u1").events] == ["item-2", "item-1"]
        assert client.history("u1").events[0].event_id == "mine"
        assert client.history("u41").events[0].timestamp > 1.7e9
        with forward(client, group="2") as (forwarder, _):
            wait_for(lambda: forwarder.totals["duplicates"] == 43)
        assert forwarder.totals["accepted"] == 0
        assert len(client.users(prefix="u", limit=1000)) == 42


def test_what_the_service_refuses_is_kept_with_the_reason(
    settings, recommender, serving, produce, forward, committed, tmp_path
):
    path = tmp_path / "letters.ndjson"
    with serving(settings, recommender=recommender) as url, Client(url, retries=0) as client:
        client.send_events([event(0, event_id="taken")])
        produce(
            *[event(number) for number in range(10)],
            b"{not json",
            b"\xff\xfe",
            [1],
            event(1, article="item-1"),
            event(1, event_id="taken"),
            {"events": [event(20), event(21, value="much")]},
            *[event(number) for number in range(30, 40)],
        )
        with forward(client, kafka.file_of_letters(path)) as (forwarder, _):
            wait_for(lambda: sum(committed()) == 26)
        assert (forwarder.totals["accepted"], forwarder.totals["dead_letters"]) == (20, 6)
        users = set(client.users(limit=1000))
    assert {"u9", "u39"} <= users
    assert not {"u20", "u21"} & users  # a message is stored completely or not at all
    letters = [json.loads(line) for line in path.read_text().splitlines()]
    reasons = {letter.get("value"): letter["reason"] for letter in letters}
    assert reasons["{not json"].startswith("malformed_body")
    assert reasons["[1]"] == 'malformed_body: it is neither an event nor {"events": [...]}'
    assert "/events/0/article" in reasons[json.dumps(event(1, article="item-1"))]
    assert "event_conflict" in reasons[json.dumps(event(1, event_id="taken"))]
    assert [letter["value_base64"] for letter in letters if "value" not in letter] == ["//4="]
    assert {letter["partition"] for letter in letters} <= {0, 1, 2}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_message_that_a_proxy_refuses_for_its_size_is_kept():
    """The proxy's answer is a page of its own, not the service's problem document."""
    taken, buried = [], []

    def answer(request):
        if len(request.content) > 500:
            return httpx.Response(413, text="<html>Request Entity Too Large</html>")
        taken.extend(json.loads(request.content)["events"])
        return httpx.Response(200, json=TAKEN)

    with Client("http://service", transport=httpx.MockTransport(answer), retries=0) as client:
        forwarder = kafka.Forwarder(
            Idle(), client, lambda *letter: buried.append(letter), threading.Event()
        )
        large = event(1, event_id="x" * 600)
        messages = [event(0), large, event(2)]
        forwarder._deliver([Message(json.dumps(one).encode()) for one in messages])
    assert [one["user"] for one in taken] == ["u0", "u2"]
    ((message, reason),) = buried
    assert (json.loads(message.value()), "413" in reason) == (large, True)


def test_offsets_are_committed_after_the_service_answered(produce, forward, committed):
    seen = []

    def answer(call, events):
        seen.append(committed())
        return (503, {"Retry-After": "0"}) if call < 4 else (200, {})

    service = Service(answer)
    produce(*map(event, range(9)))
    with service.client() as client, forward(client):
        wait_for(lambda: committed() == [3, 3, 3])
    assert seen[:4] == [[0, 0, 0]] * 4
    assert sorted(e["user"] for e in service.taken) == [f"u{n}" for n in range(9)]


@pytest.mark.parametrize("status", [429, 503])
def test_other_messages_wait_while_the_service_is_away(status, produce, forward, committed):
    service = Service(lambda call, _: (status, {}) if call == 1 else (200, {}))
    produce(*map(event, range(6)))
    with service.client() as client, forward(client):
        wait_for(service.called.is_set)
        produce(*map(event, range(6, 12)))
        wait_for(lambda: committed() == [4, 4, 4])
    assert Counter(e["user"] for e in service.taken) == Counter(f"u{n}" for n in range(12))


class Idle:
    """A consumer without messages, which notes what it is asked."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *_: self.asked.append(name)


@pytest.mark.parametrize("status", kafka.AGAIN)
def test_what_says_nothing_about_the_events_is_repeated(status):
    service, consumer = Service(lambda call, _: (status if call < 3 else 200, {})), Idle()
    with service.client() as client:
        assert kafka.Forwarder(consumer, client, None)._post([event(1)])
    assert len(service.taken) == 1
    assert consumer.asked[:3] == ["assignment", "pause", "poll"]
    assert consumer.asked[-2:] == ["assignment", "resume"]


def test_a_service_that_cannot_be_reached_is_asked_again():
    calls = []

    def refuse(request):
        calls.append(request)
        if len(calls) < 3:
            raise httpx.ConnectError("no", request=request)
        done = {"accepted": 1, "duplicates": 0, "ignored": 0, "unlinked": 0}
        return httpx.Response(200, json=done)

    with Client("http://service", transport=httpx.MockTransport(refuse), retries=0) as client:
        assert kafka.Forwarder(Idle(), client, None)._post([event(1)])


def test_a_stop_leaves_unanswered_messages_to_the_next_consumer(produce, forward, committed):
    away = Service(lambda *_: (503, {"Retry-After": "30"}))
    produce(*map(event, range(6)))
    with away.client() as client, forward(client):
        wait_for(away.called.is_set)
    assert committed() == [0, 0, 0]
    back = Service(lambda *_: (200, {}))
    with back.client() as client, forward(client):
        wait_for(lambda: committed() == [2, 2, 2])
    assert len({e["event_id"] for e in back.taken}) == 6


def test_a_lost_commit_brings_the_same_ids_again(cluster, produce, forward, committed):
    service = Service(lambda *_: (200, {}))
    produce(*map(event, range(3)))
    cluster.fail(OFFSET_COMMIT, 22, 50)  # ILLEGAL_GENERATION, as after a rebalance
    with service.client() as client, forward(client) as (forwarder, _):
        wait_for(lambda: forwarder.totals["accepted"] == 3)
    cluster.recover(OFFSET_COMMIT)
    first = sorted(e["event_id"] for e in service.taken)
    assert committed() == [0, 0, 0]
    with service.client() as client, forward(client):
        wait_for(lambda: committed() == [1, 1, 1])
    assert sorted(e["event_id"] for e in service.taken) == sorted(first * 2)


def test_a_key_that_is_refused_ends_it(produce, forward, committed):
    service = Service(lambda *_: (401, {}))
    produce(event(0))
    with (
        service.client() as client,
        pytest.raises(ServiceError),
        forward(client) as (_, thread),
    ):
        thread.join(PATIENCE_S)
    assert committed() == [0, 0, 0]


def test_one_bad_message_costs_few_requests(produce, forward):
    def answer(_, events):
        return (422 if any(e["user"] == "u100" for e in events) else 200), {}

    service = Service(answer)
    produce(*map(event, range(256)))
    with service.client() as client, forward(client) as (forwarder, _):
        wait_for(lambda: len(service.taken) == 255)
        wait_for(lambda: forwarder.letters)
    ((value, reason),) = forwarder.letters
    assert json.loads(value)["user"] == "u100"
    assert reason == "x: x"
    assert service.calls < 40


def test_dead_letters_of_a_topic_are_the_messages(cluster, produce, forward, committed):
    name = f"dead-{uuid.uuid4().hex[:8]}"
    cluster.make_topic(name, 1)
    bury = kafka.topic_of_letters(name, {"bootstrap.servers": cluster.brokers})
    service = Service(lambda *_: (200, {}))
    produce(b"\xff", b"2")
    with service.client() as client, forward(client, bury):
        wait_for(lambda: sum(committed()) == 2)
    consumer = kafka.open_consumer(cluster.brokers, name, "reader", QUICK)
    try:
        found = consumer.consume(2, PATIENCE_S)
    finally:
        consumer.close()
    assert sorted(message.value() for message in found) == [b"2", b"\xff"]
    headers = [dict(message.headers()) for message in found]
    assert all(header["reason"].startswith(b"malformed_body") for header in headers)
    assert {header["partition"] for header in headers} == {b"0", b"1"}


class Broken:
    """A consumer whose first answer is an error in place of a message."""

    def __init__(self, code):
        self.error = confluent.KafkaError(getattr(confluent.KafkaError, code))
        self.closed = False

    def consume(self, *_):
        message = Message(None)
        message.error = lambda: self.error
        return [message]

    def close(self):
        self.closed = True


@pytest.mark.parametrize("code", ["UNKNOWN_TOPIC_OR_PART", "TOPIC_AUTHORIZATION_FAILED", "_FATAL"])
def test_a_topic_that_cannot_be_read_ends_it(code):
    consumer = Broken(code)
    with pytest.raises(kafka.KafkaError, match=code):
        kafka.Forwarder(consumer, None, lambda *_: None).run()
    assert consumer.closed


@pytest.mark.parametrize("code", kafka.PASSING)
def test_trouble_of_the_connection_does_not_end_it(code):
    consumer, stop = Broken(code), threading.Event()
    read = consumer.consume

    def consume(*_):
        stop.set()
        return read()

    consumer.consume = consume
    kafka.Forwarder(consumer, None, lambda *_: None, stop).run()
    assert consumer.closed


def test_the_command_ends_cleanly_with_sigterm(
    settings, recommender, serving, cluster, topic, produce, committed, tmp_path, environment
):
    with serving(settings, recommender=recommender) as url, Client(url) as client:
        produce(*map(event, range(5)), b"?")
        code = "from recsys.serving.event_commands import app; app()"
        line = [sys.executable, "-W", "error", "-c", code, "consume"]
        options = {"brokers": cluster.brokers, "topic": topic, "group": f"{topic}-1", "url": url}
        for name, value in options.items():
            line += [f"--{name}", value]
        pipe = subprocess.PIPE
        started = subprocess.Popen(line, stderr=pipe, text=True, env=environment, cwd=tmp_path)
        try:
            wait_for(lambda: sum(committed()) == 6)
            started.send_signal(signal.SIGTERM)
            _, err = started.communicate(timeout=PATIENCE_S)
        finally:
            started.kill()
            started.communicate()
        assert started.returncode == 0, err
        assert "5 events stored, 0 were there" in err
        assert "1 messages refused" in err
        assert len(client.users(prefix="u")) == 5
    (letter,) = (tmp_path / "dead-letters.ndjson").read_text().splitlines()
    assert json.loads(letter)["value"] == "?"


def test_ids_and_times_come_from_the_place_of_the_message():
    body = b'{"events": [{"user": "a"}, {"user": "b", "event_id": "own", "timestamp": 5}]}'
    assert kafka.read_events(Message(body, (1, 1_500))) == [
        {"event_id": "t-2-7-1500-0", "timestamp": 1.5, "user": "a"},
        {"event_id": "own", "timestamp": 5, "user": "b"},
    ]
    nulls = b'{"user": "a", "event_id": null, "timestamp": null}'
    assert kafka.read_events(Message(nulls, (0, -1))) == [{"event_id": "t-2-7--1-0", "user": "a"}]


def test_an_id_is_short_enough_for_the_service_whatever_the_topic():
    largest = Message(b'{"user": "a", "item": "b"}', (1, 4 * 10**12), 2**63 - 1, "t" * 249)
    (row,) = kafka.read_events(largest)
    assert EventsBody.model_validate({"events": [row]}).events[0].event_id == row["event_id"]
    (other,) = kafka.read_events(
        Message(largest.value(), (1, 4 * 10**12), 2**63 - 1, "t" * 248 + "u")
    )
    assert other["event_id"] != row["event_id"]


def test_a_letter_without_a_time_says_so(tmp_path):
    kafka.file_of_letters(tmp_path / "letters")(Message(b"?", (0, -1)), "why")
    assert json.loads((tmp_path / "letters").read_text())["timestamp"] is None


@given(st.binary(max_size=40) | st.none())
def test_any_value_is_events_or_malformed(value):
    with suppress(MalformedError):
        found = kafka.read_events(Message(value))
        assert all(isinstance(row, dict) and row["event_id"] for row in found)


@given(st.lists(st.integers(0, 2 * kafka.MAX_BYTES), max_size=12))
def test_parts_keep_the_order_and_the_size(lengths):
    messages = [Message(bytes(length)) for length in lengths]
    parts = list(kafka._in_parts(messages))
    assert [message for part in parts for message in part] == messages
    for part in parts:
        total = sum(len(message.value()) for message in part)
        assert len(part) == 1 or total <= kafka.MAX_BYTES


def test_settings_are_read_and_no_value_is_shown(tmp_path):
    file = tmp_path / "kafka.properties"
    file.write_text("# TLS\nsecurity.protocol = SASL_SSL\n\nsasl.password=a=b\n")
    assert kafka.read_settings(file) == {"security.protocol": "SASL_SSL", "sasl.password": "a=b"}
    file.write_text("sasl.password hunter2\n")
    with pytest.raises(ConfigError, match=r"line 1: expected name=value$"):
        kafka.read_settings(file)
    with pytest.raises(RecsysError, match=re.escape('Invalid value "***"')) as caught:
        kafka.open_consumer("localhost:1", "t", "g", {"security.protocol": "hunter2"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        kafka.read_settings(tmp_path / "none")


def test_letters_need_a_file_that_can_be_written(tmp_path):
    with pytest.raises(ConfigError, match="--dead-letters"):
        kafka.file_of_letters(tmp_path / "none" / "letters.ndjson")
    assert not list(tmp_path.iterdir())
