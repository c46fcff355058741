"""PostgreSQL for tests. Debian package: ``postgresql``."""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from escrowmq_lab.servers.process import Server, folder_for, free_port, run, started
from escrowmq_lab.servers.seam import Absent

FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
"""Settings without durability: test data does not outlive the tests."""


@contextlib.contextmanager
def serving(folder: Path, *, durable: bool = False) -> Iterator[Server]:
    """Run a server with its data in ``folder``; ``url`` is a SQLAlchemy URL (psycopg 3) of its superuser. ``durable``
    keeps fsync on (benchmarks). Raises :class:`Absent`."""
    binaries = find_binaries()
    user = unprivileged()
    password = secrets.token_hex(8)
    with folder_for(user, folder) as home:
        data = home / "postgres"
        _initialise(binaries, data, password, user)
        port = free_port()
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": "",
            "max_connections": "200",
            "max_prepared_transactions": "20",
            "shared_buffers": "64MB",
            "log_min_messages": "warning",
            **({} if durable else FAST),
        }
        flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        server = Server(
            url=f"postgresql+psycopg://escrow:{password}@127.0.0.1:{port}/postgres",
            command=[str(binaries / "postgres"), "-D", str(data), *flags],
            ready=lambda pid: _is_ready(data / "postmaster.pid", pid),
            log=folder / "postgres.log",
            user=user,
            stop_signal=signal.SIGINT,  # "fast": does not wait for clients to disconnect
        )
        with started(server):
            yield server


def find_binaries() -> Path:
    """Return the folder of the newest PostgreSQL here. Raises :class:`Absent`."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/postgres")]
    if found:
        return max(found, key=lambda path: [int(part) for part in re.findall(r"\d+", path.parent.name)])
    if on_path := shutil.which("postgres"):
        return Path(on_path).resolve().parent
    raise Absent("PostgreSQL is not installed; on Debian: apt-get install postgresql")


def unprivileged() -> str | None:
    """Return the user to run as: None for the current one, another for root, as which PostgreSQL does not run."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise Absent("PostgreSQL refuses to run as root, and there is neither a user postgres nor nobody")


def _initialise(binaries: Path, data: Path, password: str, user: str | None) -> None:
    secret = data.parent / "postgres.password"
    secret.write_text(password)
    secret.chmod(0o600)
    if user is not None:
        shutil.chown(secret, user)
    options = ["--username=escrow", "--auth=password", "--encoding=UTF8", "--locale=C", "--no-sync"]
    run([str(binaries / "initdb"), f"--pgdata={data}", f"--pwfile={secret}", *options], user=user)


def _is_ready(pid_file: Path, pid: int) -> bool:
    # The postmaster writes its pid into line 1 and its state into line 8 of this file; pg_ctl uses them too.
    try:
        lines = pid_file.read_text().splitlines()
    except OSError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"
