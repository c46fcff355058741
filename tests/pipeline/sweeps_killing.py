"""Spark's Python processes killed in the middle of a sweep, at places that are named; and what the shop should look
like in the end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from sweeps_world import BOOKS, NOW, World

from escrowmq.pipeline.sweeps import Books, Swept, sweep_freezes, sweep_orders
from standing import Stage

EACH = 6
"""Orders of every kind."""
POINTS = {
    sweep_orders: ("sweep.locked", "sweep.freeze-written", "sweep.released", "sweep.settled"),
    sweep_freezes: ("sweep.fence-written", "sweep.fenced", "sweep.orphan-written", "sweep.orphan-released"),
}
ALL = tuple(point for points in POINTS.values() for point in points)
Content = dict[str, list[tuple[Any, ...]]]


def once_cleanly(shop: World) -> Content:
    """What one clean run of examples/shop's sweeps leaves; the shop is then as before."""
    shop.plain_sweeps()
    found = shop.content()
    shop.fill(EACH)
    return found


def both(spark: SparkSession, shop: World, books: Books = BOOKS) -> list[Swept]:
    return [sweep(spark, shop.databases, books=books, now_us=NOW) for sweep in (sweep_orders, sweep_freezes)]


@contextmanager
def killing(spark: SparkSession, points: tuple[str, ...], told: Path) -> Iterator[list[str]]:
    """Spark's Python workers die at these places: at each the first that comes there, once. What was killed so far."""
    with (
        Stage.of(spark).opened(told, points),
        told_places(points, told, lambda pid: os.kill(pid, signal.SIGKILL)) as killed,
    ):
        yield killed


@contextmanager
def told_places(points: tuple[str, ...], told: Path, kill: Callable[[int], object]) -> Iterator[list[str]]:
    """``kill`` is called with each process that stands still at one of these places. The places so far."""
    killed: list[str] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            for point in points:
                file = told / point
                if file.exists():
                    killed.append(point)
                    kill(int(file.read_text()))
                    file.unlink()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()
