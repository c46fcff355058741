"""Programs of the product as real processes, forked off one that has imported the product already. To start Python and
import it takes each of them a second of processor time instead, and the suite starts many hundreds.

:class:`Forked` is ``subprocess.Popen`` for ``python -m MODULE``, ``python FILE`` and ``python -c TEXT``; :func:`run` is
``subprocess.run``. What such a process does is not changed: it has its own memory, descriptors, environment, folder and
threads, may be killed and stopped, and ends with an exit code. Tests of how a program is started, of what it imports
and of how much memory it takes start it with ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    "escrowmq.cli.main",
    "escrowmq.broker.serving.serve",
    "escrowmq.connecting",
    "escrowmq.outbox.relay",
    "escrowmq.gateway.app",
    "escrowmq.gateway.server",
    "escrowmq.console.server",
    "escrowmq.console.app",
    "escrowmq.plans",
    "escrowmq_lab.history",
    "sqlalchemy.dialects.sqlite",
    "redis",
    "rich.table",
    "typer.rich_utils",
    "typer._adapters",
    "encodings.idna",
    "zoneinfo",
)
"""What is imported before the fork (of what this machine has)."""
MOST_BYTES = 1 << 17
"""Of one request: a command and its environment."""


class Forked(subprocess.Popen):  # type: ignore[type-arg]
    """``subprocess.Popen`` for a Python program, forked."""

    def _execute_child(self, *given: Any) -> None:
        names = inspect.signature(subprocess.Popen._execute_child).parameters  # type: ignore[attr-defined]
        told = dict(zip(list(names)[1:], given, strict=True))
        wanted = {
            "words": [os.fspath(word) for word in told["args"]],
            "environment": dict(os.environ if told["env"] is None else told["env"]),
            "folder": os.fspath(told["cwd"] or os.getcwd()),
            "session": bool(told["start_new_session"]),
        }
        for name, usual in (("preexec_fn", None), ("pass_fds", ()), ("shell", False), ("uid", None)):
            assert told[name] == usual, f"a forked program has no {name}"
        ends = (told["p2cread"], told["c2pwrite"], told["errwrite"])
        pipes = [told[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        try:
            self.pid = _parent().start(wanted, [own if end == -1 else end for own, end in enumerate(ends)])
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if not wait_flags:
            _until_dead(self.pid)
        status = _parent().ended(self.pid)
        return (0, 0) if status is None else (self.pid, status)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run(
    command: Sequence[str | Path],
    *,
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` with ``capture_output`` and ``text``, forked."""
    pipe = subprocess.PIPE
    entered = subprocess.DEVNULL if input is None else pipe
    with Forked(command, stdin=entered, stdout=pipe, stderr=pipe, text=True, env=env, cwd=cwd) as process:
        try:
            out, problems = process.communicate(input)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, problems)
    if check:
        done.check_returncode()
    return done


def _until_dead(pid: int) -> None:
    death = os.pidfd_open(pid)
    try:
        select.select([death], [], [])
    finally:
        os.close(death)


