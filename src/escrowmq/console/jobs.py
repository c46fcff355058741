"""Work that takes longer than a page may: making a plan, its dry run, its run. Each is a thread of the console's, and
can be looked at.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from escrowmq.errors import Code, EscrowError, Unknown, error

logger = logging.getLogger(__name__)

AT_ONCE = 8
KEPT = 64
"""Jobs that have ended, and can still be looked at."""


@dataclass(slots=True, eq=False)
class Job:
    """One piece of work. ``about``: the plan that it works on, if there is one yet; ``to``: where its result is, once
    it has ended well."""

    id: str
    what: str
    about: str
    stop: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    told: str = ""
    """How far it is, in a few words."""
    to: str = ""
    problem: EscrowError | None = None


class Jobs:
    """The jobs of one console."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._closed = False

    def begin(self, what: str, about: str, work: Callable[[Job], str]) -> Job:
        """Do ``work`` on a thread; it gives the path of its result. Raises TOO_MANY, CONFLICT while the same is done
        already."""
        job = Job(secrets.token_hex(8), what, about)
        with self._lock:
            running = [one for one in self._jobs.values() if not one.ended.is_set()]
            if self._closed or len(running) >= AT_ONCE:
                raise error(Code.TOO_MANY, "this console does enough at once", "wait until something has ended")
            if about and any((one.what, one.about) == (what, about) for one in running):
                raise error(Code.CONFLICT, f"the {what} of {about} is under way already", "look at its page")
            for old in [id for id, one in self._jobs.items() if one.ended.is_set()][: -KEPT or None]:
                del self._jobs[old]
            self._jobs[job.id] = job
            self._threads[job.id] = threading.Thread(
                target=self._work, args=(job, work), name="escrowmq-console-job", daemon=True
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

    def of(self, what: str, about: str) -> Job | None:
        """Return the newest job of a kind on a plan; None: there was none."""
        with self._lock:
            return next((one for one in reversed(self._jobs.values()) if (one.what, one.about) == (what, about)), None)

    def close(self) -> None:
        """Have all of them stop where they can be resumed, and wait for it."""
        with self._lock:
            self._closed = True
            threads = list(self._threads.values())
            for job in self._jobs.values():
                job.stop.set()
        for thread in threads:
            thread.join()

    def _work(self, job: Job, work: Callable[[Job], str]) -> None:
        try:
            job.to = work(job)
        except EscrowError as problem:
            job.problem = problem
        except Exception as problem:  # it is shown on the page and in the log
            logger.error("%s failed", job.what, exc_info=problem)
            job.problem = Unknown(Code.CLOSED, f"the console failed: {type(problem).__name__}: {problem}")
        finally:
            job.ended.set()
            with self._lock:
                self._threads.pop(job.id, None)
