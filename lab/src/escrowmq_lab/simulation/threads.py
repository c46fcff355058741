"""``threading``, ``time``, ``queue`` and executors for the tasks of a
:class:`~escrowmq_lab.simulation.scheduler.Scheduler`. They behave like the standard library's, as far as the product
uses it. Outside a run nothing waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from escrowmq_lab.simulation.scheduler import Node, Scheduler, Task

_running: list[Scheduler] = []
NOBODY = Node("nobody")


def begin(scheduler: Scheduler) -> None:
    """Bind this module to a run, until :func:`end`."""
    _running.append(scheduler)


def end() -> None:
    """End the run."""
    _running.pop()


def scheduler() -> Scheduler:
    """Return the scheduler of the current run."""
    return _running[-1]


def _task() -> Task | None:
    return _running[-1].current if _running else None


class Lock:
    """Replacement of ``threading.Lock``."""

    def __init__(self) -> None:
        self._held = False
        self._waiters: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire it; False if not within ``timeout`` seconds."""
        if not _running or _running[-1].over:
            self._held = True
            return True
        run = _running[-1]
        if run.current is None:  # a call that neither waits nor raises, see Scheduler.after
            taken, self._held = not self._held, True
            return taken
        run.give_way()
        until = None if timeout < 0 else run.seconds + timeout
        while self._held:
            left = None if until is None else until - run.seconds
            if not blocking or (left is not None and left <= 0):
                return False
            self._waiters.append(run.current)
            if not run.park(left):
                self._waiters.remove(run.current)
        self._held = True
        return True

    def release(self) -> None:
        """Release it."""
        self._held = False
        while self._waiters:
            task = self._waiters.popleft()
            if not task.node.dead:
                scheduler().wake(task)
                return

    def locked(self) -> bool:
        """Decide whether it is held."""
        return self._held

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock:
    """Replacement of ``threading.RLock``."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquire it, once more or for the first time."""
        task = _task()
        if self._count and self._owner is task:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = task, 1
        return True

    def release(self) -> None:
        """Release it, once for each acquisition."""
        self._count -= 1
        if self._count <= 0:
            self._owner, self._count = None, 0
            self._lock.release()

    def give_up(self) -> int:
        """Release it completely. Returns the number of acquisitions."""
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def take_back(self, count: int) -> None:
        """Undo :meth:`give_up`."""
        self._lock.acquire()
        self._owner, self._count = _task(), count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """Replacement of ``threading.Condition``."""

    def __init__(self, lock: Lock | RLock | None = None) -> None:
        self._lock = RLock() if lock is None else lock
        self._waiters: deque[Task] = deque()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified. Returns whether it was."""
        run = scheduler()
        task = run.current
        assert task is not None  # nothing else may wait
        self._waiters.append(task)
        count = 0
        if isinstance(self._lock, RLock):
            count = self._lock.give_up()
        else:
            self._lock.release()
        try:
            woken = run.park(timeout)
            if not woken and task in self._waiters:
                self._waiters.remove(task)
            return woken
        finally:
            if not run.over:
                if isinstance(self._lock, RLock):
                    self._lock.take_back(count)
                else:
                    self._lock.acquire()

    def wait_for(self, ready: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait until ``ready()``. Returns its result."""
        until = None if timeout is None else scheduler().seconds + timeout
        while not (result := ready()):
            left = None if until is None else until - scheduler().seconds
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        """Wake some waiters."""
        while n > 0 and self._waiters:
            task = self._waiters.popleft()
            if not task.node.dead:
                scheduler().wake(task)
                n -= 1

    def notify_all(self) -> None:
        """Wake all waiters."""
        self.notify(len(self._waiters))


class Event:
    """Replacement of ``threading.Event``."""

    def __init__(self) -> None:
        self._set = False
        self._condition = Condition(Lock())

    def is_set(self) -> bool:
        """Decide whether it is set."""
        return self._set

    def set(self) -> None:
        """Set it and wake all waiters."""
        self._set = True
        self._condition.notify_all()

    def clear(self) -> None:
        """Clear it."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set. Returns whether it is."""
        if self._set:
            return True
        with self._condition:
            self._condition.wait_for(lambda: self._set, timeout)
        return self._set


class Thread:
    """Replacement of ``threading.Thread``: a task of the node whose task starts it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or "thread"
        self.daemon = bool(daemon)
        self.ident: int | None = None
        self._call: Callable[[], Any] = lambda: target and target(*args, **(kwargs or {}))
        self._ended = Event()
        self._task: Task | None = None

    def start(self) -> None:
        """Start it."""
        run, starter = scheduler(), _task()

        def work() -> None:
            try:
                self._call()
            finally:
                self._ended.set()

        self._task = run.spawn(starter.node if starter is not None else NOBODY, work, self.name)
        self._task.thread, self.ident = self, self._task.ident

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        """Decide whether it has started and not ended."""
        return self._task is not None and not self._task.done


class _Main:
    """Replacement of the main thread."""

    ident = 0
    name = "main"


_MAIN = _Main()


def get_ident() -> int:
    """Return the number of the running task."""
    task = _task()
    return 0 if task is None else task.ident


def current_thread() -> Any:
    """Return the running thread as an object."""
    task = _task()
    return _MAIN if task is None else (task.thread or task)


def main_thread() -> Any:
    """Return the main thread, which is no task."""
    return _MAIN


THREADING = SimpleNamespace(
    Lock=Lock,
    RLock=RLock,
    Condition=Condition,
    Event=Event,
    Thread=Thread,
    get_ident=get_ident,
    current_thread=current_thread,
    main_thread=main_thread,
)
"""Replacement of the module ``threading``."""


class Queue:
    """Replacement of ``queue.Queue``, as far as the committer of a broker uses it."""

    def __init__(self, maxsize: int = 0) -> None:
        self._most = maxsize
        self._items: deque[Any] = deque()
        self._unfinished = 0
        self._changed = Condition()

    def put(self, item: Any) -> None:
        """Add an item; waits while the queue is full."""
        with self._changed:
            self._changed.wait_for(lambda: not self._most or len(self._items) < self._most)
            self._items.append(item)
            self._unfinished += 1
            self._changed.notify_all()

    def get(self) -> Any:
        """Return the oldest item; waits while there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._items)
            self._changed.notify_all()
            return self._items.popleft()

    def task_done(self) -> None:
        """Mark a removed item as done."""
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until all items are done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)


class Executor:
    """Replacement of ``ThreadPoolExecutor``: up to ``max_workers`` tasks at a time."""

    def __init__(self, max_workers: int = 4, thread_name_prefix: str = "worker") -> None:
        self._most, self._name = max_workers, thread_name_prefix
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._busy = 0
        self._closed = False
        self._changed = Condition()

    def submit(self, call: Callable[..., Any], /, *args: Any, **given: Any) -> Future[Any]:
        """Queue a call. RuntimeError after :meth:`shutdown`."""
        if self._closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: Future[Any] = Future()
        with self._changed:
            self._work.append((future, lambda: call(*args, **given)))
            starts = self._busy < self._most
            self._busy += starts
        if starts:
            Thread(target=self._run, name=self._name).start()
        return future

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._busy -= 1
                    self._changed.notify_all()
                    return
                future, call = self._work.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except Exception as problem:
                future.set_exception(problem)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; with ``wait``, wait until all are done."""
        self._closed = True
        if cancel_futures:
            while self._work:
                self._work.popleft()[0].cancel()
        if wait:
            with self._changed:
                self._changed.wait_for(lambda: not self._busy)
