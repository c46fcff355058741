"""The interface of a delivery mode, and the resources of its process. A node runs each mode in its own thread. If
:meth:`Mode.place` or :meth:`Mode.take` raises an EscrowError or a database error, the node calls it again after a
moment, like a supervisor; any other exception is a finding of the run. A node may be killed at any instant, and is
restarted with the same name, number, database and folder."""

from __future__ import annotations

import itertools
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import ClassVar

import numpy as np
import sqlalchemy as sa

from escrowmq.client.bus import Bus
from escrowmq.errors import Code, Corrupt, Fenced, Overloaded, Unknown, flags
from escrowmq.model import Message
from escrowmq_lab.chaos.books import Books, body_of, message_id_of

CALL_SECONDS = 3.0
"""Timeout (s) of a producer's call: about as long as faults last, so that both outcomes of a wait occur."""
PAUSE_SECONDS = 0.1
"""Pause (s) after a call that failed temporarily."""
POLL_SECONDS = 0.5
"""Wait (s) for messages before a loop checks whether the run has ended."""
OPEN = np.frombuffer(
    flags({code for code in Code if code.branch in (Unknown, Overloaded, Fenced, Corrupt)}),
    np.bool_,
)
"""By code: broker responses that a fault explains."""


LARGE = 0.2
"""Share of batches that are ten times as large as the others."""


class Regret(Exception):
    """Planned rollback: raised by a business function to roll back its local transaction."""


class Contradiction(Exception):
    """A response that no fault explains, such as the rejection of a durable decision: a finding of the run."""


@dataclass(slots=True)
class Site:
    """A process of the run, for one mode. Sites of a process share its bus, engine, books and ``ended``."""

    name: str
    """producer-3, consumer-1, ..."""
    number: int
    """Number among its kind, from 1."""
    peers: int
    """Number of consumers; the topic of each is :meth:`Mode.topic`."""
    bus: Bus
    """Connection to all brokers; closed by the node."""
    url: str
    """URL of the same brokers, for a mode that needs its own connection."""
    engine: sa.Engine
    """The node's own database, with the tables of :mod:`escrowmq.outbox` and its books."""
    books: Books
    folder: Path
    """The node's own folder; kept through restarts."""
    chance: Random
    rate: float
    """Maximum messages per second that one mode of one producer tries to place."""
    closing: threading.Event = field(default_factory=threading.Event)
    """Set to stop new work; work in flight is finished."""
    placed: threading.Event = field(default_factory=threading.Event)
    """Set by :meth:`Mode.place` after ``closing``, when no more business rows will follow."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Set to make the mode return."""
    counter: itertools.count[int] = field(default_factory=itertools.count)
    process: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def pause(self, seconds: float) -> None:
        """Wait for ``seconds``, or until the end."""
        self.ended.wait(seconds)

    def at_end(self, close: Callable[[], object]) -> None:
        """Call ``close`` when the run ends, to wake a loop that waits for messages."""

        def wait() -> None:
            self.ended.wait()
            close()

        threading.Thread(target=wait, name="at-end", daemon=True).start()


class Mode(ABC):
    """One delivery mode. State shared between threads of a node is kept in a Site."""

    name: ClassVar[str]
    promise: ClassVar[str]
    """A sentence for the report: the guarantee, and the database with the deduplication record."""
    repeats: ClassVar[bool] = False
    """At least once only: a repeated effect is no violation, a missing one is."""
    shares: ClassVar[bool] = False
    """Whether all consumers share its topics; else an effect belongs in the database of the consumer in its id."""

    @classmethod
    def topic(cls, consumer: int) -> str:
        """Return the topic of a consumer: only its database has the deduplication records of these messages."""
        return f"{cls.name}-{consumer}"

    @classmethod
    def lacks(cls) -> str | None:
        """Return what this machine lacks to run it, in words; None if nothing."""
        return None

    @classmethod
    def beside(cls, folder: Path, url: str) -> list[str] | None:
        """Return the command of a program that it needs beside the nodes, for a run in ``folder`` (with the nodes'
        folders); None if none. The program may be killed at any time, with its process group, and is restarted with the
        same command. It does not end by itself."""
        return None

    @abstractmethod
    def place(self, site: Site) -> None:
        """Place messages until ``site.closing``, set ``site.placed``, then finish pending work until ``site.ended``."""

    @abstractmethod
    def take(self, site: Site) -> None:
        """Apply each message of this consumer's topic, until ``site.ended``."""

    # For place

    def batch(self, site: Site, most: int = 40) -> tuple[int, list[str]]:
        """Return a consumer and 1 to ``most`` new ids for it; waits first to keep the rate."""
        consumer = site.chance.randint(1, site.peers)
        return consumer, self.ids(site, most, consumer)

    def ids(self, site: Site, most: int = 40, consumer: int | None = None) -> list[str]:
        """Return 1 to ``most`` new ids (sometimes ten times as many) for one consumer, or each for any; waits first to
        keep the rate. An id ends with the number of its consumer, so that another process of this node can resend it to
        the right topic."""
        count = site.chance.randint(1, most)
        if site.chance.random() < LARGE:
            count *= 10
        site.closing.wait(count / site.rate * 2 * site.chance.random())
        begin = f"{self.name}.{site.name}.{site.process}"
        return [f"{begin}.{next(site.counter)}.{consumer or site.chance.randint(1, site.peers)}" for _ in range(count)]

    def messages(self, consumer: int, ids: Sequence[str]) -> list[Message]:
        """Return the messages of these ids to a consumer, with message ids derived from them."""
        topic = self.topic(consumer)
        return [Message(topic, body_of(one), key=self.key(one), message_id=message_id_of(one)) for one in ids]

    def key(self, identity: str) -> str:
        """Return the key of an id's message: its own. Modes with key order give several ids the same key."""
        return identity

    def addressed(self, ids: Sequence[str]) -> list[Message]:
        """Return the messages of these ids, each to the consumer that its id names."""
        return [self.messages(int(one.rpartition(".")[2]), [one])[0] for one in ids]


# Order within a key

KEYS = 8
"""Keys of one process and mode."""


def key_of(identity: str) -> str:
    """Return one of a few keys for an id. A process numbers its ids, so those of a key are ordered."""
    _, node, process, number, _ = identity.split(".")
    return f"{node}.{process}.{int(number) % KEYS}"


class KeyOrder:
    """The messages seen by one consumer of an ordered feed. Not thread-safe."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, str]] = {}

    def see(self, identities: Iterable[str]) -> None:
        """Record first deliveries, in order. Raises Contradiction for one that follows a later one of its key."""
        for identity in identities:
            if identity.count(".") != 4:
                continue  # garbage, which the check will find
            number, key = int(identity.split(".")[3]), key_of(identity)
            latest, before = self._latest.get(key, (-1, ""))
            if number <= latest:
                raise Contradiction(f"{identity} was handed out after {before}, which is later in its key")
            self._latest[key] = number, identity
