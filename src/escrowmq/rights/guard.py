"""Authenticates callers, checks their rights, and follows changes of the rights file.

Rules:

1. A broker with a rights file denies every call that no rule grants. Nothing switches that off.
2. The file is read again when it changes (within a quarter of a second), on SIGHUP, and by the action
   ``rights.reload``. It is parsed as a whole; an invalid file changes nothing and is logged.
3. After a change, and when a token expires, the connections of callers who are no longer known, or lost a right, are
   closed. All others go on, with the new rights.
4. Failures of one address delay its next answers (``failures.py``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from escrowmq.errors import Code, EscrowError, Overloaded, error
from escrowmq.platform.logs import tell
from escrowmq.rights.failures import Failures
from escrowmq.rights.file import Rights, Token, load
from escrowmq.rights.rules import Limits, Need, Principal, denied
from escrowmq.rights.tokens import digest
from escrowmq.wire.actions.rights import Denial, Denials

OnChange = Callable[[str, str, str], None]
"""Called with the new and the old digest, and who had the file read."""

POLL_SECONDS = 0.25
MOST_DENIALS = 1000

NO_NUMBERS = {"denied_total": 0.0, "unauthenticated_total": 0.0, "rights_reload_failures_total": 0.0}
"""The numbers of a broker without a rights file, for the action ``stats``."""


class Bucket:
    """Permits ``rate`` units a second on average, a second's worth at once. Thread-safe."""

    def __init__(self, rate: int) -> None:
        self.rate = rate
        self._level, self._at = float(rate), time.monotonic()
        self._lock = threading.Lock()

    def take(self, amount: int) -> float:
        """Take ``amount`` units. Returns 0; or, with nothing taken, after how many seconds it may succeed. More than a
        second's worth is taken from a full bucket, and the following calls wait."""
        with self._lock:
            now = time.monotonic()
            self._level = min(self._level + (now - self._at) * self.rate, self.rate)
            self._at = now
            wanted = min(amount, self.rate)
            if self._level < wanted:
                return (wanted - self._level) / self.rate
            self._level -= amount
            return 0.0


