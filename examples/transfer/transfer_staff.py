"""The example's hold on its processes: starts them, hears them, kills them at the places at which they stand still."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from escrowmq.platform import failpoints
from escrowmq_lab.programs import Program

PROGRAM = Path(__file__).with_name("transfer_process.py")
PATIENCE = 120.0


@dataclass(frozen=True)
class Death:
    """Who dies when which process has come to a place (see :mod:`escrowmq.platform.failpoints`)."""

    place: str
    stands: str
    dies: str


DEATHS = {
    "outbox": [
        Death("bank-a.debited", "bank-a", "bank-a"),
        Death("bank-a.message-written", "bank-a", "bank-a"),
        Death("bank-a.committed", "bank-a", "bank-a"),
        Death("relay.leased", "relay", "relay"),
        Death("relay.read", "relay", "relay"),
        Death("relay.built", "relay", "broker"),
        Death("relay.sent", "relay", "relay"),
        Death("relay.marked", "relay", "relay"),
        Death("bank-b.received", "bank-b", "broker"),
        Death("bank-b.claimed", "bank-b", "bank-b"),
        Death("bank-b.credited", "bank-b", "bank-b"),
        Death("bank-b.committed", "bank-b", "bank-b"),
        Death("bank-b.acknowledged", "bank-b", "bank-b"),
    ],
    "barrier": [
        Death("bank-a.escrowed", "bank-a", "bank-a"),
        Death("barrier.bound", "bank-a", "bank-a"),
        Death("bank-a.debited", "bank-a", "broker"),
        Death("bank-a.committed", "bank-a", "bank-a"),
        Death("transaction.told", "bank-a", "broker"),
        Death("bank-a.told", "bank-a", "bank-a"),
        Death("bank-b.received", "bank-b", "broker"),
        Death("bank-b.claimed", "bank-b", "bank-b"),
        Death("bank-b.credited", "bank-b", "bank-b"),
        Death("bank-b.committed", "bank-b", "bank-b"),
        Death("bank-b.acknowledged", "bank-b", "bank-b"),
    ],
}
"""Between every two steps of every process, somebody dies."""


class Staff:
    """All processes of one run. A context manager: leaving stops those that still run."""

    def __init__(self, config: dict[str, Any], folder: Path, deaths: list[Death]) -> None:
        self.killed: list[Death] = []
        self.left = list(deaths)
        self._deaths = list(deaths)
        self._config = config
        self._folder = folder
        self._places = folder / "places"
        self._places.mkdir()
        self._processes: dict[str, Program] = {}
        self._made = 0
        self._asked = 0
        self._roles = ["bank-a", "bank-b", *(["relay"] if config["way"] == "outbox" else [])]

    def __enter__(self) -> "Staff":
        try:
            self._config["broker"] = self._open("broker", listen="127.0.0.1:0")
            for role in self._roles:
                self._start(role)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for place in self._places.iterdir():  # whoever still stands may go on, and end
            place.unlink(missing_ok=True)
        for role in reversed(self._processes):
            self._processes[role].stop()

    def transfer(self, end: int) -> None:
        """Ask bank A for all transfers below ``end`` that are not made yet."""
        self._asked = end
        self._processes["bank-a"].say(f"{self._made} {end}")

    @property
    def idle(self) -> bool:
        """Whether bank A has made what it was asked for."""
        told = self._processes["bank-a"].heard("made")
        self._made = max(self._made, int(told or 0))
        return self._made >= self._asked

    def work(self, until: Callable[[], bool]) -> None:
        """Let them work until ``until()``; who comes to a place stands still, and somebody dies and is started
        again."""
        deadline = time.monotonic() + PATIENCE
        while not (self.idle and until()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end in {PATIENCE:.0f} s; see the logs")
            if standing := next((death for death in self.left if (self._places / death.place).exists()), None):
                self._kill(standing)
            for role, process in self._processes.items():
                if not process.running:
                    raise RuntimeError(f"{role} ended by itself; see {role}.log")
            time.sleep(0.05)

    def _kill(self, death: Death) -> None:
        self._processes[death.dies].kill()
        (self._places / death.place).unlink()
        self.left.remove(death)
        self.killed.append(death)
        if death.dies == "broker":
            self._open("broker", listen=self._config["broker"].removeprefix("escrow://"))
        else:
            self._start(death.dies)
        if death.dies == "bank-a":
            self.transfer(self._asked)

    def _start(self, role: str, **more: str) -> Program:
        places = ",".join(death.place for death in self._deaths if death.stands == role)
        armed = {failpoints.VARIABLE: places, failpoints.TELL_VARIABLE: str(self._places)} if places else {}
        self._processes[role] = Program(
            role,
            [sys.executable, PROGRAM, role, json.dumps({**self._config, **more})],
            self._folder / f"{role}.log",
            armed,
        )
        return self._processes[role]

    def _open(self, role: str, **more: str) -> str:
        """Start it and wait until it is ready; what it says then."""
        process = self._start(role, **more)
        deadline = time.monotonic() + PATIENCE
        while (word := process.heard("ready")) is None:
            if not process.running or time.monotonic() > deadline:
                raise RuntimeError(f"{role} does not start; see {role}.log")
            time.sleep(0.01)
        return word
