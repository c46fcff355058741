"""Starts a MariaDB server for tests. Debian package: ``mariadb-server``."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

from escrowmq_lab.servers.process import Server, accepts, free_port, run, started
from escrowmq_lab.servers.seam import Absent

GREETING = b"\x0a"
"""A ready server begins with the version of its protocol, 10; one that refuses says 255 in its place."""

QUICK = ("--innodb-flush-method=nosync", "--innodb-doublewrite=0", "--innodb-file-per-table=0")
"""Nothing is synced, and a table that is made or dropped makes or removes no file."""


def serving(folder: Path, *, durable: bool = False) -> AbstractContextManager[Server]:
    """Return a server with its data in ``folder``; ``url`` is a SQLAlchemy URL (PyMySQL) of a user with all rights. It
    asks for no TLS: to
    read the machine's certificates for it takes PyMySQL 25 ms of processor time a connection.

    ``durable`` syncs every commit (benchmarks). Raises :class:`Absent`.
    """
    daemon = _find("mariadbd", "mysqld")
    installer = _find("mariadb-install-db", "mysql_install_db")
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "mariadb"
    as_root = ["--user=root"] if os.geteuid() == 0 else []
    password = secrets.token_hex(8)
    options = ["--auth-root-authentication-method=normal", "--skip-test-db", "--innodb-flush-method=nosync"]
    run([installer, "--no-defaults", *as_root, f"--datadir={data}", *options])
    accounts = _accounts(folder, password)
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
                "--socket=mariadb.sock",  # in the data folder; a whole path can be longer than a socket's name may be
                f"--pid-file={data / 'mariadb.pid'}",
                f"--init-file={accounts}",
                "--skip-name-resolve",
                "--character-set-server=utf8mb4",
                "--max-connections=200",
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


def _accounts(folder: Path, password: str) -> Path:
    """Statements for the server's start: one account with a password, and none without."""
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
