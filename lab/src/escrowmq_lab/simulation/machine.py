"""Puts the simulation's threads, time and randomness in the place of the machine's, in the modules of the product, for
one run.

The product says ``threading.Lock()``, ``time.monotonic()``, ``os.urandom(8)``: names of its modules, which are bound to
the simulation's while a run is under way, and to the machine's again after it. What the standard library does for
futures is bound, too.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures._base
import gc
import importlib
import os
import pkgutil
import queue
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from random import Random
from types import ModuleType
from typing import Any

import escrowmq
from escrowmq.platform.extras import EXTRAS
from escrowmq_lab.simulation import threads
from escrowmq_lab.simulation.network import End
from escrowmq_lab.simulation.scheduler import Scheduler

ROOMS = ("acts", "broker", "client", "ledger", "log", "message", "platform", "wire")
"""The rooms of the product that run in the simulation."""
MODULES = ("outbox.targets.escrow",)
"""Of other rooms, what runs there."""
_LEFT_OUT = (
    "serve",
    "http",
    "metrics",
    "server",
    "listening",
    "embedded",
    "offline",
)
"""Modules that need the real machine: sockets that listen, processes."""
EPOCH_US = 1_700_000_000_000_000
"""The wall clock when a run begins."""


class _Module:
    """A module of the standard library, some of whose names are others."""

    def __init__(self, module: ModuleType, **others: Any) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@cache
def _places() -> list[tuple[ModuleType, str, Any]]:
    """Every name of the product that is bound to something of the machine's: module, name, what it is bound to."""
    names: list[str] = []
    for room in ROOMS:
        package = importlib.import_module(f"escrowmq.{room}")
        found = [module.name for module in pkgutil.walk_packages(package.__path__, f"escrowmq.{room}.")]
        names += [package.__name__, *(name for name in found if name.rsplit(".", 1)[-1] not in _LEFT_OUT)]
    names += [f"escrowmq.{name}" for name in MODULES]
    for name in tuple(names):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as problem:
            if (problem.name or "").partition(".")[0] not in EXTRAS:
                raise
            names.remove(name)  # of an extra that is not installed, so nothing uses it
    replaced: list[Any] = [
        threading,
        threading.Lock,
        time,
        time.time_ns,
        random,
        os,
        queue,
        socket,
        concurrent.futures.ThreadPoolExecutor,
    ]
    places = [
        (module, attribute, bound)
        for module_name, module in sorted(sys.modules.items())
        if module_name in names or module_name == escrowmq.__name__
        for attribute, bound in sorted(vars(module).items())
        if any(bound is one for one in replaced)
    ]
    gc.freeze()  # what is there now stays
    return [*places, (concurrent.futures._base, "threading", threading)]


@contextmanager
def machine(
    scheduler: Scheduler, chance: Random, connect: Callable[[str, int, float], End], skew_us: Callable[[], int]
) -> Iterator[None]:
    """Yield the simulated machine for the block. Cycles are collected after it: when they would be is no part of a
    seed, and what is collected may take
    locks. (One of a run before cannot disturb this one for the same reason.) ``chance`` gives the product's random
    numbers, ``connect`` a socket to a host and port, ``skew_us``
    how far the wall clock of the node that runs is ahead."""

    def wall_ns() -> int:
        return EPOCH_US * 1000 + scheduler.now_ns + 1000 * skew_us()

    def sleep(seconds: float) -> None:
        scheduler.park(seconds)

    times = _Module(
        time,
        monotonic=lambda: scheduler.now_ns / 1e9,
        monotonic_ns=lambda: scheduler.now_ns,
        time=lambda: wall_ns() / 1e9,
        time_ns=wall_ns,
        sleep=sleep,
    )
    substitutes: list[tuple[Any, Any]] = [
        (threading, threads.THREADING),
        (threading.Lock, threads.Lock),
        (time, times),
        (time.time_ns, wall_ns),
        (random, _Module(random, random=chance.random, getrandbits=chance.getrandbits)),
        (os, _Module(os, urandom=chance.randbytes)),
        (queue, _Module(queue, Queue=threads.Queue)),
        (socket, _Module(socket, create_connection=lambda place, timeout: connect(place[0], place[1], timeout))),
        (concurrent.futures.ThreadPoolExecutor, threads.Executor),
    ]
    places = _places()
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    for module, name, bound in places:
        setattr(module, name, next(other for one, other in substitutes if one is bound))
    threads.begin(scheduler)
    try:
        yield
    finally:
        threads.end()
        if collects:
            gc.enable()
        for module, name, bound in places:
            setattr(module, name, bound)
