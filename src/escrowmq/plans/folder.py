"""The operator's folder of plans: one folder per plan, named by its id.

``plan.json`` (the plan; written last, so without it there is none), ``set.arrow`` (the frozen set), and after the first
run ``progress.journal``, ``results``, ``lock``; ``dry-run.json`` of the last dry run; ``stop`` as a pending stop
request.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, Unpack

import numpy as np

from escrowmq.acts.telling import acting_user
from escrowmq.errors import Code, EscrowError, Misuse, error
from escrowmq.plans import frozen, making, plan, progress
from escrowmq.plans.outcomes import Counts, Outcome
from escrowmq.plans.plan import Plan
from escrowmq.plans.ramp import Pacing
from escrowmq.plans.running import Report, Run
from escrowmq.plans.subjects import Where, open_subject
from escrowmq.platform.disk import RealDisk, disk_error, replace_file
from escrowmq.platform.state import state_folder

VARIABLE = "ESCROWMQ_PLANS"
STOP = "stop"
_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")


def default_folder() -> Path:
    """Return ``ESCROWMQ_PLANS``, else ``escrowmq/plans`` in the user's XDG state directory."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    return state_folder() / "plans"


class Plans:
    """The plans of one folder, which the first plan creates. Any number of processes may use it at once."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = default_folder() if folder is None else Path(folder)

    def make(
        self,
        where: Where,
        act: str,
        selection: Mapping[str, Any],
        *,
        why: str | None = None,
        by: str | None = None,
        without_missing: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Plan:
        """Freeze the rows that ``selection`` matches now: runs act on these rows, whatever changes later. ``progress``
        receives the current number of rows. Raises Misuse(BAD_ARGUMENT) for an invalid act or selection,
        Rejected(UNKNOWN_GROUP), Rejected(NOT_FOUND) if no row matches, Overloaded(BROKER_AWAY) if a broker is
        unavailable, unless ``without_missing``."""
        subject = open_subject(where, act, selection)
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        disk = RealDisk(self.folder / name)
        try:
            made = making.make(
                subject,
                disk.folder,
                selection,
                by=by or acting_user(),
                why=why,
                without_missing=without_missing,
                progress=progress or (lambda rows: None),
            )
            plan.write(disk, made)
        except BaseException:
            shutil.rmtree(disk.folder, ignore_errors=True)
            raise
        return made

    def get(self, id: str) -> Plan:
        """Return a plan with its progress; ``id`` may be a unique prefix. Raises Rejected(NOT_FOUND),
        Corrupt(DAMAGED)."""
        disk = self._disk(id)
        made = plan.read(disk, disk.folder.name)
        history = progress.read(disk)
        if disk.in_use():
            state = "running"
        elif history.next == made.rows:  # also if it was killed before recording its end
            state = "finished"
        elif history.ended is not None:
            state = str(history.ended["end"])
        else:
            state = "interrupted" if history.runs else "made"
        return replace(
            made,
            state=state,
            reason="" if history.ended is None else str(history.ended["reason"]),
            next=history.next,
            outcomes=history.outcomes,
            again=history.again,
            in_doubt=0 if history.doubt is None else history.doubt[1],
            runs=len(history.runs),
        )

    def rows(self, id: str, offset: int = 0, limit: int = 100, *, outcome: str | None = None) -> list[dict[str, Any]]:
        """Return at most ``limit`` rows of the frozen set from number ``offset`` on, each with its number ``row`` and
        ``outcome``. ``outcome`` selects rows with this outcome only."""
        disk = self._disk(id)
        history = progress.read(disk)
        if offset < 0:
            raise Misuse(Code.BAD_ARGUMENT, f"{offset} is not a row number")
        known = [one.name.lower() for one in Outcome]
        if outcome is not None and outcome.lower() not in known:
            raise Misuse(Code.BAD_ARGUMENT, f"{outcome!r:.50} is not an outcome", f"one of {', '.join(known)}")
        wanted = None if outcome is None else Outcome[outcome.upper()]
        found: list[dict[str, Any]] = []
        with frozen.open_set(disk.folder) as rows:
            for first, batch in rows.batches(offset):
                outcomes = progress.results(disk, first, batch.num_rows, history)
                chosen = np.flatnonzero(outcomes >= 0 if wanted is None else outcomes == wanted)[: limit - len(found)]
                for at, about in zip(chosen.tolist(), batch.take(chosen).to_pylist(), strict=True):
                    found.append({"row": first + at, "outcome": Outcome(outcomes[at]).name.lower(), **about})
                if len(found) >= limit:
                    break
        return found

    def dry_run(
        self, id: str, where: Where, *, samples: int = 3, progress: Callable[[int, int], None] | None = None
    ) -> Counts:
        """Predict the outcome of every unprocessed row, and count them, with sample rows; changes nothing. ``progress``
        receives the number of checked rows and the total. Raises Corrupt(DAMAGED) for a changed set."""
        disk = self._disk(id)
        made = self.get(disk.folder.name)
        with frozen.open_set(disk.folder) as rows:
            self._check(made, disk.folder, rows)
            subject = open_subject(where, made.act, made.settings)
            counts = making.preview(subject, made, rows, samples, progress or (lambda done, of: None))
        content = json.dumps(counts.to_json(), ensure_ascii=False).encode()
        with suppress(OSError):  # stored only for the page of the plan
            replace_file(disk, making.DRY_RUN, [[content]], durable=False)
        return counts

    def last_dry_run(self, id: str) -> dict[str, Any] | None:
        """Return the result of the last dry run in the form of :meth:`Counts.to_json`; None if there was none."""
        try:
            found = json.loads((self._disk(id).folder / making.DRY_RUN).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def run(
        self,
        id: str,
        where: Where,
        *,
        digest: str | None = None,
        why: str | None = None,
        by: str | None = None,
        progress: Callable[[Report], None] | None = None,
        stop: Event | None = None,
        **pacing: Unpack[Pacing],
    ) -> Report:
        """Apply the act to every unprocessed row, in order; the next run continues where this one ends.

        ``digest``: required prefix of the plan's digest. ``progress`` is called after each batch. ``stop``: an event
        that stops it after the batch. See :class:`~escrowmq.plans.ramp.Pacing` for ``ramp``, ``rate``, ``stop_after``,
        ``batch`` and ``patience``. A rejection ends the run; it is in the report.

        Raises Corrupt(DAMAGED) for a set that was changed, Rejected(CONFLICT) during another run of the plan,
        Overloaded(DISK_FULL) if the run cannot be recorded.
        """
        disk = self._disk(id)
        made = plan.read(disk, disk.folder.name)
        if digest is not None and not (digest and made.digest.startswith(digest)):
            raise error(Code.CONFLICT, f"the digest of plan {made.id} is {made.digest}", "review the plan again")
        with self._lock(disk, made), frozen.open_set(disk.folder) as rows:
            self._check(made, disk.folder, rows)
            stop_file = disk.folder / STOP
            stop_file.unlink(missing_ok=True)
            run = Run(
                made,
                rows,
                disk,
                open_subject(where, made.act, made.settings, patient=False),
                pacing,
                on_progress=progress or (lambda report: None),
                should_stop=lambda: (stop is not None and stop.is_set()) or stop_file.exists(),
            )
            return run.run(by or acting_user(), why)

    def stop(self, id: str) -> bool:
        """Request the run of a plan, in any process, to stop after its batch. Returns whether one is in progress."""
        disk = self._disk(id)
        plan.read(disk, disk.folder.name)
        if not disk.in_use():
            return False
        try:
            (disk.folder / STOP).touch()
        except OSError as problem:
            raise disk_error(problem) from problem
        return True

    def delete(self, id: str) -> None:
        """Delete a plan and its results; its acts stay recorded. Raises Rejected(CONFLICT) while it runs."""
        disk = self._disk(id)
        with self._lock(disk, plan.read(disk, disk.folder.name)):
            (disk.folder / plan.NAME).unlink()  # without it the plan does not exist, whatever remains
            shutil.rmtree(disk.folder, ignore_errors=True)

    def _disk(self, id: str) -> RealDisk:
        names = []
        if re.fullmatch(r"[0-9a-f-]+", id):
            with suppress(FileNotFoundError):
                names = [name for name in os.listdir(self.folder) if name.startswith(id) and _ID.fullmatch(name)]
        names = [name for name in names if (self.folder / name / plan.NAME).is_file()]
        if not names:
            raise error(Code.NOT_FOUND, f"there is no plan {id!r:.60} in {self.folder}", "see escrowmq plan list")
        if len(names) > 1:
            raise error(Code.CONFLICT, f"{len(names)} plans begin with {id}", "use a longer prefix of the id")
        return RealDisk(self.folder / names[0])

    def _check(self, made: Plan, folder: Path, rows: frozen.FrozenSet) -> None:
        is_unchanged = frozen.file_hash(folder) == made.file_hash and len(rows) == made.rows
        if not is_unchanged or rows.digest(made.act, made.settings, made.identity) != made.digest:
            raise frozen.changed_error(made.id)

    @contextmanager
    def _lock(self, disk: RealDisk, made: Plan) -> Iterator[None]:
        """Lock a plan for a run. The lock of a killed process is released."""
        try:
            disk.lock()
        except Misuse as problem:
            if problem.code is not Code.FOLDER_IN_USE:
                raise
            hint = f"escrowmq plan stop {made.id} stops it after its batch"
            raise error(Code.CONFLICT, f"plan {made.id} is already running: {problem.message}", hint) from None
        except OSError as problem:
            raise disk_error(problem) from problem
        with closing(disk):
            yield

    def list(self) -> list[Plan]:
        """Return all plans, oldest first, without folders that contain no readable plan."""
        found = []
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(self.folder)):
                with suppress(EscrowError):
                    found.append(self.get(name))
        return found
