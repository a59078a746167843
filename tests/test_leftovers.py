"""The check at the end of a run, on runs that leave something behind."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from oracles import has_ended

UNTIDY = """
import socket, subprocess, sys, tempfile
from pathlib import Path

def test_that_leaves_a_process_whose_parent_has_ended():
    code = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)

def test_that_leaves_a_folder():
    tempfile.mkdtemp(prefix="left-")

def test_that_leaves_a_file_beside_the_sources(request):
    (request.config.rootpath / "odd.txt").touch()

def test_that_leaves_a_port():
    global kept
    kept = socket.create_server(("127.0.0.1", 0))
"""


def run(folder: Path, text: str, workers: str) -> subprocess.CompletedProcess[str]:
    conftest = Path(__file__).with_name("conftest.py").read_text()
    (folder / "conftest.py").write_text(conftest.replace("PATIENCE_S = 300", "PATIENCE_S = 1"))
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:schemathesis",
         "-n", workers, str(folder)],
        capture_output=True, text=True, check=False, cwd=folder,
    )  # fmt: skip


@pytest.mark.parametrize("workers", ["0", "1"])
def test_what_a_run_leaves_behind_fails_it(tmp_path: Path, workers: str) -> None:
    done = run(tmp_path, UNTIDY, workers)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "4 passed" in done.stdout
    _, found = done.stdout.split("the tests have left something behind")
    (process,) = re.findall(r"process (\d+) is alive: sleep 600", found)
    assert len(re.findall(r"/left-\w+ is left", found)) == 1
    assert f"{tmp_path / 'odd.txt'} is new" in found
    assert len(re.findall(r"listens on 127\.0\.0\.1:\d+", found)) == 1
    assert has_ended(int(process))
    assert not any(Path(line.split(" is left")[0]).exists() for line in found.splitlines())
