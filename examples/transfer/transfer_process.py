"""One process of the example: ``python transfer_process.py ROLE CONFIG`` (JSON). It ends when its standard input does.

It tells on its standard output, a line each, when it is ready, and bank A when it has made the transfers it was asked
for.
"""

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import bank_a
import bank_b
import sqlalchemy as sa

import escrowmq as mq
from escrowmq.outbox import Barrier, CallbackListener
from escrowmq.outbox.relay import Relay
from escrowmq.outbox.targets.escrow import EscrowTarget
from escrowmq_lab.databases import open_engine

QUICK = {"transaction_timeout": 0.5, "check_interval": 0.5, "lease_seconds": 2.0, "retry_backoff": 0.1}
"""A killed process is replaced at once here, so nothing has to be waited for as long as in earnest."""
RELAY = {"workers": 1, "lease": 1.0, "poll_interval": 0.05, "backoff_max": 0.5}
UNTIL_CALLED_BACK = {"await_callback": True, "keep": 3600.0}
"""Messages stay in bank A's table until bank B's callback, and an hour longer: the auditor compares them with the
debits.
"""


def tell(word: str) -> None:
    print(word, flush=True)


def broker(config: dict[str, Any]) -> None:
    """EscrowMQ as ``escrowmq serve`` runs it."""
    from escrowmq.broker.serving.serve import serve  # only this process needs it, and the others should start quickly
    from escrowmq.settings import BrokerSettings

    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    serve(
        Path(config["folder"]) / "broker",
        listen=config["listen"],
        settings=BrokerSettings(**QUICK),
        announce=lambda told: tell(f"ready {told['url']}"),
        stop=stopped,
    )


def first_bank(config: dict[str, Any]) -> None:
    """Bank A: makes the transfers whose numbers come in on standard input, and hears when they have arrived."""
    bank = open_engine(config["bank_a"])
    with mq.connect(config["broker"]) as bus, ExitStack() as stack:
        if config["way"] == "outbox":
            consumer = bus.consumer("bank-a-callbacks", [bank_a.DONE])
            listener = CallbackListener(consumer, bank)
            stack.enter_context(in_background(listener.run, consumer.close))
            make = bank_a.send_by_outbox
        else:
            producer = bus.producer(bank_a.PRODUCERS, checker=Barrier(bank), timeout=5.0)

            def make(bank: sa.Engine, transfer: bank_a.Transfer) -> None:
                bank_a.send_by_barrier(bank, producer, transfer)

        tell("ready")
        for line in sys.stdin:
            first, end = map(int, line.split())
            for number in range(first, end):
                _surely(bank, make, transfer(number))
            tell(f"made {end}")


def _surely(bank: sa.Engine, make: Any, wanted: bank_a.Transfer) -> None:
    """Make a transfer, whatever the broker does; not a second time."""
    while not bank_a.was_made(bank, wanted):
        try:
            make(bank, wanted)
        except bank_a.Refused:
            return
        except (mq.EscrowError, sa.exc.DBAPIError) as problem:  # made or not: look, and try again
            logging.info("transfer %s: %s", wanted.transfer_id, problem)


def relay(config: dict[str, Any]) -> None:
    """Sends what is in bank A's message table."""
    bank = open_engine(config["bank_a"])
    with closing(EscrowTarget(config["broker"])) as target, Relay(bank, target, **UNTIL_CALLED_BACK, **RELAY):
        tell("ready")
        sys.stdin.read()


def second_bank(config: dict[str, Any]) -> None:
    """Bank B, and the relay for its callbacks."""
    bank = open_engine(config["bank_b"])
    calls_back = config["way"] == "outbox"
    with mq.connect(config["broker"]) as bus, ExitStack() as stack:
        if calls_back:
            target = stack.enter_context(closing(EscrowTarget(config["broker"])))
            stack.enter_context(Relay(bank, target, **RELAY))
        consumer = bus.consumer(bank_b.CONSUMERS, [bank_a.TRANSFERS])
        stack.enter_context(in_background(lambda: bank_b.receive(bank, consumer, calls_back), consumer.close))
        tell("ready")
        sys.stdin.read()


def transfer(number: int) -> bank_a.Transfer:
    """Transfer ``number``: always the same one."""
    return bank_a.Transfer(f"t-{number:07d}", f"A{number % 5}", f"B{number % 3}", 1000)


@contextlib.contextmanager
def in_background(work: Any, stop: Any) -> Iterator[None]:
    """Run ``work`` beside the block; at its end ``stop`` it. If it fails, so does the process."""

    def run() -> None:
        try:
            work()
        except BaseException:
            logging.exception("this process cannot go on")
            os._exit(1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join()


ROLES = {"broker": broker, "bank-a": first_bank, "relay": relay, "bank-b": second_bank}

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    ROLES[sys.argv[1]](json.loads(sys.argv[2]))
