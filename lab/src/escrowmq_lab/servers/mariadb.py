"""MariaDB for tests. Debian package: ``mariadb-server``."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from escrowmq_lab.servers.process import Server, accepts, free_port, run, started
from escrowmq_lab.servers.seam import Absent

GREETING = b"\x0a"
"""First byte of a ready server: the version of its protocol, 10; a server that rejects sends 255."""

QUICK = ("--innodb-flush-method=nosync", "--innodb-doublewrite=0", "--innodb-file-per-table=0")
"""Disables syncs, and files per created or dropped table."""


def serving(folder: Path, *, durable: bool = False) -> AbstractContextManager[Server]:
    """Run a server with its data in ``folder``; ``url`` is a SQLAlchemy URL (PyMySQL) of a user with all rights,
    without TLS: reading the machine's certificates takes PyMySQL 25 ms of processor time per connection. ``durable``
    syncs every commit (benchmarks). Raises :class:`Absent`."""
    daemon = _find("mariadbd", "mysqld")
    installer = _find("mariadb-install-db", "mysql_install_db")
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "mariadb"
    as_root = ["--user=root"] if os.geteuid() == 0 else []
    password = secrets.token_hex(8)
    options = ["--auth-root-authentication-method=normal", "--skip-test-db", "--innodb-flush-method=nosync"]
    run([installer, "--no-defaults", *as_root, f"--datadir={data}", *options])
    accounts = _write_accounts(folder, password)
    port = free_port()
    return started(
        Server(
            url=f"mysql+pymysql://escrow:{password}@127.0.0.1:{port}/escrow?charset=utf8mb4&ssl_disabled=1",
            command=[
                daemon,
                "--no-defaults",
                *as_root,
                f"--datadir={data}",
                "--bind-address=127.0.0.1",
                f"--port={port}",
                "--socket=mariadb.sock",  # in the data folder; a full path may exceed the limit of socket names
                f"--pid-file={data / 'mariadb.pid'}",
                f"--init-file={accounts}",
                "--skip-name-resolve",
                "--character-set-server=utf8mb4",
                "--max-connections=200",
                "--connect-timeout=120",  # of a client on a busy machine
                "--innodb-buffer-pool-size=64M",
                f"--innodb-flush-log-at-trx-commit={1 if durable else 0}",
                *([] if durable else QUICK),
            ],
            ready=lambda _: accepts(port, hear=GREETING),
            log=folder / "mariadb.log",
        )
    )


def _find(*names: str) -> str:
    for name in names:
        if found := shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin"):
            return found
    raise Absent("MariaDB is not installed; on Debian: apt-get install mariadb-server")


def _write_accounts(folder: Path, password: str) -> Path:
    """Write the statements for the server's start: one account with a password, and none without."""
    statements = [
        f"CREATE OR REPLACE USER 'escrow'@'127.0.0.1' IDENTIFIED BY '{password}';",
        "GRANT ALL ON *.* TO 'escrow'@'127.0.0.1' WITH GRANT OPTION;",
        "DELETE FROM mysql.global_priv WHERE User IN ('root', '');",
        "FLUSH PRIVILEGES;",
        "CREATE DATABASE IF NOT EXISTS escrow;",
    ]
    path = folder / "mariadb-accounts.sql"
    path.touch(mode=0o600)
    path.write_text("\n".join(statements) + "\n")
    return path
