"""An app for ``escrowmq work``: one handler writes a row per message into the database EFFECTS_URL."""

import os

import sqlalchemy as sa
from handler_world import effects

from escrowmq.handlers import App
from escrowmq.outbox.engines import open_locking

engine = open_locking(os.environ["EFFECTS_URL"])
app = App()


@app.handler("orders", group="cart", once=engine, concurrency=2, retry_backoff=0.05, retry_backoff_max=0.5, lease=3.0)
def add(body: str, connection: sa.Connection) -> None:
    connection.execute(sa.insert(effects).values(id=body))
