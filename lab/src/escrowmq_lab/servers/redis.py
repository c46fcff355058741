"""Redis for tests. Debian package: ``redis-server``."""

from __future__ import annotations

import secrets
import shutil
import socket
from contextlib import AbstractContextManager
from pathlib import Path

from escrowmq_lab.servers.process import Server, free_port, started
from escrowmq_lab.servers.seam import Absent


def serving(folder: Path, *, durable: bool = True) -> AbstractContextManager[Server]:
    """Run a server with its data in ``folder``. ``durable`` (the default, and required by the relay's target) keeps an
    append-only file and syncs it before each response; without it nothing is written to disk. Raises
    :class:`Absent`."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise Absent("Redis is not installed; on Debian: apt-get install redis-server")
    data = folder / "redis"
    data.mkdir(parents=True, exist_ok=True)
    password, port = secrets.token_hex(8), free_port()
    config = folder / "redis.conf"
    config.touch(mode=0o600)
    config.write_text(
        f"bind 127.0.0.1\nport {port}\nrequirepass {password}\ndaemonize no\nsave ''\nloglevel warning\n"
        + ("appendonly yes\nappendfsync always\n" if durable else "appendonly no\n")
    )
    return started(
        Server(
            url=f"redis://:{password}@127.0.0.1:{port}/0",
            command=[program, str(config), "--dir", str(data)],
            ready=lambda _: _is_serving(port, password),
            log=folder / "redis.log",
        )
    )


def _is_serving(port: int, password: str) -> bool:
    """Decide whether it serves: while it loads its data, it accepts connections and responds -LOADING."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection, connection.makefile("rwb") as talk:
            talk.write(f"AUTH {password}\r\nPING\r\n".encode())
            talk.flush()
            return (talk.readline(), talk.readline()) == (b"+OK\r\n", b"+PONG\r\n")
    except OSError:
        return False
