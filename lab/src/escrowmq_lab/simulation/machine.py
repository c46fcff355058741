"""Replacement of the machine's threads, time and randomness by the simulation's, in the modules of the product, for one
run. The product uses ``threading.Lock()``, ``time.monotonic()``, ``os.urandom(8)``: names in its modules, which are
bound to the simulation's objects during a run, and to the machine's again afterwards. The standard library's futures
are bound too."""

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

PACKAGES = ("acts", "broker", "client", "ledger", "log", "message", "platform", "wire")
"""Packages of the product that run in the simulation."""
MODULES = ("outbox.targets.escrow",)
"""Modules of other packages that run in it."""
_LEFT_OUT = (
    "serve",
    "http",
    "metrics",
    "server",
    "listening",
    "embedded",
    "offline",
)
"""Modules that need the real machine: listening sockets, processes."""
EPOCH_US = 1_700_000_000_000_000
"""The wall clock when a run begins."""


class _Module:
    """A module of the standard library with some names replaced."""

    def __init__(self, module: ModuleType, **others: Any) -> None:
        self._module = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@cache
def _bindings() -> list[tuple[ModuleType, str, Any]]:
    """Return every name of the product that is bound to something of the machine: module, name, bound object."""
    names: list[str] = []
    for package_name in PACKAGES:
        package = importlib.import_module(f"escrowmq.{package_name}")
        found = [module.name for module in pkgutil.walk_packages(package.__path__, f"escrowmq.{package_name}.")]
        names += [package.__name__, *(name for name in found if name.rsplit(".", 1)[-1] not in _LEFT_OUT)]
    names += [f"escrowmq.{name}" for name in MODULES]
    for name in tuple(names):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as problem:
            if (problem.name or "").partition(".")[0] not in EXTRAS:
                raise
            names.remove(name)  # part of an extra that is not installed, so it is not used
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
    bindings = [
        (module, attribute, bound)
        for module_name, module in sorted(sys.modules.items())
        if module_name in names or module_name == escrowmq.__name__
        for attribute, bound in sorted(vars(module).items())
        if any(bound is one for one in replaced)
    ]
    gc.freeze()  # exclude existing objects from collection
    return [*bindings, (concurrent.futures._base, "threading", threading)]


@contextmanager
def machine(
    scheduler: Scheduler, chance: Random, connect: Callable[[str, int, float], End], skew_us: Callable[[], int]
) -> Iterator[None]:
    """Install the simulated machine for the block. Cycles are collected only before and after it: the time of a
    collection is no part of a seed, and collected objects may take locks. ``chance`` provides random numbers,
    ``connect`` sockets, ``skew_us`` the skew of the running node's wall clock."""

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
    bindings = _bindings()
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    for module, name, bound in bindings:
        setattr(module, name, next(other for one, other in substitutes if one is bound))
    threads.begin(scheduler)
    try:
        yield
    finally:
        threads.end()
        if collects:
            gc.enable()
        for module, name, bound in bindings:
            setattr(module, name, bound)
