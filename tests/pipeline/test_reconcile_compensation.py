"""The Spark difference of a compensation's topics finds what its scheduler finds, and nothing once that has run
(docs/compensation.md).
"""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql import SparkSession
from typer.testing import CliRunner

import escrowmq as mq
from escrowmq import compensation, outbox
from escrowmq.cli.main import app
from escrowmq.errors import Code

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark")]

PAGE = Path(__file__).parents[2] / "docs" / "compensation.md"


def missing(url: str) -> set[str]:
    """What the page's command says, at another address and of all times."""
    (line,) = re.findall(r"^escrowmq reconcile .*$", PAGE.read_text(), re.MULTILINE)
    words = shlex.split(line.replace("escrow://127.0.0.1:7700", url).replace("--grace 10min", ""))[1:]
    done = CliRunner().invoke(app, [*words, "--json", "--settled-before", "2100-01-01"])
    assert done.exit_code in (0, 1), done.output
    told = json.loads(done.stdout)
    assert {one["kind"] for one in told["named"]} <= {"missing"}
    assert told["missing"] == len(told["named"])
    return {one["id"] for one in told["named"]}


def in_all(count: int, act: Callable[[], int]) -> None:
    """Repeat until it has done so many: each time it ends when nothing came for a moment."""
    done = 0
    while done < count:
        done += act()
    assert done == count


@pytest.mark.invariant("I48")
def test_spark_and_the_scheduler_find_the_same(spark: SparkSession, tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'data'}"
    engine = sa.create_engine(f"sqlite:///{tmp_path / 'business.db'}")
    outbox.migrate(engine)
    done: list[bytes] = []

    def put(session: Any, message: Any) -> None:
        done.append(message.message_id)

    with mq.connect(url) as bus:
        producer = bus.producer("shop", unasked=True)
        way = compensation.Announcing(producer, database=engine, announce="direct", by=bus.producer("keys"))
        sent = [way.send(mq.Message("orders", b"%d" % n, key=f"o-{n}"), lambda session: None).check() for n in range(8)]
        way.send(mq.Message("orders", b"back"), lambda session: 1 / 0)
        way.commit = lambda prepared: (Code.SENT,) * len(prepared.ids)  # type: ignore[method-assign]  # lost on their way
        lost = [way.send(mq.Message("orders", b"lost"), lambda session: None).check() for _ in range(3)]
        sets = compensation.open_sets(engine, "cart")
        with bus.consumer("cart", "orders") as consumer:
            in_all(len(sent), lambda: compensation.consume(consumer, engine, sets, put, idle_timeout=0.5))
        keys = compensation.HalfSetConsumer(bus, "order-keys", engine, sets)
        in_all(len(sent + lost), lambda: keys.run(idle_timeout=0.5))
        taken = sets.take(time.time_ns() // 1000 + 10**9, 1000, 0.001)
        assert taken is not None
    assert missing(url) == {identity.hex() for identity in taken.ids} == {one.unique_keys[0] for one in lost}
    with (
        mq.connect(url) as bus,
        compensation.Scheduler(
            bus, engine, sets, topics="orders", keys="order-keys", handler=put, grace=0
        ) as scheduler,
    ):
        while scheduler.run_once().adopted == 0:  # until the lease of what was taken has ended
            time.sleep(0.001)
    assert sorted(done) == sorted(one.ids[0] for one in sent + lost), "each once"
    assert missing(url) == set()
    sets.close()
    engine.dispose()
