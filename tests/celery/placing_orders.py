"""Programs that are killed between any two of their steps: one writes orders with their tasks, one relays them, one
works on them.

Steps are the statements, commits and rollbacks of the database, each publish of Celery, and each send of the relay
(whose statements have kill tests of their own). Roles for the zygote.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import celery.signals
import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from escrowmq import outbox
from escrowmq.celery import atomic
from escrowmq.outbox.engines import open_engine
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.escrow import EscrowTarget


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    __tablename__ = "celery_orders"
    id: Mapped[str] = mapped_column(sa.String(40), primary_key=True)


class Effect(Base):
    __tablename__ = "celery_effects"
    number: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[str] = mapped_column(sa.String(40), unique=True)


def make_tables(engine: sa.Engine) -> None:
    Base.metadata.create_all(engine)
    outbox.migrate(engine)


def count_steps(die_at: int, engine: sa.Engine) -> Callable[..., None]:
    """Count the steps of this process, and kill it at step ``die_at``. Returns a step."""
    passed = 0

    def step(*_: Any, **__: Any) -> None:
        nonlocal passed
        passed += 1
        if passed == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    for event in ("before_cursor_execute", "after_cursor_execute", "commit", "rollback", "begin"):
        sa.event.listen(engine, event, step)
    celery.signals.before_task_publish.connect(step, weak=False)
    celery.signals.after_task_publish.connect(step, weak=False)
    return step


def place(database_url: str, broker_url: str, run: int, die_at: int) -> None:
    """Place two orders in as many transactions, of which the first is rolled back."""
    app = Celery("shop", broker_url=broker_url)

    @app.task(name="ship", ignore_result=True)
    def ship(order: str) -> None:
        raise AssertionError("the worker has its own")

    engine = open_engine(database_url)
    count_steps(die_at, engine)
    for number in range(2):
        with Session(engine) as session:
            session.add(Order(id=f"{run}-{number}"))
            with atomic(session):
                ship.delay(f"{run}-{number}")
            if number == 0:
                session.rollback()
            else:
                session.commit()
    engine.dispose()


def relay(database_url: str, broker_url: str, die_at: int) -> None:
    """Relay what there is, or die before (1) or after (2) the first send."""
    real, sends = EscrowTarget.send, 0

    def send(target: EscrowTarget, batch: Any) -> Any:
        nonlocal sends
        for step in (1, 2):
            sends += 1
            if sends == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 1:
                codes = real(target, batch)
        return codes

    EscrowTarget.send = send  # type: ignore[method-assign]
    engine = open_engine(database_url)
    target = EscrowTarget(broker_url)
    Relay(engine, target, lease=1.0).drain()
    target.close()
    engine.dispose()


def work(database_url: str, broker_url: str, die_at: int) -> None:
    """Work on the tasks, with one effect for each order, until SIGTERM."""
    app = Celery("shop", broker_url=broker_url, broker_transport_options={"lease": 1.0})
    app.conf.update(task_acks_late=True, worker_enable_remote_control=False, worker_prefetch_multiplier=2)
    engine = open_engine(database_url)
    step = count_steps(die_at, engine)

    @app.task(name="ship", ignore_result=True)
    def ship(order: str) -> None:
        step()
        with Session(engine) as session, contextlib.suppress(sa.exc.IntegrityError):
            session.add(Effect(order_id=order))
            session.commit()
        step()

    app.worker_main(["worker", "-P", "solo", "-l", "WARNING", "--without-heartbeat"])