class _Usage:
    """What one principal uses of its limits, over all its connections."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.connections = 0
        self.rows = Bucket(limits.rows_per_s) if limits.rows_per_s else None
        self.bytes = Bucket(limits.bytes_per_s) if limits.bytes_per_s else None


class Caller:
    """An authenticated connection. ``drop`` closes it, from any thread."""

    def __init__(
        self, principal: Principal, token: Token | None, certificate: str | None, drop: Callable[[], None]
    ) -> None:
        self.principal = principal
        self.token = token
        self.certificate = certificate
        self.drop = drop

    @property
    def authenticated_by(self) -> str:
        """Return the credential without its secret."""
        if self.token is None:
            return f"certificate {self.certificate}"
        return f"token {self.token.name or self.token.identity or self.token.sha256[:8]}"


NOBODY = Caller(Principal("a service without a token", ()), None, "none", lambda: None)
"""Has no right; what is open to everybody known is open to it."""


class _Denied(NamedTuple):
    at_us: int
    principal: str
    need: Need


class Guard:
    """The rights of one broker.

    Raises Misuse(BAD_SETTING) if the file is invalid at the start.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._signature = self._sign()  # before it is read: a later change must be seen
        self.rights = load(self.path)
        self.failed_reloads = self.denied = self.unauthenticated = 0
        self.on_change: OnChange = lambda new, old, by: None
        self._callers: set[Caller] = set()
        self._usage: dict[str, _Usage] = {}
        self._denials: deque[_Denied] = deque(maxlen=MOST_DENIALS)
        self.failures = Failures()
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._stopping = False
        self._due = False
        self._thread = threading.Thread(target=self._follow, name="escrowmq-rights", daemon=True)

    def start(self) -> None:
        """Begin to follow the file and the expiry of tokens."""
        self._thread.start()

    def stop(self) -> None:
        """Stop following."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join()

    # Who calls

    def enter(
        self, credential: str | None, certificates: Sequence[str], source: str, drop: Callable[[], None]
    ) -> Caller:
        """Authenticate a connection by its token or else its certificate's names; :meth:`leave` must follow.

        Raises Denied(UNAUTHENTICATED), Overloaded(QUEUE_FULL) over the principal's limit of connections.
        """
        with self._lock:
            found = self._find(credential, certificates)
            if found is None:
                self.unauthenticated += 1
                self.failures.note(source)
                raise error(Code.UNAUTHENTICATED)
            principal, token, certificate = found
            usage = self._usage_of(principal)
            most = principal.limits.connections
            if most is not None and usage.connections >= most:
                text = f"{principal.name} has {usage.connections} connections to this broker; its limit is {most}"
                raise Overloaded(Code.QUEUE_FULL, text, "close some, or raise limits.connections in the rights file")
            usage.connections += 1
            caller = Caller(principal, token, certificate, drop)
            self._callers.add(caller)
            return caller

    def leave(self, caller: Caller) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            if caller in self._callers:
                self._callers.discard(caller)
                self._usage[caller.principal.name].connections -= 1

    def _find(
        self, credential: str | None, certificates: Sequence[str]
    ) -> tuple[Principal, Token | None, str | None] | None:
        if credential is not None:
            token = self.rights.tokens.get(digest(credential))
            if token is None or _is_expired(token):
                return None
            return token.principal, token, None
        for name in certificates:
            if (principal := self.rights.certificates.get(name)) is not None:
                return principal, None, name
        return None

    def _usage_of(self, principal: Principal) -> _Usage:
        usage = self._usage.get(principal.name)
        if usage is None or usage.limits != principal.limits:
            before, usage = usage, _Usage(principal.limits)
            usage.connections = before.connections if before is not None else 0
            self._usage[principal.name] = usage
        return usage

    # What they may do

    def check(self, caller: Caller, needs: Iterable[Need]) -> None:
        """Raise Denied(DENIED) that names the missing right, unless the caller has all of these."""
        principal = caller.principal
        missing = principal.missing(needs)
        if missing is not None:
            self.deny(caller, missing)

    def deny(self, caller: Caller, need: Need) -> None:
        """Record and raise Denied(DENIED) for a right that the caller lacks."""
        name = caller.principal.name
        with self._lock:
            self.denied += 1
            self._denials.append(_Denied(time.time_ns() // 1000, name, need))
        raise denied(name, need)

    def spend(self, caller: Caller, rows: int, size: int) -> None:
        """Count rows and bytes against the caller's limits. Raises Overloaded(QUEUE_FULL) with ``retry_after``."""
        if not caller.principal.limits.is_set:
            return
        with self._lock:
            usage = self._usage_of(caller.principal)
        for bucket, amount, unit in ((usage.rows, rows, "rows"), (usage.bytes, size, "bytes")):
            if bucket is not None and (wait := bucket.take(amount)):
                text = f"{caller.principal.name} is over its limit of {bucket.rate:,} {unit} a second"
                raise Overloaded(Code.QUEUE_FULL, text, "slow down, or raise the limit in the rights file", wait)

    def denials(self) -> Denials:
        """Return the last denied calls, grouped by principal and missing right."""
        with self._lock:
            grouped: dict[tuple[str, Need], Denial] = {}
            for at_us, principal, need in self._denials:
                known = grouped.pop((principal, need), None)
                if known is None:
                    known = Denial(principal=principal, needs=str(need), count=0, first_us=at_us, last_us=at_us)
                known["count"] += 1
                known["last_us"] = at_us
                grouped[principal, need] = known
            return {"denials": list(grouped.values()), "unauthenticated": self.unauthenticated}

    def numbers(self) -> dict[str, float]:
        """Return the numbers for the action ``stats``."""
        return {
            **NO_NUMBERS,
            "denied_total": self.denied,
            "unauthenticated_total": self.unauthenticated,
            "rights_reload_failures_total": self.failed_reloads,
        }

    # Changes

    def reload(self, by: str = "the file changed") -> bool:
        """Read the file now. Returns whether it has changed. Raises Misuse(BAD_SETTING), with nothing changed."""
        with self._lock:
            self._signature = self._sign()
            try:
                found = load(self.path)
            except EscrowError as problem:
                self.failed_reloads += 1
                sentence = f"the rights file is invalid, and the former rights stay: {problem.message}"
                tell(logging.ERROR, "rights rejected", sentence, file=str(self.path), problem=problem.message)
                raise
            old, self.rights = self.rights, found
            self._check_callers()
        if found.digest == old.digest:
            return False
        sentence = f"the rights file was read again: {found.digest}, before {old.digest}"
        tell(logging.INFO, "rights", sentence, file=str(self.path), digest=found.digest, before=old.digest)
        self.on_change(found.digest, old.digest, by)
        return True

    def reload_soon(self) -> None:
        """Make the thread read the file; for signal handlers."""
        self._due = True
        self._wake.set()

    def _sign(self) -> tuple[int, int, int] | None:
        try:
            stat = self.path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _follow(self) -> None:
        while not self._stopping:
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            try:
                self.look()
            except EscrowError:
                pass  # it was logged
            except Exception:
                logging.getLogger(__name__).exception("the rights file could not be followed")

    def look(self) -> None:
        """Read the file if it has changed, and close the connections of tokens that have expired. The thread does it
        every ``POLL_SECONDS``. Raises Misuse(BAD_SETTING), with nothing changed."""
        if self._due or self._sign() != self._signature:
            self._due = False
            self.reload()
            return
        with self._lock:
            expired = [caller for caller in self._callers if self._current(caller) is None]
        for caller in expired:
            caller.drop()

    def _check_callers(self) -> None:
        """Close the connections of callers who are no longer known or lost a right; give the others their rights."""
        with self._lock:
            lost: list[Caller] = []
            for caller in self._callers:
                now = self._current(caller)
                if now is None or not now.includes(caller.principal):
                    lost.append(caller)
                if now is not None:
                    caller.principal = now
                    self._usage_of(now)
        for caller in lost:
            caller.drop()

    def _current(self, caller: Caller) -> Principal | None:
        """Return the principal that the caller's credential stands for now; None if it is invalid."""
        rights: Rights = self.rights
        if caller.token is None:
            found = rights.certificates.get(caller.certificate or "")
        else:
            token = rights.tokens.get(caller.token.sha256)
            found = token.principal if token is not None and not _is_expired(token) else None
        return found if found is not None and found.name == caller.principal.name else None


def _is_expired(token: Token) -> bool:
    return token.expires_us is not None and time.time_ns() // 1000 >= token.expires_us
