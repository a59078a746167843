"""The socket that the service listens on; opened before models are loaded, so it imports little."""

import errno
import socket

from recsys.errors import ConfigError

Listener = tuple[socket.socket, str]  # that listens, and its URL for this machine


def bind(host: str, port: int) -> Listener:
    """Open a listening socket. Connections wait until a server accepts them.

    Raises:
        ConfigError: the port is taken, or the address is not one of this machine.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = addresses[0]
        # Another process that starts now sees that the port is taken.
        listener = socket.create_server(address, family=family)
        # Its connections have it, too. Without it, the end of an answer that is sent in two parts
        # waits until the client's system acknowledges the first, up to 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # without the address again
        advice = "choose another with --host or --port"
        if error.errno == errno.EADDRINUSE:
            advice = f"stop the process that uses it, or take another port (--port {port + 1})"
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}; {advice}") from error
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - for a client here
    return listener, f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