class _Parent:
    """The test's end of the process that forks. From any thread; it and its children end with this one."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MOST_BYTES)
        self._socket, self._lock = ours, threading.Lock()
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        environment.pop("ESCROWMQ_FAILPOINT", None)
        command = [sys.executable, "-c", f"import forked; forked.main({theirs.fileno()})"]
        with theirs:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, env=environment, pass_fds=[theirs.fileno()]
            )

    def start(self, wanted: Mapping[str, Any], descriptors: list[int]) -> int:
        """The pid of a new child."""
        return int(self._ask(wanted, descriptors))

    def ended(self, pid: int) -> int | None:
        """How a child ended, as ``waitpid`` says it, to be asked no more after that; None while it runs."""
        status: int | None = self._ask({"ended": pid})
        return status

    def _ask(self, what: Mapping[str, Any], descriptors: list[int] | None = None) -> Any:
        text = json.dumps(what).encode()
        assert len(text) < MOST_BYTES
        with self._lock:
            if descriptors is None:
                self._socket.send(text)
            else:
                socket.send_fds(self._socket, [text], descriptors)
            answer = self._socket.recv(100)
        assert answer, "the process that forks has ended"
        return json.loads(answer)

    def close(self) -> None:
        """End it and all that it has forked."""
        self._socket.close()
        self._process.wait()


_made: list[_Parent] = []
_making = threading.Lock()


def _parent() -> _Parent:
    with _making:
        if not _made:
            _made.append(_Parent())
            atexit.register(_made[0].close)
        return _made[0]


# In the process that forks


def main(descriptor: int) -> None:
    """Fork until the other end is closed."""
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # what stops the tests stops this by closing the other end
    there, alive = socket.socket(fileno=descriptor), set[int]()
    while True:
        message, descriptors, _, _ = socket.recv_fds(there, MOST_BYTES, 3)
        if not message:
            break
        wanted = json.loads(message)
        if "ended" in wanted:
            pid, answer = os.waitpid(wanted["ended"], os.WNOHANG)
            alive.discard(pid)
            there.send(json.dumps(answer if pid else None).encode())
            continue
        assert threading.active_count() == 1, "a fork would lose the threads that what is imported has begun"
        pid = os.fork()
        if not pid:
            there.close()
            _be(wanted, descriptors)
        alive.add(pid)
        for one in descriptors:
            os.close(one)
        there.send(json.dumps(pid).encode())
    for pid in alive:
        os.kill(pid, signal.SIGKILL)
    for pid in alive:
        os.waitpid(pid, 0)


def _be(wanted: dict[str, Any], descriptors: list[int]) -> None:
    code = 1
    faulthandler.enable()  # SIGABRT shows where its threads are
    try:
        code = _ending(lambda: _begin(wanted, descriptors)())
        code = _ending(threading._shutdown) or code  # type: ignore[attr-defined]
        code = _ending(atexit._run_exitfuncs) or code
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)


def _ending(act: Callable[[], None]) -> int:
    """The exit code of ``act``, as the interpreter makes it."""
    try:
        act()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _begin(wanted: dict[str, Any], descriptors: list[int]) -> Callable[[], object]:
    """Take on what ``subprocess`` and the start of an interpreter would have given; the program."""
    for own, one in enumerate(descriptors):
        os.dup2(one, own)
    for one in set(descriptors) - {0, 1, 2}:
        os.close(one)
    if wanted["session"]:
        os.setsid()
    os.chdir(wanted["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    _open_streams()
    words = iter(wanted["words"][1:])
    program: Callable[[], object]
    for word in words:
        if word == "-W":
            warnings._processoptions([next(words)])  # type: ignore[attr-defined]
        elif word == "-m":
            module = next(words)
            sys.argv, sys.path[0] = [module, *words], os.getcwd()
            program = lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)  # noqa: E731
        elif word == "-c":
            text = next(words)
            sys.argv, sys.path[0] = ["-c", *words], ""
            program = lambda: _execute(text)  # noqa: E731
        else:
            assert not word.startswith("-"), f"a forked program has no {word}"
            sys.argv, sys.path[0] = [word, *words], str(Path(word).resolve().parent)
            program = lambda: runpy.run_path(sys.argv[0], run_name="__main__")  # noqa: E731
    _arm()
    return program


def _open_streams() -> None:
    """They have buffers and manners of files or pipes, whatever the streams of the process that forks are."""
    for number, (name, how) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        errors, lines = ("backslashreplace", 1) if name == "stderr" else ("strict", -1)
        stream = os.fdopen(number, how, buffering=lines, errors=errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _execute(text: str) -> None:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    exec(compile(text, "<string>", "exec"), module.__dict__)


def _arm() -> None:
    """The failpoints of the environment, which are read at import."""
    from escrowmq.platform import failpoints

    if text := os.environ.get(failpoints.VARIABLE):
        failpoints.arm(*(failpoints.parse(part) for part in text.split(",")))
