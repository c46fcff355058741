"""Place an order and announce it: both happen, or neither, wherever the program is killed."""

import os

import sqlalchemy as sa

import escrowmq as mq
from escrowmq import outbox

shop = sa.create_engine("sqlite:///shop.db")
outbox.migrate(shop)  # the barrier's table
orders = sa.Table("orders", sa.MetaData(), sa.Column("id", sa.String(8), primary_key=True))
orders.create(shop, checkfirst=True)
with mq.connect("file:data", transaction_timeout=20) as bus:  # the broker, in this process
    producer = bus.producer("shop", checker=outbox.Barrier(shop))
    with producer.transaction() as txn:
        order = os.urandom(4).hex()
        txn.send("orders", b"one book", key=order)  # durable, and invisible
        with shop.begin() as connection:
            connection.execute(orders.insert(), {"id": order})
            outbox.bind_tx(connection, txn)
        input(f"{order} is ordered, its message is in escrow: kill -9 {os.getpid()}, or press Enter ")
    for message in bus.consumer("cart", ["orders"]).messages(idle_timeout=20):
        print("received:", message.key)
        message.ack()
