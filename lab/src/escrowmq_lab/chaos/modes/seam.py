"""What a delivery mode is, and what it may use in the process where it runs.

A node runs each mode in a thread of its own. If :meth:`Mode.place` or :meth:`Mode.take` raises an EscrowError or an
error of the database, the node calls it again after a moment, as a supervisor would; any other exception is a finding
of the run. A node may be killed at any instant, and is started again with the same name, number, database and folder.
"""

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
"""A producer's patience with a broker that may have its call: about as long as a node is silent, so that both ends of a
wait are seen.
"""
PAUSE_SECONDS = 0.1
"""After a call that failed for the moment."""
LOOK_SECONDS = 0.5
"""How long a loop waits for messages before it looks whether the run has ended."""
OPEN = np.frombuffer(
    flags({code for code in Code if code.branch in (Unknown, Overloaded, Fenced, Corrupt)}),
    np.bool_,
)
"""By code: answers of a broker that a fault explains."""


LARGE = 0.2
"""Batches that are ten times as large as the others."""


class Regret(Exception):
    """Raised by a business that changed its mind: its local transaction is rolled back, on purpose."""


class Contradiction(Exception):
    """An answer that no fault explains, such as the refusal of a decision that stands: a finding of the run."""


@dataclass(slots=True)
class Site:
    """A process of the run, as one mode sees it. Sites of the modes of a process share its bus, engine, books and
    ``ended``."""

    name: str
    """producer-3, consumer-1, ..."""
    number: int
    """From 1 among its kind."""
    peers: int
    """How many consumers there are; the topic of each is :meth:`Mode.topic`."""
    bus: Bus
    """To all brokers; closed by the node."""
    url: str
    """Of the same brokers, for a mode that needs a connection of its own."""
    engine: sa.Engine
    """The node's own database, with the tables of :mod:`escrowmq.outbox` and its books."""
    books: Books
    folder: Path
    """The node's own; kept through restarts."""
    chance: Random
    rate: float
    """Messages a second that one mode of one producer tries to place, at most."""
    closing: threading.Event = field(default_factory=threading.Event)
    """Place nothing new; finish what is under way."""
    placed: threading.Event = field(default_factory=threading.Event)
    """Set by :meth:`Mode.place` when it has seen ``closing``, and there will be no more business rows."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Return."""
    counter: itertools.count[int] = field(default_factory=itertools.count)
    process: str = field(default_factory=lambda: uuid.uuid4().hex[:8])

    def pause(self, seconds: float) -> None:
        """Wait, or until the end."""
        self.ended.wait(seconds)

    def at_end(self, close: Callable[[], object]) -> None:
        """Have ``close`` called when the run ends, to wake a loop that waits for messages."""

        def wait() -> None:
            self.ended.wait()
            close()

        threading.Thread(target=wait, name="at-end", daemon=True).start()


class Mode(ABC):
    """One delivery mode. What it shares between threads of a node it keeps in a Site."""

    name: ClassVar[str]
    told: ClassVar[str]
    """A sentence for the report: what is exactly once here, and whose database holds the mark."""
    repeats: ClassVar[bool] = False
    """At least once only: an effect that happens again is no violation, one that is missing is."""
    shares: ClassVar[bool] = False
    """All consumers share its topics; else each effect belongs into the database of the consumer that its id names."""

    @classmethod
    def topic(cls, consumer: int) -> str:
        """Return the topic of consumer ``consumer``: its database alone has the marks of these messages."""
        return f"{cls.name}-{consumer}"

    @classmethod
    def lacks(cls) -> str | None:
        """Return what this machine lacks to run the mode, in words, or None."""
        return None

    @classmethod
    def beside(cls, folder: Path, url: str) -> list[str] | None:
        """Return the command of a program that it needs beside the nodes, for a run in ``folder``, which has the
        nodes' folders; None: none.

        The program may be killed at any time, with its whole process group, and is started again with the same
        command. It does not end by itself.
        """
        return None

    @abstractmethod
    def place(self, site: Site) -> None:
        """Place messages until ``site.closing``, set ``site.placed``, then finish what is under way until
        ``site.ended``."""

    @abstractmethod
    def take(self, site: Site) -> None:
        """Give each message of this consumer's topic its effect, until ``site.ended``."""

    # For place

    def batch(self, site: Site, most: int = 40) -> tuple[int, list[str]]:
        """Return a consumer, and 1 to ``most`` new ids for it; waits so long before that the rate is kept."""
        consumer = site.chance.randint(1, site.peers)
        return consumer, self.ids(site, most, consumer)

    def ids(self, site: Site, most: int = 40, consumer: int | None = None) -> list[str]:
        """1 to ``most`` new ids, ten times as many at times, all for one consumer or each for any; waits so long before
        that the rate is kept.

        An id ends with the number of its consumer, so that another process of this node can send it again where it
        belongs.
        """
        count = site.chance.randint(1, most)
        if site.chance.random() < LARGE:
            count *= 10
        site.closing.wait(count / site.rate * 2 * site.chance.random())
        begin = f"{self.name}.{site.name}.{site.process}"
        return [f"{begin}.{next(site.counter)}.{consumer or site.chance.randint(1, site.peers)}" for _ in range(count)]

    def messages(self, consumer: int, ids: Sequence[str]) -> list[Message]:
        """Return the messages of these ids to a consumer, under message ids that follow from them."""
        topic = self.topic(consumer)
        return [Message(topic, body_of(one), key=self.key(one), message_id=message_id_of(one)) for one in ids]

    def key(self, identity: str) -> str:
        """Return the key of the message of an id: a key of its own. A mode in which keys have an order gives
        several ids the same."""
        return identity

    def addressed(self, ids: Sequence[str]) -> list[Message]:
        """Return the messages of these ids, each to the consumer that its id names."""
        return [self.messages(int(one.rpartition(".")[2]), [one])[0] for one in ids]


# Order within a key

KEYS = 8
"""Of one process and mode."""


def key_of(identity: str) -> str:
    """Return the key of an id, one of a few. A process counts its ids, so that those of a key have an order."""
    _, node, process, number, _ = identity.split(".")
    return f"{node}.{process}.{int(number) % KEYS}"


class KeyOrder:
    """What one consumer of an ordered feed has seen. Not thread-safe."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, str]] = {}

    def see(self, identities: Iterable[str]) -> None:
        """Record messages that were delivered here for the first time, in this order. Raises Contradiction where one
        comes behind a later one of its
        key."""
        for identity in identities:
            if identity.count(".") != 4:
                continue  # garbage, which the check will find
            number, key = int(identity.split(".")[3]), key_of(identity)
            latest, before = self._latest.get(key, (-1, ""))
            if number <= latest:
                raise Contradiction(f"{identity} was handed out after {before}, which is later in its key")
            self._latest[key] = number, identity
