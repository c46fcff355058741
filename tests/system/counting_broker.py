"""``escrowmq serve`` that counts its own work: run as ``counting_broker.py FOLDER [--calls]``, with commands on
standard input.

``counts`` answers with one JSON line; ``plant NAME`` makes it do needless work from now on, ``unplant`` ends that. With
``--calls`` it counts Python's calls on every thread, which makes it slow.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

from escrowmq.broker import calls
from escrowmq.broker.writer import engine
from escrowmq.broker.writer import shard as shard_module
from escrowmq.ledger.ledger import Ledger
from escrowmq.wire import Exchange

ASKED = (Exchange.PREPARE, Exchange.END)
counts: Counter[str] = Counter()
planted: set[str] = set()
python_calls = count()


def counting(owner: Any, name: str, what: str, worth: Callable[..., int] = lambda *_: 1) -> None:
    """Count the calls of a function: ``worth(result, *arguments)`` each."""
    function = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        counts[what] += worth(result, *arguments)
        return result

    setattr(owner, name, call)


def count_everything() -> None:
    counting(engine.Engine, "_round", "rounds")
    counting(Ledger, "decide", "decides")
    counting(Ledger, "decide_rows", "decides", lambda decision, *_: decision is not None)
    counting(Ledger, "apply", "applies")
    for name in ("fsync", "fdatasync"):
        counting(os, name, "syncs")
    counting(os, "pwritev", "written")
    counting(os, "pwritev", "written_bytes", lambda written, *_: written)
    counting(calls.Calls, "exchange", "requests", lambda _, __, kind, *___: kind in ASKED)
    counting(calls.Calls, "parcel", "requests", lambda _, __, parcel, *___: parcel.kind in ASKED)


def plant_everything() -> None:
    """Wrong turns that the guards must see, each off until it is asked for."""
    fdatasync, arrange, run = os.fdatasync, shard_module.arrange, engine.Engine._round
    here, there = threading.Semaphore(0), threading.Semaphore(0)
    held = threading.Event()

    def hand_over() -> None:
        while there.acquire():
            here.release()

    def synced(descriptor: int) -> None:
        fdatasync(descriptor)
        if "sync" in planted:
            fdatasync(descriptor)
            counts["syncs"] += 1

    def arranged(requests: Any) -> list[Any]:
        return (
            [one for request in requests for one in arrange([request])] if "unmerged" in planted else arrange(requests)
        )

    def stepped(self: engine.Engine) -> None:
        if "switches" in planted:
            for _ in range(20):
                there.release()
                here.acquire()
        if "calls" in planted:
            for _ in range(2000):
                len("")
        if "threads" in planted:
            threading.Thread(target=held.wait, daemon=True).start()
        engine.ROUND_BYTES, engine.LATE_BYTES = (1, 0) if "single" in planted else whole
        run(self)

    whole = engine.ROUND_BYTES, engine.LATE_BYTES
    os.fdatasync, shard_module.arrange = synced, arranged  # type: ignore[assignment]
    engine.Engine._round = stepped  # type: ignore[method-assign]
    threading.Thread(target=hand_over, daemon=True).start()


def profile(frame: Any, event: str, argument: Any) -> None:
    if event in ("call", "c_call"):
        next(python_calls)


def answer_commands() -> None:
    for line in sys.stdin:
        match line.split():
            case ["counts"]:
                used = resource.getrusage(resource.RUSAGE_SELF)
                calls_so_far = python_calls.__reduce__()[1][0]
                more = {"switches": used.ru_nvcsw, "threads": len(os.listdir("/proc/self/task")), "calls": calls_so_far}
                print(json.dumps({**counts, **more}), flush=True)
            case ["plant", name]:
                planted.add(name)
                print("{}", flush=True)
            case ["unplant"]:
                planted.clear()
                print("{}", flush=True)


def main() -> None:
    folder, *flags = sys.argv[1:]
    plant_everything()
    count_everything()
    threading.Thread(target=answer_commands, daemon=True).start()
    if "--calls" in flags:
        threading.setprofile(profile)
    from escrowmq.cli.main import main as escrowmq

    sys.argv[1:] = ["serve", "--json", "-d", folder, "-l", "127.0.0.1:0"]
    escrowmq()


if __name__ == "__main__":
    main()
