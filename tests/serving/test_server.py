import re
import socket

import pytest

from recsys.artifacts import write_artifact
from recsys.errors import ConfigError
from recsys.serving import server
from recsys.serving.sockets import bind


def test_the_end_of_an_answer_does_not_wait_for_an_acknowledgement():
    listener, _ = bind("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_or_a_wrong_bundle_is_noticed_before_anything_is_loaded(python, tmp_path):
    with write_artifact(tmp_path / "demo", "bundle"):
        pass
    code = (
        "import sys; from recsys.cli import main\n"
        "sys.argv[1:] = ['serve', '--bundle', sys.argv[1], '--port', sys.argv[2]]\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, *sys.modules.keys() & {'torch', 'fastapi'})"
    )
    listener, _ = bind("127.0.0.1", 0)  # it listens at once, although nothing is loaded
    with listener:
        port = listener.getsockname()[1]
        taken = f"port {port}: Address already in use; stop the .* port \\(--port {port + 1}\\)"
        for bundle, told in (("demo", taken), ("nothing", "nothing is not an artifact")):
            done = python("-c", code, tmp_path / bundle, str(port))
            assert done.stdout.split() == ["2"]
            assert re.search(told, " ".join(done.stderr.split()))


@pytest.mark.parametrize(
    ("store", "end"),
    [("127.0.0.1:1", SystemExit), ("a:b:c", ConfigError)],
    ids=["away", "wrong"],
)
def test_only_a_start_that_may_succeed_later_is_tried_again(
    settings, recommender, monkeypatch, store, end
):
    """deploy/recsys.service does not try again after status 2, which a `RecsysError` gives."""
    monkeypatch.setattr(server.logs, "configure", lambda stream: None)
    monkeypatch.setattr(server.sys, "setswitchinterval", lambda seconds: None)
    changed = settings.model_copy(update={"store": f"postgresql://{store}/shop"})
    with pytest.raises(end) as ended:
        server.serve(changed, bind("127.0.0.1", 0), recommender=recommender)
    assert "store" in str(ended.value)
