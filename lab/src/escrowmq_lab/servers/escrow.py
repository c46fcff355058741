"""EscrowMQ itself as a server process, to be killed and restarted like the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from escrowmq_lab.servers.process import Server, accepts, free_port, started


def serving(
    folder: Path,
    *options: str,
    launcher: Callable[..., subprocess.Popen[bytes]] | None = None,
    port: int | None = None,
) -> AbstractContextManager[Server]:
    """Run a broker with its data in ``folder``; ``options`` are flags of ``escrowmq serve``. ``launcher``: see
    :class:`Server`; ``port``: by default any free one."""
    folder.mkdir(parents=True, exist_ok=True)
    port = port or free_port()
    address = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(folder / "escrow"), "-l", address, *options]
    return started(
        Server(
            url=f"escrow://{address}",
            command=command,
            ready=lambda _: accepts(port),
            log=folder / "escrow.log",
            launcher=launcher,
        )
    )
