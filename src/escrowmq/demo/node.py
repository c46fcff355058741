"""One process of the demo: ``python -m escrowmq.demo.node ROLE CONFIG.json``.

It speaks in JSON lines on its standard output, and ends when its standard input does: when the director says so, and
also when the director is gone.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from escrowmq.connecting import connect
from escrowmq.demo.services import KINDS, Service
from escrowmq.demo.shop import GROUP, OrdersDatabase, Shop
from escrowmq.platform.logs import EVENTS
from escrowmq.settings import BrokerSettings

_VOICE = threading.Lock()
_ASKED_TO_END = threading.Event()


def tell(event: str, **details: Any) -> None:
    """Send one event to the director. At a failpoint nothing comes after it: the thread waits for the process to be
    killed."""
    line = json.dumps({"event": event, **details})
    with _VOICE:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    if event == "at failpoint":
        threading.Event().wait()


def when_asked_to_end(call: Callable[[], None]) -> None:
    """Have ``call`` made once the director asks the process to end."""

    def wait() -> None:
        _ASKED_TO_END.wait()
        call()

    threading.Thread(target=wait, daemon=True).start()


class TellsWhoLeads(logging.Handler):
    """Hears what the broker tells operators, and has the director know when it leads."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line of the broker's log."""
        facts = getattr(record, "facts", {})
        if facts.get("event") == "leads":
            tell("leads", epoch=facts["epoch"])


def broker(config: dict[str, Any]) -> None:
    """Run the broker as ``escrowmq serve`` does, on a loopback port (0: a free one); with a log in Kafka, one of
    those that share it."""
    from escrowmq.broker.serving.serve import serve  # only this process needs it, and a restart should be quick

    replication = None
    if "log" in config:
        from escrowmq.broker.serving.brokers import Replication
        from escrowmq.log.kafka.cluster.opening import open_partitions

        logging.getLogger(EVENTS).addHandler(TellsWhoLeads())
        replication = Replication(lambda: open_partitions(config["log"]), replicas=config["replicas"])
    serve(
        Path(config["folder"]),
        listen=f"127.0.0.1:{config['port']}",
        settings=BrokerSettings.of(config["settings"]),
        announce=lambda ready: tell("ready", url=ready["url"]),
        stop=_ASKED_TO_END,
        replication=replication,
    )


def shop(config: dict[str, Any]) -> None:
    """Run the shop: place what is not yet placed, then stay to answer check-backs."""
    database = OrdersDatabase(Path(config["folder"]) / "orders.db")
    placed = database.placed()
    done = placed | set(config["cancelled"])
    orders = [o for o in pq.read_table(config["orders"]).to_pylist() if o["order_id"] not in done]
    with connect(config["url"]) as bus, bus.producer(GROUP, instance="shop-1") as producer:
        open_shop = Shop(producer, database, tell)
        when_asked_to_end(open_shop.stop)
        tell("ready", placed=sorted(placed))
        open_shop.serve(orders, config["tills"], set(config["stop_at"]))
        tell("done")
        _ASKED_TO_END.wait()
    database.close()


def service(config: dict[str, Any]) -> None:
    """Run the cart or the points service."""
    kind = KINDS[config["kind"]]
    effects = Service(kind, Path(config["folder"]))
    with connect(config["url"]) as bus, bus.consumer(kind.name, [kind.topic]) as consumer:
        when_asked_to_end(consumer.close)
        tell("ready", number=effects.applied())
        effects.run(consumer.batches(max_messages=500), tell, config["stop_after"])
    effects.close()


ROLES = {"broker": broker, "shop": shop, "service": service}


def main(role: str, config: str) -> None:
    """Run a role until the standard input ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")

    def listen() -> None:
        sys.stdin.read()
        _ASKED_TO_END.set()

    threading.Thread(target=listen, name="director", daemon=True).start()
    ROLES[role](json.loads(Path(config).read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
