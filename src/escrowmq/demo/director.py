"""The director of the demo: starts the processes, kills some, and restarts them, until all work is done.

It acts on events of its processes, never on estimated durations: a process reports when it is ready and when it has
reached a failpoint; the run is over when every order is processed, nothing is undecided, and the consumers have applied
all committed messages.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pyarrow as pa

from escrowmq.connecting import connect
from escrowmq.demo.brokers import KAFKA, Brokers
from escrowmq.demo.processes import Child, ChildEvent, Diary
from escrowmq.demo.screen import Screen
from escrowmq.demo.services import KINDS
from escrowmq.errors import Code, EscrowError, Misuse, Unknown
from escrowmq.platform.clock import now_us

SETTINGS = {
    # Shorter than the defaults, so that the effects of a kill are resolved within seconds.
    "transaction_timeout": 2.0,
    "check_interval": 1.0,
    "lease_seconds": 5.0,
    "retry_backoff": 0.1,
    # A killed broker is back as soon as it has replayed the log after its last snapshot.
    "snapshot_bytes": 4 << 20,
}
POLL_SECONDS = 0.2
"""Poll interval (s) for undecided transactions, once all orders are placed."""
PATIENCE_SECONDS = 90.0
"""Time (s) without progress after which a run is stopped and audited."""
SERVICES = tuple(KINDS.values())
_OF_RUNNING = ("ready", "leads", "at failpoint", "ended")
"""Events that are ignored once their process is killed; completed work still counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of the demo. Raises Misuse(BAD_ARGUMENT) for invalid numbers. ``folder`` None: a new folder ``demo-run``
    (``demo-run-2``, ...) in the working directory. ``orders`` None: ``count`` generated ones, the same for the same
    ``seed``. Kills are numbers of ``kill -9``. ``log`` None: the log is in the run folder; "kafka": the demo starts a
    Kafka for a leader and a standby, and kills the leader."""

    folder: Path | None = None
    orders: Path | None = None
    count: int = 2000
    seed: int = 1
    limit: int | None = None  # maximum number of orders
    shop_kills: int = 4  # between the database commit and the COMMIT
    broker_kills: int = 2
    service_kills: int = 1  # of each consumer, between its database commit and its ack
    threads: int = 24  # tills of the shop: orders placed concurrently
    audit: bool = True
    log: str | None = None

    def __post_init__(self) -> None:
        if self.log not in (None, KAFKA):
            text = f"log {self.log!r}: the demo takes {KAFKA} alone, one that it starts itself"
            raise Misuse(Code.BAD_ARGUMENT, text, "for brokers on a Kafka of yours: escrowmq serve --log")
        for name in ("shop_kills", "broker_kills", "service_kills"):
            if getattr(self, name) < 0:
                raise Misuse(Code.BAD_ARGUMENT, f"{name} is a number of kills, 0 or more")
        for name in ("count", "threads", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Misuse(Code.BAD_ARGUMENT, f"{name} must be at least 1")

    def run_folder(self) -> Path:
        """Return the folder to use, created if necessary. Raises Misuse(BAD_ARGUMENT) if it exists and is not empty."""
        names = ["demo-run", *(f"demo-run-{n}" for n in range(2, 10_000))]
        folder = self.folder or next(path for name in names if not (path := Path(name)).exists())
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Misuse(Code.BAD_ARGUMENT, f"{folder} is there and is not an empty folder", "name a new one")
        folder.mkdir(parents=True, exist_ok=True)
        return folder.resolve()


class Director:
    """One run. :meth:`direct` returns when it is over; the brokers run until :meth:`end`, or :meth:`close`."""

    def __init__(self, options: DemoOptions, folder: Path, orders: pa.Table, screen: Screen, brokers: Brokers) -> None:
        self._options = options
        self._folder = folder
        self._screen = screen
        self._brokers = brokers
        self._diary = Diary(folder / "events.jsonl")
        self._events: SimpleQueue[ChildEvent] = SimpleQueue()
        self._children: dict[str, Child] = {}
        kept = orders.filter(pa.compute.invert(orders["cancelled"]))["order_id"].to_pylist()
        self._stop_at = set(_spread(kept, options.shop_kills))
        self._broker_kills = _spread(range(orders.num_rows), options.broker_kills)
        self._service_stops = {
            kind.name: _spread(range(len(kept)), options.service_kills, shift=0.5 * (n + 1) / len(SERVICES))
            for n, kind in enumerate(SERVICES)
        }
        self._placed: set[str] = set()
        self._cancelled: set[str] = set()
        self._applied = {kind.name: 0 for kind in SERVICES}
        self._last_noted = dict.fromkeys(self._applied, 0.0)
        self._shop_done = False

    def direct(self) -> None:
        """Start, kill and restart processes until all work is done, then stop all but the brokers."""
        try:
            for name in self._brokers.names:
                self._start_child(name)
                self._wait_until(partial(self._brokers.is_ready, name))
            for kind in SERVICES:
                self._start_child(kind.name)
            self._start_child("shop")
            self._wait_until(lambda: self._shop_done and not self._broker_kills and self._brokers.victim is not None)
            self._settle()
            for name in (*KINDS, "shop"):
                self._children.pop(name).stop()
        finally:
            for name, number in self._applied.items():
                self._diary.note("progress", name, number=number)

    def end(self) -> None:
        """Stop the brokers, like an operator."""
        for name in self._brokers.names:
            self._children.pop(name).stop()

    def close(self) -> None:
        """Kill the remaining processes."""
        for child in self._children.values():
            child.kill()
        self._diary.close()

    def _start_child(self, name: str) -> None:
        role = "broker" if name in self._brokers.names else "shop" if name == "shop" else "service"
        self._children[name] = Child(name, role, self._config(name), self._folder, self._events)
        self._diary.note("started", name)

    def _config(self, name: str) -> dict[str, Any]:
        if name in self._brokers.names:
            return {**self._brokers.config(name), "settings": SETTINGS}
        common = {"url": self._brokers.url, "folder": str(self._folder)}
        if name == "shop":
            orders, tills = str(self._folder / "orders.parquet"), self._options.threads
            marked = {"stop_at": sorted(self._stop_at), "cancelled": sorted(self._cancelled)}
            return {**common, "orders": orders, "tills": tills, **marked}
        stops = self._service_stops[name]
        stop_after = max(stops[0] - self._applied[name], 1) if stops else None
        return {**common, "kind": name, "stop_after": stop_after}

    def _kill(self, name: str, where: str) -> None:
        """Kill a process with ``kill -9`` and start it again."""
        child, at_us = self._children.pop(name), now_us()
        child.kill()
        if name in self._brokers.names:
            self._brokers.on_killed(name, at_us)
        self._diary.note("killed", name, where=where)
        self._screen.say(f"[bold]kill -9[/] {name} {where}")
        self._start_child(name)

    def _wait_until(self, holds: Any) -> None:
        """Handle events until ``holds()``. Raises Unknown(TIMED_OUT) without an event for PATIENCE_SECONDS."""
        while not holds():
            try:
                event = self._events.get(timeout=PATIENCE_SECONDS)
            except Empty:
                hint = f"see the logs in {self._folder / 'nodes'}"
                raise Unknown(Code.TIMED_OUT, "the demo came to a halt", hint) from None
            self._handle(event)

    def _handle(self, event: ChildEvent) -> None:
        """Process an event, then kill a broker if that is due and possible."""
        self._process(event)
        victim = self._brokers.victim
        if self._broker_kills and self._processed >= self._broker_kills[0] and victim is not None:
            self._broker_kills.pop(0)
            self._kill(victim, self._brokers.where)

    def _process(self, event: ChildEvent) -> None:
        name, details = event.child.name, event.details
        if event.kind in _OF_RUNNING and self._children.get(name) is not event.child:
            return  # of a process that no longer runs
        if news := self._brokers.on_event(event):
            self._diary.note(news.event, news.who, event.at_us, **news.facts)
            self._screen.say(news.line)
        match event.kind:
            case "ready" if name == "shop":
                self._placed.update(details["placed"])
            case "ready" if name in self._applied:
                self._applied[name] = max(self._applied[name], details["number"])
            case "placed" | "cancelled":
                (self._placed if event.kind == "placed" else self._cancelled).add(details["order"])
                self._screen.update("shop", self._processed)
            case "done":
                self._shop_done = True
            case "asked":
                self._diary.note("asked", name, event.at_us, **details)
                self._screen.count_check()
            case "progress":
                self._on_progress(name, event)
            case "at failpoint":
                if name == "shop":
                    self._stop_at.discard(details["order"])
                else:
                    self._service_stops[name].pop(0)
                self._kill(name, details["where"])
            case "ended":
                text = f"the {name} process ended by itself with code {details['code']}"
                raise Unknown(Code.DISCONNECTED, text, f"see {self._folder / 'nodes' / f'{name}.log'}")

    @property
    def _processed(self) -> int:
        """Number of processed orders."""
        return len(self._placed) + len(self._cancelled)

    def _on_progress(self, name: str, event: ChildEvent) -> None:
        self._applied[name] = max(self._applied[name], event.details["number"])
        self._screen.update(name, self._applied[name])
        now = time.monotonic()
        if now - self._last_noted[name] > POLL_SECONDS:
            self._last_noted[name] = now
            self._diary.note("progress", name, event.at_us, **event.details)

    def _settle(self) -> None:
        """Wait until nothing is undecided and the consumers have applied everything."""
        self._screen.say("all orders are placed; waiting for the check-back and the consumers")
        patience = time.monotonic() + PATIENCE_SECONDS
        before: Any = None
        with connect(self._brokers.url) as bus:
            while time.monotonic() < patience:
                try:
                    progress = _read_progress(bus)
                except EscrowError:  # the broker may be restarting
                    progress = None
                if progress == {"open": 0, **self._applied}:
                    return
                state = (progress, dict(self._applied))
                if state != before:
                    before, patience = state, time.monotonic() + PATIENCE_SECONDS
                end = time.monotonic() + POLL_SECONDS
                with suppress(Empty):
                    while (left := end - time.monotonic()) > 0:
                        self._handle(self._events.get(timeout=left))
        self._screen.say(f"[red]no progress for {PATIENCE_SECONDS:.0f} s: {before}; auditing the incomplete run[/]")


def _read_progress(bus: Any) -> dict[str, int]:
    """Return the number of undecided transactions (``open``), and of messages per service topic."""
    topics = {topic["name"]: sum(queue["end"] for queue in topic["queues"]) for topic in bus.admin.topics()}
    undecided = sum(group["open"] for group in bus.admin.producers())
    return {"open": undecided, **{kind.name: topics.get(kind.topic, 0) for kind in SERVICES}}


def _spread(items: Any, count: int, shift: float = 0.5) -> list[Any]:
    """Return ``count`` of the items, evenly spaced, starting at ``shift`` of a step."""
    every = list(items)
    count = min(count, len(every))
    return [every[int((n + shift) * len(every) / count)] for n in range(count)]
