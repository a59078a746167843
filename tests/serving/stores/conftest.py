"""Real servers for the stores, as apt installs them, each in a folder of its own."""

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import pytest
import sqlalchemy as sa
from oracles import PATIENCE_S

from recsys.serving.stores import open_store
from recsys.serving.stores.records import Event, content_digest
from recsys.serving.stores.schema import RECOMMENDATIONS

SET_UPS = 5  # another process may take a port between its being found and its being used


def free_port():
    """One that no outgoing connection is given while a server is down that had it."""
    for port in random.SystemRandom().sample(range(10_000, 30_000), 100):
        with suppress(OSError), closing(socket.create_server(("127.0.0.1", port))):
            return port
    raise AssertionError("no port is free between 10000 and 30000")


def start_somewhere(server):
    """Start a server for the first time, on another port where the first is taken."""
    for attempt in range(SET_UPS):
        server.port = free_port()
        try:
            server.start()
        except AssertionError:
            if attempt == SET_UPS - 1:
                raise
        else:
            return


class Postgres:
    def __init__(self, binaries, home):
        self.binaries, self.home, self.port = binaries, home, 0
        self.how = ("-w", "-t", str(PATIENCE_S), "-D", f"{home}/data")
        self.as_user = ()
        if os.geteuid() == 0:  # the server refuses to run as root
            shutil.chown(home, pwd.getpwnam("postgres").pw_uid)
            self.as_user = ("runuser", "-u", "postgres", "--")
        self.run("initdb", "-D", f"{home}/data", "-A", "trust", "-U", "postgres", "--no-sync")

    @property
    def url(self):
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def run(self, program, *arguments):
        command = [*self.as_user, str(self.binaries / program), *arguments]
        # A file, not a pipe: the server outlives `pg_ctl` and would keep the pipe open.
        with (self.home / "out").open("wb") as out:
            done = subprocess.run(command, stdout=out, stderr=out, cwd=self.home)
        assert done.returncode == 0, (self.home / "out").read_text()

    def start(self):
        options = (
            f"-p {self.port} -h 127.0.0.1 -k {self.home} -c fsync=off -c deadlock_timeout=50ms"
        )
        self.run("pg_ctl", "start", *self.how, "-l", f"{self.home}/data/log", "-o", options)

    def stop(self, mode="immediate"):
        self.run("pg_ctl", "stop", *self.how, "-m", mode)

    def freeze(self, how=signal.SIGSTOP):
        """Stop all processes of the server without ending them, or let them go on."""
        server = int((self.home / "data" / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        for process in (server, *map(int, children)):
            with suppress(ProcessLookupError):  # a child may end after it was listed
                os.kill(process, how)

    def thaw(self):
        self.freeze(signal.SIGCONT)

    def empty(self):
        import psycopg

        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")


@pytest.fixture(scope="session")
def postgres_server():
    pytest.importorskip("psycopg", reason="the extra 'postgres' is not installed")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    home = Path(tempfile.mkdtemp(prefix="recsys-postgres-"))
    try:
        server = Postgres(found[-1].parent, home)
        start_somewhere(server)
        yield server
        server.stop()
    finally:
        shutil.rmtree(home)


@pytest.fixture
def postgres(postgres_server):
    postgres_server.empty()
    return postgres_server


@pytest.fixture(params=["sqlite", "postgres"])
def location(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/var/histories.db"
    server = request.getfixturevalue("postgres")
    return server.url


@pytest.fixture
def opened():
    """`open_store`, with the closing seen to."""
    stores = []

    def make(location, **options):
        stores.append(open_store(location, **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def store(location, opened):
    return opened(location)


@pytest.fixture
def remembered():
    answers = RECOMMENDATIONS.c.recommendation_id
    return lambda store, answer: (
        answer in {name for (name,) in store.database.read(sa.select(answers))}
    )


@pytest.fixture
def event():
    def make(event_id, user="ada", item="x", time_ms=1000, **fields):
        kind = fields.pop("type", "view")
        digest = content_digest(user, item, kind, time_ms, *fields.values())
        return Event(event_id, user, item, kind, time_ms, digest=digest, **fields)

    return make
