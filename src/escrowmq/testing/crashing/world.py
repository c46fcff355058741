"""What outlives a crash: the broker, the databases and the clock; and the process that runs in it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from escrowmq.platform.extras import missing_package
from escrowmq.testing.buses import AsyncMemoryBus, Clock, MemoryBroker, MemoryBus
from escrowmq.testing.crashing.process import Process

if TYPE_CHECKING:
    import sqlalchemy as sa
    from sqlalchemy.ext.asyncio import AsyncEngine

    from escrowmq.testing.crashing.databases import WatchedEngine

EngineT = TypeVar("EngineT", bound="sa.Engine | AsyncEngine")


class World:
    """The surroundings of one process: pass its buses and engines to your own functions. They belong to the process,
    and are closed when it ends; what they have stored stays. Setup and verification have a world without a process."""

    def __init__(self, broker: MemoryBroker, folder: Path, process: Process | None = None, starts: int = 0) -> None:
        self.folder = folder
        """For files of your own; it is empty at first, and kept across crashes."""
        self.clock = Clock(broker)
        self.restarted = starts > 1
        """Whether this program was started in this world before."""
        self._broker = broker
        self._process = process
        self._buses: list[MemoryBus] = []
        self._async_buses: list[AsyncMemoryBus] = []
        self._engines: dict[str, Any] = {}
        self._watched: list[WatchedEngine] = []

    def bus(self) -> MemoryBus:
        """Return a new bus to the broker in memory; an asynchronous program uses :meth:`abus`."""
        bus = MemoryBus(self._broker, self._process)
        self._buses.append(bus)
        self._adopt(bus)
        return bus

    async def abus(self) -> AsyncMemoryBus:
        """Return a new bus for the running event loop."""
        bus = AsyncMemoryBus(self._broker, self._process)
        self._async_buses.append(bus)
        self._adopt(bus)
        return bus

    def engine(self, name: str = "database", **options: Any) -> sa.Engine:
        """Return the SQLAlchemy engine of this process for the database ``name``, a SQLite file of this world.
        ``options`` as for ``sqlalchemy.create_engine``. Raises Misuse(MISSING_PACKAGE)."""
        if name not in self._engines:
            databases = _databases("world.engine")
            self._engines[name] = self.watch(databases.open_engine(str(self.folder / f"{name}.sqlite"), options))
        engine: sa.Engine = self._engines[name]
        return engine

    def async_engine(self, name: str = "database", **options: Any) -> AsyncEngine:
        """As :meth:`engine`, for asyncio."""
        if (key := f"{name} (asyncio)") not in self._engines:
            databases = _databases("world.async_engine")
            self._engines[key] = self.watch(databases.open_async_engine(str(self.folder / f"{name}.sqlite"), options))
        engine: AsyncEngine = self._engines[key]
        return engine

    def watch(self, engine: EngineT) -> EngineT:
        """Make the writing statements and commits of an engine of your own steps of this process. Its connections are
        closed when the process ends. Clear the database in ``setup``. An engine that several processes watch belongs to
        the last of them. Returns the engine."""
        databases = _databases("world.watch")
        self._watched.append(databases.WatchedEngine(engine, self.step))
        return engine

    def step(self, text: str) -> None:
        """Mark a step of your own, such as a call of another service: the process may be killed here."""
        if self._process is not None:
            self._process.step(text)

    def _adopt(self, bus: Any) -> None:
        if self._process is not None:
            self._process.links += bus.router.links
            if self._process.is_dead:
                bus.router.links[0].close()

    def _close(self) -> None:
        """Close everything of the process; after a crash nothing reaches the broker or a database any more."""
        for bus in self._buses:
            bus.close(grace=0)
        for watched in self._watched:
            if not watched.is_async:
                watched.release()

    async def _aclose(self) -> None:
        """Close what belongs to the running event loop, and cancel its tasks."""
        for bus in self._async_buses:
            await bus.close(grace=0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for watched in self._watched:
            if watched.is_async:
                await watched.arelease()
        await asyncio.get_running_loop().shutdown_asyncgens()


def _databases(who: str) -> Any:
    try:
        from escrowmq.testing.crashing import databases
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "sqlalchemy":
            raise
        raise missing_package("sqlalchemy", who) from problem
    return databases
