"""One process of the demo: ``python -m escrowmq.demo.node ROLE CONFIG.json``. It writes JSON lines to its standard
output, and ends when its standard input is closed: by the director, or by the director's death."""

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

_OUTPUT_LOCK = threading.Lock()
_STOPPING = threading.Event()


def report(event: str, **details: Any) -> None:
    """Send one event to the director. At a failpoint this never returns: the process will be killed."""
    line = json.dumps({"event": event, **details})
    with _OUTPUT_LOCK:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    if event == "at failpoint":
        threading.Event().wait()


def on_stop_request(call: Callable[[], object]) -> None:
    """Call ``call`` when the director requests the process to stop."""
    threading.Thread(target=lambda: _STOPPING.wait() and call(), daemon=True).start()


class LeaderReporter(logging.Handler):
    """A log handler that notifies the director when the broker becomes leader."""

    def emit(self, record: logging.LogRecord) -> None:
        """Handle one record of the broker's log."""
        facts = getattr(record, "facts", {})
        if facts.get("event") == "leads":
            report("leads", epoch=facts["epoch"])


def broker(config: dict[str, Any]) -> None:
    """Run the broker like ``escrowmq serve``, on a loopback port (0: a free one); with a log in Kafka, as a replica."""
    from escrowmq.broker.serving.serve import serve  # only this process needs it, and a restart should be quick

    replication = None
    if "log" in config:
        from escrowmq.broker.serving.brokers import Replication
        from escrowmq.log.kafka.cluster.opening import open_partitions

        logging.getLogger(EVENTS).addHandler(LeaderReporter())
        replication = Replication(lambda: open_partitions(config["log"]), replicas=config["replicas"])
    serve(
        Path(config["folder"]),
        listen=f"127.0.0.1:{config['port']}",
        settings=BrokerSettings.of(config["settings"]),
        announce=lambda ready: report("ready", url=ready["url"]),
        stop=_STOPPING,
        replication=replication,
    )


def shop(config: dict[str, Any]) -> None:
    """Run the shop: place the remaining orders, then answer check-backs."""
    database = OrdersDatabase(Path(config["folder"]) / "orders.db")
    placed = database.placed()
    done = placed | set(config["cancelled"])
    orders = [o for o in pq.read_table(config["orders"]).to_pylist() if o["order_id"] not in done]
    with connect(config["url"]) as bus, bus.producer(GROUP, instance="shop-1") as producer:
        open_shop = Shop(producer, database, report)
        on_stop_request(open_shop.stop)
        report("ready", placed=sorted(placed))
        open_shop.serve(orders, config["tills"], set(config["stop_at"]))
        report("done")
        _STOPPING.wait()
    database.close()


def service(config: dict[str, Any]) -> None:
    """Run the cart or the points service."""
    kind = KINDS[config["kind"]]
    effects = Service(kind, Path(config["folder"]))
    with connect(config["url"]) as bus, bus.consumer(kind.name, [kind.topic]) as consumer:
        on_stop_request(consumer.close)
        report("ready", number=effects.applied())
        effects.run(consumer.batches(max_messages=500), report, config["stop_after"])
    effects.close()


ROLES = {"broker": broker, "shop": shop, "service": service}


def main(role: str, config: str) -> None:
    """Run a role until the standard input ends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")

    def listen() -> None:
        sys.stdin.read()
        _STOPPING.set()

    threading.Thread(target=listen, name="director", daemon=True).start()
    ROLES[role](json.loads(Path(config).read_text()))


if __name__ == "__main__":
    main(*sys.argv[1:])
