"""The auditor: reads both banks at any moment, kills or no kills, and says what is wrong.

Bank B is read before bank A, each in one snapshot. So whatever B has credited by then, A has debited before it is read,
and what is debited and not credited is the money in flight.
"""

import threading
from dataclasses import dataclass

import sqlalchemy as sa
from bank_tables import accounts_a, accounts_b, credits, debits

from escrowmq.model import message_id
from escrowmq.outbox import State
from escrowmq.outbox.tables import trans_message
from escrowmq_lab.databases import snapshot


@dataclass(frozen=True)
class Reading:
    """Both banks, as they were read together."""

    in_a: int
    in_flight: int
    in_b: int
    debited: int
    credited: int
    problems: tuple[str, ...]

    @property
    def total(self) -> int:
        return self.in_a + self.in_flight + self.in_b


def read(a: sa.Engine, b: sa.Engine, total: int, with_messages: bool) -> Reading:
    """One reading, by id. ``total`` is what there was at first; ``with_messages``: bank A has a message table."""
    with snapshot(b) as bank:
        in_b = _sum(bank, accounts_b.c.amount)
        received = bank.execute(sa.select(credits.c.transfer_id, credits.c.amount)).all()
    with snapshot(a) as bank:
        in_a = _sum(bank, accounts_a.c.amount)
        sent = {row.transfer_id: row.amount for row in bank.execute(sa.select(debits))}
        messages = set(bank.scalars(sa.select(trans_message.c.id))) if with_messages else set()
    arrived = {row.transfer_id for row in received}
    in_flight = sum(amount for name, amount in sent.items() if name not in arrived)
    problems = [
        f"transfer {row.transfer_id}: {row.amount} credited, {sent.get(row.transfer_id, 'nothing')} debited"
        for row in received
        if sent.get(row.transfer_id) != row.amount
    ]
    if len(received) != len(arrived):
        problems.append(f"{len(received) - len(arrived)} transfers were credited more than once")
    if with_messages and messages != {message_id(name) for name in sent}:
        problems.append("debits and messages are not the same transfers")
    if in_a + in_flight + in_b != total:
        problems.append(f"{in_a} in A + {in_flight} in flight + {in_b} in B is not {total}")
    return Reading(in_a, in_flight, in_b, len(sent), len(arrived), tuple(problems))


def not_done(a: sa.Engine) -> int:
    """How many messages of bank A's table are not marked as done by bank B's callback."""
    with a.connect() as bank:
        waiting = sa.select(sa.func.count()).where(trans_message.c.state != State.DONE.value)
        return bank.scalar(waiting.select_from(trans_message)) or 0


class Auditor:
    """Reads again and again in the background. A context manager."""

    def __init__(self, a: sa.Engine, b: sa.Engine, total: int, with_messages: bool) -> None:
        self.readings = 0
        self.problems: list[str] = []
        self._banks = (a, b, total, with_messages)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Auditor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def read(self) -> Reading:
        """Both banks, now."""
        return read(*self._banks)

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            try:
                reading = self.read()
            except Exception as problem:
                self.problems.append(f"cannot read the banks: {problem}")
                return
            self.readings += 1
            self.problems += [problem for problem in reading.problems if problem not in self.problems]


def _sum(connection: sa.Connection, column: sa.Column) -> int:
    return int(connection.scalar(sa.select(sa.func.coalesce(sa.func.sum(column), 0))) or 0)
