"""An order service with Celery: an order and its task are committed together, and each order is shipped once."""

import os
import signal

import sqlalchemy as sa
from celery import Celery
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from escrowmq import outbox
from escrowmq.celery import atomic

app = Celery("shop_tasks", broker_url=os.environ.get("BROKER_URL", "escrow://127.0.0.1:7700"))
app.conf.task_acks_late = True  # a task of a worker that dies runs again
engine = sa.create_engine(os.environ.get("DATABASE_URL", "sqlite:///shop.db"), connect_args={"timeout": 60})


class Base(DeclarativeBase):
    """The tables of the shop."""


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)


class Shipment(Base):
    __tablename__ = "shipments"
    order_id: Mapped[str] = mapped_column(primary_key=True)


def make_tables() -> None:
    Base.metadata.create_all(engine)
    outbox.migrate(engine)


@app.task(ignore_result=True)
def ship(order_id: str) -> None:
    with Session(engine) as session, session.begin():
        if session.get(Shipment, order_id) is None:  # its primary key makes a second run harmless
            session.add(Shipment(order_id=order_id))


def place(order_id: str, die: str = "") -> None:
    """Place an order, or die (SIGKILL) before or after the commit."""
    with Session(engine) as session, session.begin():
        session.add(Order(id=order_id))
        with atomic(session):
            ship.delay(order_id)
        if die == "before":
            os.kill(os.getpid(), signal.SIGKILL)
    if die == "after":
        os.kill(os.getpid(), signal.SIGKILL)
