import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from oracles import PATIENCE_S

from recsys.artifacts import write_artifact
from recsys.errors import ConfigError
from recsys.serving.server import serve
from recsys.serving.sockets import bind
from recsys.serving.stores import open_store

PROGRAM = """
import runpy, sys
from pathlib import Path
from recsys.serving.server import serve
from recsys.serving.settings import ServingSettings
tests, home = sys.argv[1:]
sys.path += [str(Path(tests).parent / "suites"), str(Path(tests).parents[1] / "benchmarks")]
fake = runpy.run_path(str(Path(tests) / "conftest.py"))["FakeRecommender"]
settings = ServingSettings(port=0, bundle=Path(home) / "demo", store=Path(home) / "h.db")
serve(settings, recommender=fake())
"""


@pytest.fixture
def process(server_process, tmp_path):
    with server_process("-W", "error", "-c", PROGRAM, Path(__file__).parent, tmp_path) as found:
        yield found


def test_a_killed_server_keeps_all_acknowledged_events(process, tmp_path):
    started, url = process
    acknowledged: list[str] = []

    def send(sender):
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            for n in range(10_000):
                name = f"{sender}-{n}"
                event = {"event_id": name, "user": f"u{sender}", "item": name}
                try:
                    answer = client.post("/v1/events", json={"events": [event]})
                except httpx.TransportError:
                    return
                assert answer.json()["accepted"] == 1
                acknowledged.append(name)

    with ThreadPoolExecutor(4) as senders:
        sending = [senders.submit(send, sender) for sender in range(4)]
        while len(acknowledged) < 100:
            assert not any(sent.done() for sent in sending)
            time.sleep(0.005)
        started.kill()
        for sent in sending:
            sent.result()
    store = open_store(tmp_path / "h.db")
    kept = {event.event_id for event in store.history.export()}
    store.close()
    assert set(acknowledged) <= kept
    assert len(kept) <= len(acknowledged) + 4  # no more than were on their way


def test_a_port_in_use_is_reported_with_advice(settings):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: Address already in use; stop the"):
            serve(settings.model_copy(update={"port": port}))


def test_a_taken_port_is_noticed_before_models_load(python, tmp_path):
    with write_artifact(tmp_path / "demo", "bundle"):
        pass
    code = (
        "import sys; from pathlib import Path; from recsys.cli import main\n"
        "sys.argv[1:] = ['serve', '--bundle', sys.argv[1], '--port', sys.argv[2]]\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    first = bind("127.0.0.1", 0)  # it listens at once, although nothing is loaded
    with first.socket:
        port = first.socket.getsockname()[1]
        done = python("-c", code, tmp_path / "demo", str(port))
    assert done.stdout.split() == ["2", "False"]
    assert f"another port (--port {port + 1})" in " ".join(done.stderr.split())


def test_a_wrong_bundle_is_refused_before_anything_is_loaded(python, tmp_path):
    code = (
        "import sys; from recsys.serving.commands import serve\n"
        "try: serve(bundle=__import__('pathlib').Path(sys.argv[1]))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "print('torch' in sys.modules, 'fastapi' in sys.modules)"
    )
    first, second = python("-c", code, tmp_path / "nothing").stdout.splitlines()
    assert re.match(r"ArtifactError .*nothing is not an artifact", first)
    assert second == "False False"
