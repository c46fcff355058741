"""Validation of what a checker, a local transaction or a database returned: only an Outcome is an answer."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterable
from typing import Any

from escrowmq.errors import Code, Misuse
from escrowmq.model import Outcome

MOST_CAUSES = 64
"""Causes that are logged for one checker; texts that are never the same twice must not fill the memory."""


def outcome_of(answer: Any, who: str) -> Outcome:
    """Return ``answer`` if it is an Outcome. Raises Misuse(NO_OUTCOME), which names ``who``, for anything else: None,
    True, 1, "COMMIT", a member of another enumeration, a coroutine."""
    if isinstance(answer, Outcome):
        return answer
    if inspect.iscoroutine(answer):
        answer.close()
        hint = "a coroutine function answers where there is an event loop: escrowmq.aconnect; here it is a plain "
        raise Misuse(Code.NO_OUTCOME, f"{who} gave a coroutine that nothing awaits", f"{hint}function")
    given = "nothing (None)" if answer is None else f"{answer!r:.80} ({type(answer).__name__})"
    raise Misuse(Code.NO_OUTCOME, f"{who} gave {given}, which is no outcome")


def name_of(checker: Any) -> str:
    """Return the name by which messages call a checker: ``shop.decide``, ``outbox.Barrier``."""
    named = checker if hasattr(checker, "__qualname__") else type(checker)
    return f"{named.__module__}.{named.__qualname__}"


class Judge:
    """Validates the answers of one checker. An invalid one is counted, logged once per cause, and becomes UNKNOWN, so
    that the broker asks again. Thread-safe."""

    def __init__(self, checker: Any, log: logging.Logger) -> None:
        self.name = name_of(checker)
        self.unanswered = 0
        self._log = log
        self._lock = threading.Lock()
        self._causes: set[str] = set()

    def one(self, answer: Any) -> Outcome:
        try:
            return outcome_of(answer, self.name)
        except Misuse as problem:
            self.blame(problem, 1)
            return Outcome.UNKNOWN

    def each(self, answers: Iterable[Any]) -> list[Outcome]:
        """Return the outcomes of several answers; an invalid answer becomes UNKNOWN and does not affect the others."""
        return [self.one(answer) for answer in answers]

    def blame(self, problem: BaseException, questions: int, trace: bool = False) -> None:
        """Count ``questions`` checks without an answer, and log the cause as an error if it is new. ``trace``: with the
        traceback."""
        cause = str(problem) if isinstance(problem, Misuse) else type(problem).__name__
        with self._lock:
            self.unanswered += questions
            known = cause in self._causes or len(self._causes) >= MOST_CAUSES
            self._causes.add(cause) if not known else None
        level = logging.DEBUG if known else logging.ERROR
        text = "the checker %s left %d questions open, which the broker will ask again: %s: %s"
        kind = type(problem).__name__
        self._log.log(level, text, self.name, questions, kind, problem, exc_info=problem if trace else None)
