"""A shop: a FastAPI service that places orders, and a handler in the same process that clears carts.

An order and its message are one transaction (the outbox); a cleared cart and the mark of the message are one, too
(``once=``). So the process can die anywhere.
"""

from __future__ import annotations

import os

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from escrowmq import outbox
from escrowmq.handlers import App
from escrowmq.outbox.engines import open_locking

engine = open_locking(os.environ["SHOP_DATABASE"])


class Base(DeclarativeBase):
    pass


class PlacedOrder(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]


class ClearedCart(Base):
    __tablename__ = "cleared_carts"  # without a unique order: a second effect would be a second row
    number: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[str]


class Order(BaseModel):
    id: str
    customer: str


Base.metadata.create_all(engine)
outbox.migrate(engine)
handlers = App()
app = FastAPI(title="shop", lifespan=handlers.lifespan(relay=engine))


@handlers.handler("orders", group="cart", once=engine)
def clear_cart(order: Order, session: Session) -> None:
    session.add(ClearedCart(order=order.id))


@app.post("/orders", status_code=201)
def place(order: Order) -> Order:
    try:
        with Session(engine) as session, session.begin():
            session.add(PlacedOrder(id=order.id, customer=order.customer))
            outbox.send_tx(session, "orders", order.model_dump_json().encode(), key=order.id)
    except IntegrityError:
        raise HTTPException(409, f"there is an order {order.id} already") from None
    return order


@app.get("/healthz")
def healthz() -> dict[str, str]:
    return {"status": "ok"}
