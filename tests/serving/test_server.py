import re
import socket

from recsys.artifacts import write_artifact
from recsys.serving.sockets import bind


def test_the_end_of_an_answer_does_not_wait_for_an_acknowledgement():
    listener, _ = bind("127.0.0.1", 0)
    with listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_taken_port_is_noticed_before_models_load(python, tmp_path):
    with write_artifact(tmp_path / "demo", "bundle"):
        pass
    code = (
        "import sys; from pathlib import Path; from recsys.cli import main\n"
        "sys.argv[1:] = ['serve', '--bundle', sys.argv[1], '--port', sys.argv[2]]\n"
        "try: main()\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    listener, _ = bind("127.0.0.1", 0)  # it listens at once, although nothing is loaded
    with listener:
        port = listener.getsockname()[1]
        done = python("-c", code, tmp_path / "demo", str(port))
    assert done.stdout.split() == ["2", "False"]
    assert f"port {port}: Address already in use; stop the" in " ".join(done.stderr.split())
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
