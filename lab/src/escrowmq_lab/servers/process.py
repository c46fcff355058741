"""One server process for tests: starts it under a user that it accepts, waits for it, pauses, kills, restarts and
always stops it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_SECONDS = 120.0
"""Patience for a start: generous, since two cores may be shared with a whole test suite."""
STOP_SECONDS = 60.0
PAUSE_SECONDS = 120.0
"""Patience for a pause: a thread that waits for a disk stands still only when the disk has answered."""
_PORTS = 15_000, 32_000
"""Below the ports of connections of Linux and macOS, above those of servers that are installed."""


def free_port() -> int:
    """Return a loopback port that was free a moment ago, and is none of those that the system gives to connections,
    one of which could have it while a server that was killed is not there again. As long as this process lives, nobody
    who asks here is given the same."""
    chance = random.SystemRandom()  # tests seed the other one
    while True:
        port = chance.randrange(*_PORTS)
        if port in _given or not _reserve(port):
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as problem:
                if problem.errno != errno.EADDRINUSE:
                    raise
            else:
                _given.add(port)
                return port


_given: set[int] = set()


def _reserve(port: int) -> bool:
    """Return whether no other process has this port."""
    try:
        fcntl.lockf(_open_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except (BlockingIOError, PermissionError):
        return False
    return True


@functools.cache
def _open_reservations() -> int:
    """Open the file in which a process locks the byte of each port that it was given: the system ends the locks of a
    process with it."""
    path = Path(tempfile.gettempdir()) / f"escrowmq-ports-{os.geteuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def accepts(port: int, say: bytes = b"", hear: bytes = b"") -> bool:
    """Return whether the port takes a connection and, told ``say``, begins its answer with a byte out of ``hear``."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(say)
            if not hear:
                return True
            answer = connection.recv(5)
            return bool(answer) and answer[-1] in hear
    except OSError:
        return False


@dataclass
class Server:
    """A server of ours: ``url`` is what clients take. Its process can be paused, killed and started again."""

    url: str
    command: Sequence[str]
    ready: Callable[[int], bool]
    """Whether the process of this pid answers."""
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    """Run as this user (we are root); None: as we are."""
    stop_signal: int = signal.SIGTERM
    launcher: Callable[..., subprocess.Popen[bytes]] | None = None
    """What starts the command instead of :class:`subprocess.Popen`, and ends it when this process ends."""
    _process: subprocess.Popen[bytes] | None = None
    _killed: bool = False

    @property
    def pid(self) -> int:
        """Of the running process; raises RuntimeError when it does not run."""
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    def start(self, patience: float = START_SECONDS) -> None:
        """Start and wait until it answers; raises RuntimeError with the end of its log when it does not."""
        self.begin()
        self.wait(patience)

    def begin(self) -> None:
        """Start and do not wait: for servers that answer only beside others. The thread that calls it must outlive the
        server."""
        self._process = self._launch()

    def wait(self, patience: float = START_SECONDS) -> None:
        """After :meth:`begin`, wait until it answers; raises as :meth:`start`."""
        assert self._process is not None
        deadline = time.monotonic() + patience
        while not self.ready(self._process.pid):
            time.sleep(0.02)
            dead = self._process.poll() is not None
            if dead and self._killed and time.monotonic() < deadline:
                self._process = self._launch()  # children of the killed one may still hold what it needs
            elif dead or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"{self.command[0]} did not start:\n{self.log.read_text(errors='replace')[-4000:]}")
        self._killed = False

    def _launch(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            command = self.command if self.launcher else dying_with_us(self.command, self.stop_signal)
            return (self.launcher or subprocess.Popen)(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={**os.environ, **self.environment},
                **as_user(self.user),
            )

    def stop(self) -> None:
        """Stop it in its own way; by force after :data:`STOP_SECONDS`. Does nothing when it does not run."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            self.resume()
            process.send_signal(self.stop_signal)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                self._killed = True
        process.wait()
        self._process = None

    def kill(self) -> None:
        """``kill -9``, as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._killed = True

    def pause(self) -> None:
        """Stop all its threads; see :func:`pause`."""
        pause(self.pid)

    def resume(self) -> None:
        """Let it go on after :meth:`pause`."""
        os.kill(self.pid, signal.SIGCONT)


def pause(pid: int) -> None:
    """Stop all threads of a process: connections stay open without an answer (SIGSTOP). Returns once they stand
    still: until then one of them may still answer. Raises TimeoutError after :data:`PAUSE_SECONDS`."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PAUSE_SECONDS
    while any(_is_running(task) for task in Path(f"/proc/{pid}/task").glob("*/stat")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} does not stop")
        time.sleep(0.001)


def _is_running(stat: Path) -> bool:
    """Return whether a thread has not been stopped, by its file in /proc (where there is none: False)."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] not in ("T", "t", "X", "Z")
    except OSError:  # it has ended
        return False


def dying_with_us(command: Sequence[str], stop_signal: int) -> list[str]:
    """``command``, stopped by the kernel when this process dies in a way that runs no cleanup (Linux)."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", signal.Signals(stop_signal).name[3:], *command] if setpriv else list(command)


def as_user(user: str | None) -> dict[str, Any]:
    """Arguments for :mod:`subprocess` that run a command as ``user``."""
    if user is None:
        return {}
    entry = pwd.getpwnam(user)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}


def run(command: Sequence[str], *, user: str | None = None, environment: Mapping[str, str] | None = None) -> None:
    """Run a tool to its end; raises RuntimeError with what it printed when it fails."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        cwd="/",
        check=False,
        **as_user(user),
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stdout.decode(errors='replace')[-4000:]}")


@contextlib.contextmanager
def folder_for(user: str | None, folder: Path) -> Iterator[Path]:
    """Yield a folder that ``user`` owns: ``folder`` itself, or one beside it in the system's temporary folder when
    a parent of ``folder`` is closed to that user (pytest's are); that one is removed afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    if user is None:
        yield folder
        return
    entry = pwd.getpwnam(user)
    if all(parent.stat().st_mode & 0o001 for parent in folder.resolve().parents):
        os.chown(folder, entry.pw_uid, entry.pw_gid)
        yield folder
        return
    elsewhere = Path(tempfile.mkdtemp(prefix=f"escrowmq-{user}-"))
    try:
        os.chown(elsewhere, entry.pw_uid, entry.pw_gid)
        yield elsewhere
    finally:
        shutil.rmtree(elsewhere, ignore_errors=True)


@contextlib.contextmanager
def started(server: Server) -> Iterator[Server]:
    """``server``, running, and stopped at the end whatever happens."""
    try:
        server.start()
        yield server
    finally:
        server.stop()
