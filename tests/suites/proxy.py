"""deploy/nginx.conf in front of a service, with a real nginx. Only ports, paths and times differ.

The proxy reaches the service from an address of its own, as it does on another machine.
"""

import os
import re
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path

from oracles import PATIENCE_S

CONF = Path(__file__).parents[2] / "deploy" / "nginx.conf"
NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
OPENSSL = shutil.which("openssl")
HERE, PROXY = "127.0.0.1", "127.0.0.4"


def make_certificate(folder):
    """Write a certificate of this machine and its key; returns the file of the certificate."""
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [OPENSSL, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names,
         "-keyout", folder / "privkey.pem", "-out", folder / "fullchain.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder / "fullchain.pem"


def _paths(folder):
    """Folders for what nginx writes; the default ones are root's."""
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    return " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)


@contextmanager
def start_proxy(folder, certificate, service, **values):
    """Start nginx in front of a port of the service, with other values of some directives.

    Yields its ports for TLS and for plain HTTP.
    """
    with socket.create_server((HERE, 0)) as plain, socket.create_server((HERE, 0)) as secure:
        ports = secure.getsockname()[1], plain.getsockname()[1]
        user = " user root;" if os.getuid() == 0 else ""  # for the folders of the test
        changes = {
            "worker_processes auto;": f"worker_processes 1; daemon off;{user}",
            "/var/log/nginx/error.log": "stderr",
            "/run/nginx.pid": f"{folder}/nginx.pid",
            "/etc/nginx/tls": str(certificate.parent),
            "listen 443 ssl;": f"listen {HERE}:{ports[0]} ssl;",
            "listen 80;": f"listen {HERE}:{ports[1]};",
            "server 127.0.0.1:8000;": f"server {HERE}:{service};",
            "proxy_pass ": f"proxy_bind {PROXY}; proxy_pass ",
            "http {": f"http {{ {_paths(folder)}",
        }
        text = CONF.read_text(encoding="utf-8")
        for name, value in values.items():
            text, found = re.subn(rf"(?m)^( +{name}) [^;]+;", rf"\1 {value};", text)
            assert found == 1, name
        for old, new in changes.items():
            assert old in text, old
            text = text.replace(old, new)
        file, errors = folder / "nginx.conf", folder / "nginx.log"
        file.write_text(text, encoding="utf-8")
        inherited = (plain.fileno(), secure.fileno())  # so that nobody else gets the ports
        with errors.open("w") as log:
            process = subprocess.Popen(
                [NGINX, "-p", folder, "-e", "stderr", "-c", file],
                env={"NGINX": "".join(f"{number};" for number in inherited)},
                pass_fds=inherited,
                stderr=log,
            )
    try:
        yield ports
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
    said = errors.read_text()
    assert "[emerg]" not in said, said
