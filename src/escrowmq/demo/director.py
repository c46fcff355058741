"""The director of the demo: starts the processes, kills some, starts them again, and has the result audited.

It acts on events of its processes, never on a guess of how long something takes: a process says when it is ready and when it
has come to a failpoint; the run is over when every order has been dealt with, nothing is left undecided, and the consumers
have applied all that was committed.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from escrowmq.connecting import connect
from escrowmq.demo.databases import manifest
from escrowmq.demo.orders import generate_orders, read_orders
from escrowmq.demo.processes import Child, ChildEvent, Diary
from escrowmq.demo.screen import Screen
from escrowmq.demo.services import KINDS
from escrowmq.errors import Code, EscrowError, Misuse, Unknown

if TYPE_CHECKING:
    from rich.console import Console

    from escrowmq.pipeline.audit import Verdict

SETTINGS = {
    # Shorter than a broker's usual times, so that what a kill leaves behind is settled while one watches.
    "transaction_timeout": 2.0,
    "check_interval": 1.0,
    "lease_seconds": 5.0,
    "retry_backoff": 0.1,
    # A broker that is killed is back as soon as it has replayed what came after its last snapshot.
    "snapshot_bytes": 4 << 20,
}
LOOK_SECONDS = 0.2
"""How often the broker is asked what is still undecided, once all orders are placed."""
PATIENCE_SECONDS = 90.0
"""A run in which nothing happens for this long is stopped and audited as it stands."""
SERVICES = tuple(KINDS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Raises Misuse(BAD_ARGUMENT) for numbers that make no sense.

    ``folder`` None: a new folder ``demo-run`` (``demo-run-2``, ...) in the working directory. ``orders`` None: ``count``
    generated ones, the same for the same ``seed``. Kills are numbers of ``kill -9``.
    """

    folder: Path | None = None
    orders: Path | None = None
    count: int = 2000
    seed: int = 1
    limit: int | None = None  # use only the first so many orders
    shop_kills: int = 4  # between the database commit and the COMMIT
    broker_kills: int = 2
    service_kills: int = 1  # of each consumer, between its database commit and its ack
    threads: int = 24  # tills of the shop: orders placed at the same time
    audit: bool = True

    def __post_init__(self) -> None:
        for name in ("shop_kills", "broker_kills", "service_kills"):
            if getattr(self, name) < 0:
                raise Misuse(Code.BAD_ARGUMENT, f"{name} is a number of kills, 0 or more")
        for name in ("count", "threads", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Misuse(Code.BAD_ARGUMENT, f"{name} must be at least 1")

    def run_folder(self) -> Path:
        """The folder to use, made if need be. Raises Misuse(BAD_ARGUMENT) if it is there and not empty."""
        if self.folder is None:
            names = ["demo-run", *(f"demo-run-{n}" for n in range(2, 10_000))]
            folder = next(path for name in names if not (path := Path(name)).exists())
        else:
            folder = self.folder
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise Misuse(Code.BAD_ARGUMENT, f"{folder} is there and is not an empty folder", "name a new one")
        folder.mkdir(parents=True, exist_ok=True)
        return folder.resolve()


def run(options: DemoOptions, console: Console | None = None) -> Verdict | None:
    """Run the demo; the audit's verdict (None with ``audit=False``). ``verdict.settled`` means success.

    The run folder keeps everything: databases, the broker's data, events.jsonl, verdict.json and report.html. Raises
    Misuse for a bad orders file or folder, Unknown if a process ends by itself.
    """
    screen = Screen(console)
    orders = (
        read_orders(options.orders, options.limit) if options.orders else generate_orders(options.count, options.seed)
    )
    orders = orders.slice(0, options.limit)
    if options.audit:
        from escrowmq.pipeline.java import find_java

        find_java()  # better now than after the run
    folder = options.run_folder()
    pq.write_table(orders, folder / "orders.parquet")
    (folder / "manifest.json").write_text(json.dumps(manifest("broker"), indent=2) + "\n")
    director = Director(options, folder, orders, screen)
    with screen.running(orders.num_rows, folder):
        director.direct()
    if not options.audit:
        return None
    from escrowmq.pipeline import audit

    with screen.auditing() as progress:
        verdict = audit.run(folder, progress=progress)
    screen.show(verdict, folder)
    return verdict


class Director:
    """One run. :meth:`direct` returns when it is over and every process has ended."""

    def __init__(self, options: DemoOptions, folder: Path, orders: pa.Table, screen: Screen) -> None:
        self._options = options
        self._folder = folder
        self._screen = screen
        self._diary = Diary(folder / "events.jsonl")
        self._events: SimpleQueue[ChildEvent] = SimpleQueue()
        self._children: dict[str, Child] = {}
        self._port = 0
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
        self._noted = dict.fromkeys(self._applied, 0.0)
        self._shop_done = False

    def direct(self) -> None:
        """Start, kill, restart, wait for the end, stop."""
        try:
            self._start("broker")
            self._until(lambda: self._port != 0)
            for kind in SERVICES:
                self._start(kind.name)
            self._start("shop")
            self._until(lambda: self._shop_done)
            self._settle()
            for name in (*KINDS, "shop", "broker"):
                self._end(name)
        finally:
            for child in self._children.values():
                child.kill()
            for name, number in self._applied.items():
                self._diary.note("progress", name, number=number)
            self._diary.close()

    def _start(self, name: str) -> None:
        role = name if name in ("broker", "shop") else "service"
        self._children[name] = Child(name, role, self._config(name), self._folder, self._events)
        self._diary.note("started", name)

    def _config(self, name: str) -> dict[str, Any]:
        folder, url = str(self._folder), f"escrow://127.0.0.1:{self._port}"
        if name == "broker":
            return {"folder": str(self._folder / "broker"), "settings": SETTINGS, "port": self._port}
        if name == "shop":
            return {
                "url": url,
                "folder": folder,
                "orders": str(self._folder / "orders.parquet"),
                "tills": self._options.threads,
                "stop_at": sorted(self._stop_at),
                "cancelled": sorted(self._cancelled),
            }
        stops = self._service_stops[name]
        stop_after = max(stops[0] - self._applied[name], 1) if stops else None
        return {"url": url, "folder": folder, "kind": name, "stop_after": stop_after}

    def _end(self, name: str) -> None:
        self._children.pop(name).stop()

    def _kill(self, name: str, where: str) -> None:
        """``kill -9`` a process and start it again."""
        child = self._children.pop(name)
        child.kill()
        self._diary.note("killed", name, where=where)
        self._screen.say(f"[bold]kill -9[/] {name} {where}")
        self._start(name)

    def _until(self, holds: Any) -> None:
        """Handle events until ``holds()``. Raises Unknown(TIMED_OUT) when no event comes for PATIENCE_SECONDS."""
        while not holds():
            try:
                event = self._events.get(timeout=PATIENCE_SECONDS)
            except Empty:
                raise Unknown(
                    Code.TIMED_OUT, "the demo came to a halt", f"see the logs in {self._folder / 'nodes'}"
                ) from None
            self._handle(event)

    def _handle(self, event: ChildEvent) -> None:
        name = event.child.name
        if event.kind in ("at failpoint", "ended") and self._children.get(name) is not event.child:
            return  # of a process that is no more
        match event.kind:
            case "ready":
                self._ready(name, event.details)
            case "placed" | "cancelled":
                self._dealt_with(event)
            case "done":
                self._shop_done = True
            case "asked":
                self._diary.note("asked", name, event.at_us, **event.details)
                self._screen.asked()
            case "progress":
                self._progress(name, event)
            case "at failpoint":
                self._at_failpoint(name, event.details)
            case "ended":
                code = event.details["code"]
                log = self._folder / "nodes" / f"{name}.log"
                raise Unknown(Code.DISCONNECTED, f"the {name} process ended by itself with code {code}", f"see {log}")

    def _dealt_with(self, event: ChildEvent) -> None:
        (self._placed if event.kind == "placed" else self._cancelled).add(event.details["order"])
        count = len(self._placed) + len(self._cancelled)
        self._screen.update("shop", count)
        if self._broker_kills and count >= self._broker_kills[0]:
            self._broker_kills.pop(0)
            self._kill("broker", "in the midst of its work")

    def _ready(self, name: str, details: dict[str, Any]) -> None:
        if name == "broker":
            self._port = int(details["url"].rpartition(":")[2])
        elif name == "shop":
            self._placed.update(details["placed"])
        else:
            self._applied[name] = max(self._applied[name], details["number"])

    def _progress(self, name: str, event: ChildEvent) -> None:
        self._applied[name] = max(self._applied[name], event.details["number"])
        self._screen.update(name, self._applied[name])
        now = time.monotonic()
        if now - self._noted[name] > LOOK_SECONDS:
            self._noted[name] = now
            self._diary.note("progress", name, event.at_us, **event.details)

    def _at_failpoint(self, name: str, details: dict[str, Any]) -> None:
        if name == "shop":
            self._stop_at.discard(details["order"])
        else:
            self._service_stops[name].pop(0)
        self._kill(name, details["where"])

    def _settle(self) -> None:
        """Wait until nothing is undecided and the consumers have applied everything."""
        self._screen.say("all orders are placed; waiting for the check-back and the consumers")
        patience = time.monotonic() + PATIENCE_SECONDS
        before: Any = None
        with connect(f"escrow://127.0.0.1:{self._port}") as bus:
            while time.monotonic() < patience:
                try:
                    standing = _standing(bus)
                except EscrowError:  # the broker may just be starting again
                    standing = None
                if standing == {"open": 0, **self._applied}:
                    return
                state = (standing, dict(self._applied))
                if state != before:
                    before, patience = state, time.monotonic() + PATIENCE_SECONDS
                self._handle_for(LOOK_SECONDS)
        self._screen.say(f"[red]nothing has moved for {PATIENCE_SECONDS:.0f} s: {before}; auditing what there is[/]")

    def _handle_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                self._handle(self._events.get(timeout=left))
            except Empty:
                return


def _standing(bus: Any) -> dict[str, int]:
    """Undecided transactions (``open``), and for each service how many messages its topic holds."""
    topics = {topic["name"]: sum(queue["end"] for queue in topic["queues"]) for topic in bus.admin.topics()}
    undecided = sum(group["open"] for group in bus.admin.producers())
    return {"open": undecided, **{kind.name: topics.get(kind.topic, 0) for kind in SERVICES}}


def _spread(items: Any, count: int, shift: float = 0.5) -> list[Any]:
    """``count`` of the items, evenly spread, the first ``shift`` of a step from the beginning."""
    every = list(items)
    count = min(count, len(every))
    return [every[int((n + shift) * len(every) / count)] for n in range(count)]
