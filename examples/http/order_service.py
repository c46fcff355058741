"""The order service: a FastAPI application with a database of its own, and no connection to the broker but short HTTP
requests.

Placing an order is: prepare the message, run the local transaction, commit the message. Should the process die in
between, the gateway asks at ``/escrow/checks``, and the database answers.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import httpx
import sqlalchemy as sa
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from escrowmq import Outcome, outbox
from escrowmq.errors import Denied, EscrowError, Fenced
from escrowmq.gateway import ReplayGuard, sign_answer, verify

GROUP = "shop"
WORDS = {Outcome.COMMIT: "committed", Outcome.ROLLBACK: "rolled back", Outcome.UNKNOWN: "in progress"}


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)
    customer: Mapped[str]


class NewOrder(BaseModel):
    id: str
    customer: str
    crash: str | None = None  # of the demonstration: "before-commit" or "after-commit"


class Escrow:
    """The three requests of a transaction."""

    def __init__(self, gateway: str) -> None:
        self._http = httpx.Client(base_url=f"{gateway}/v1/groups/{GROUP}", trust_env=False, timeout=30)

    def prepare(self, order: NewOrder) -> str:
        message = {"topic": "orders", "key": order.id, "text": json.dumps({"id": order.id, "customer": order.customer})}
        return str(self._done(self._http.post("/transactions", json={"messages": [message]}))["transaction_id"])

    def end(self, transaction: str, act: str) -> None:
        self._done(self._http.post(f"/transactions/{transaction}/{act}"))

    @staticmethod
    def _done(answer: httpx.Response) -> dict[str, str]:
        if answer.status_code != 200:
            raise HTTPException(503, f"the broker says {answer.json()['name']}", {"Retry-After": "1"})
        return answer.json()


def make(database: str, gateway: str, secret: str) -> FastAPI:
    engine = sa.create_engine(database)
    Base.metadata.create_all(engine)
    outbox.migrate(engine)
    barrier, guard, escrow = outbox.Barrier(engine), ReplayGuard(), Escrow(gateway)
    app = FastAPI(title="orders")

    @app.post("/orders", status_code=201)
    def place(order: NewOrder) -> NewOrder:
        transaction = escrow.prepare(order)  # durable, and nobody sees it
        if order.crash == "before-commit":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            with Session(engine) as session, session.begin():
                session.add(Order(id=order.id, customer=order.customer))
                outbox.bind_tx(session, transaction)  # stands and falls with the order
        except sa.exc.IntegrityError:
            escrow.end(transaction, "rollback")
            raise HTTPException(409, f"there is an order {order.id} already") from None
        except Fenced:  # the check-back was quicker, and has answered "rolled back": nothing was written
            raise HTTPException(503, "that took too long", {"Retry-After": "1"}) from None
        if order.crash == "after-commit":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            escrow.end(transaction, "commit")
        except (HTTPException, httpx.HTTPError):
            pass  # the order stands; the check-back brings its message out
        return order

    @app.post("/escrow/checks")
    async def checks(request: Request) -> Response:
        body = await request.body()
        try:
            verify(secret, request.headers, body, guard=guard)
        except Denied as problem:
            raise HTTPException(401, problem.message) from None
        outcomes = await run_in_threadpool(decide, json.loads(body)["transactions"])
        answer = json.dumps({"outcomes": outcomes}).encode()
        return Response(answer, 200, sign_answer(secret, request.headers, answer), "application/json")

    def decide(asked: list[dict[str, str]]) -> dict[str, str]:
        outcomes = {}
        for one in asked:
            try:
                word = WORDS[barrier.decide(one["transaction_id"])]
            except (EscrowError, sa.exc.SQLAlchemyError):
                word = "in progress"
            print(f"asked over HTTP what became of a transaction: {word}", flush=True)
            outcomes[one["transaction_id"]] = word
        return outcomes

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    return app


if __name__ == "__main__":
    folder, port = sys.argv[1:]
    service = make(f"sqlite:///{folder}/orders.db", os.environ["GATEWAY"], os.environ["CHECK_SECRET"])
    uvicorn.run(service, host="127.0.0.1", port=int(port), log_level="warning")
