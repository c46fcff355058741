"""Work that takes longer than a page may: making, dry-running and running a plan, on threads that pages inspect."""

from __future__ import annotations

import contextvars
import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from escrowmq.errors import Code, EscrowError, Unknown, error

logger = logging.getLogger(__name__)

AT_ONCE = 8
KEPT = 64
"""Number of finished jobs that are kept."""


@dataclass(slots=True, eq=False)
class Job:
    """One job. ``about``: the id of its plan, if any; ``to``: the path of its result, once it has succeeded."""

    id: str
    kind: str
    about: str
    stop: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    progress: str = ""
    """Progress in a few words."""
    to: str = ""
    problem: EscrowError | None = None


class Jobs:
    """The jobs of one console."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._closed = False

    def begin(self, kind: str, about: str, work: Callable[[Job], str]) -> Job:
        """Run ``work``, which returns its result's path, on a thread. Raises TOO_MANY, or CONFLICT if it is running."""
        job = Job(secrets.token_hex(8), kind, about)
        with self._lock:
            running = [one for one in self._jobs.values() if not one.ended.is_set()]
            if self._closed or len(running) >= AT_ONCE:
                raise error(Code.TOO_MANY, "this console does enough at once", "wait until something has ended")
            if about and any((one.kind, one.about) == (kind, about) for one in running):
                raise error(Code.CONFLICT, f"the {kind} of {about} is under way already", "look at its page")
            for old in [id for id, one in self._jobs.items() if one.ended.is_set()][: -KEPT or None]:
                del self._jobs[old]
            self._jobs[job.id] = job
            context = contextvars.copy_context()  # which names the operator
            self._threads[job.id] = threading.Thread(
                target=context.run, args=(self._work, job, work), name="escrowmq-console-job", daemon=True
            )
            self._threads[job.id].start()
        return job

    def get(self, id: str) -> Job:
        """Return a job. Raises NOT_FOUND."""
        with self._lock:
            if id not in self._jobs:
                raise error(
                    Code.NOT_FOUND, "there is no such work", "it ended long ago, or the console was started anew"
                )
            return self._jobs[id]

    def of(self, kind: str, about: str) -> Job | None:
        """Return the newest job of a kind for a plan; None if there is none."""
        with self._lock:
            return next((one for one in reversed(self._jobs.values()) if (one.kind, one.about) == (kind, about)), None)

    @property
    def is_running(self) -> bool:
        """Return whether a job is running."""
        return bool(self._threads)

    def stop(self) -> None:
        """Make all jobs stop at a resumable point."""
        with self._lock:
            for job in self._jobs.values():
                job.stop.set()

    def close(self) -> None:
        """Stop all jobs, and wait for them."""
        with self._lock:
            self._closed = True
            threads = list(self._threads.values())
        self.stop()
        for thread in threads:
            thread.join()

    def _work(self, job: Job, work: Callable[[Job], str]) -> None:
        try:
            job.to = work(job)
        except EscrowError as problem:
            job.problem = problem
        except Exception as problem:  # shown on the page, and logged
            logger.error("%s failed", job.kind, exc_info=problem)
            job.problem = Unknown(Code.CLOSED, f"the console failed: {type(problem).__name__}: {problem}")
        finally:
            job.ended.set()
            with self._lock:
                self._threads.pop(job.id, None)
