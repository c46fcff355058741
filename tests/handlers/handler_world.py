"""The table of effects that handlers write, and processes that run handlers."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

HERE = Path(__file__).parent

effects = sa.Table("effects", sa.MetaData(), sa.Column("row", sa.Integer, primary_key=True), sa.Column("id", sa.Text))
"""A repeat would add a second row of the same id."""


class Service:
    """A process of ``escrowmq work``, within ``with``; ``start`` returns when its health file is there, which means
    that it receives."""

    def __init__(self, folder: Path, name: str, app: str, url: str, *flags: str, **environment: str) -> None:
        self._health, self.log = folder / f"{name}.health", folder / f"{name}.log"
        command = [sys.executable, "-m", "escrowmq", "work", app, "--url", url, "--health", str(self._health), *flags]
        path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._command, self._environment = command, {**os.environ, **environment, "PYTHONPATH": path}
        self._folder = folder

    def __enter__(self) -> "Service":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        self._health.unlink(missing_ok=True)
        with self.log.open("ab") as log:
            options: Any = {"stdout": log, "stderr": log, "cwd": self._folder, "env": self._environment}
            self.process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, **options)
        while not self._health.exists():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait()
