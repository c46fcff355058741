"""What waits in a database with 10^5 or (``--most 6``) 10^6 rows of each kind: milliseconds of the sums, the pages and
the filters that a person sees.

Outbox rows that wait for a person, of three causes; outbox rows that nobody sends; stuck rows of transactions that
their producer drives; cases of a compensation; marks of an inbox. A SQLite file in the bench's folder, or a database
made on the server of ``--server``. Statistics are not gathered (``ANALYZE``): a person does not wait until the database
has done so.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from _harness import Report, arguments

import escrowmq as mq
from escrowmq import outbox, overview
from escrowmq.compensation.cases import CaseState, list_cases
from escrowmq.outbox.dialects import database_now_us
from escrowmq.outbox.modes.journal import Stage
from escrowmq.outbox.tables import State
from escrowmq_lab.databases import databases, open_engine

REPEATS = 5
GOAL = "< 1000"
ERROR = (
    "CASE WHEN n % 1000 = 0 THEN 'a rare thing' WHEN n % 2 = 0 THEN 'timeout after 17 ms' ELSE 'no stock for order "
    "4711' END"
)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--most", type=int, default=5, help="10 to the power of this many rows of each kind")
    parser.add_argument("--server", help="URL of a server on which a database may be made; else a SQLite file")
    options = parser.parse_args()
    options.embedded = True
    report = Report("pages of a database", options)
    report.begin()
    with tempfile.TemporaryDirectory(prefix="escrowmq-bench-", dir=options.folder) as folder:
        place = databases(["pages_bench"], Path(folder) / "databases", options.server)
        with place as (url,), mq.connect(f"file:{Path(folder) / 'data'}") as bus:
            engine = open_engine(url)
            outbox.migrations.migrate(engine)
            took = time.perf_counter()
            fill(engine, 10**options.most)
            report.add("filling", "s", "-", [time.perf_counter() - took])
            measure(report, bus, engine)
            engine.dispose()
    report.end()


def measure(report: Report, bus: mq.Bus, engine: sa.Engine) -> None:
    """Each sum and page some times."""
    tell = lambda name, act: times_of(report, name, act)  # noqa: E731
    tell("what waits", lambda: overview.waiting(bus, [engine]))
    tell("how everything stands", lambda: overview.status(bus, [engine]))
    for state in (State.WAITING, State.PENDING, State.HELD, None):
        name = "any" if state is None else state.name
        tell(f"outbox list, {name}", lambda state=state: outbox.attention.list_messages(engine, state=state))
    middle = outbox.attention.list_messages(engine, state=None, limit=1)[0].seq
    with engine.connect() as connection:
        last = int(connection.scalar(sa.text("SELECT max(seq) FROM trans_message")) or 0)
    for state in (State.WAITING, State.PENDING):
        deep = (middle + last) // 2 if state is State.PENDING else last // 4
        tell(
            f"outbox list, {state.name}, deep",
            lambda state=state, deep=deep: outbox.attention.list_messages(engine, state=state, after=deep),
        )
    first = outbox.modes.list_stuck(engine, limit=1)[0].id
    tell("stuck list", lambda: outbox.modes.list_stuck(engine))
    tell("stuck list, of a group", lambda: outbox.modes.list_stuck(engine, "shop"))
    tell("stuck list, a state that none has", lambda: outbox.modes.list_stuck(engine, state=Stage.TO_SEND))
    tell("stuck list, deep", lambda: outbox.modes.list_stuck(engine, after=b"\x80" + first[1:]))
    tell("cases", lambda: list_cases(engine))
    tell("cases, of a compensation", lambda: list_cases(engine, "bank"))
    tell("cases, a state that none has", lambda: list_cases(engine, "bank", states={CaseState.CONFLICT}))
    tell("marks of the inbox", lambda: outbox.handled.list_marks(engine, "cart"))
    tell("acts", lambda: outbox.acts.list_acts(engine, newest=True))


def times_of(report: Report, name: str, act: Callable[[], Any]) -> None:
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        act()
        times.append((time.perf_counter() - begun) * 1e3)
    report.add(name, "ms", GOAL, times, most=max(times))


def fill(engine: sa.Engine, count: int) -> None:
    """So many rows in each table, and twice as many in the outbox."""
    with engine.begin() as connection:
        now_us = database_now_us(connection)
        old_us = now_us - 3_600_000_000
        for statement in _statements(engine.dialect.name, count, old_us):
            connection.execute(sa.text(statement))


def _statements(dialect: str, count: int, old_us: int) -> list[str]:
    numbers = {
        "sqlite": f"(WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c WHERE n < {count}) SELECT n FROM "
        "c) AS s",
        "postgresql": f"(SELECT n FROM generate_series(1, {count}) AS n) AS s",
    }.get(dialect, f"(SELECT seq AS n FROM seq_1_to_{count}) AS s")
    identity = {"sqlite": "randomblob(16)", "postgresql": "decode(md5(CAST(n AS text) || '{0}'), 'hex')"}.get(
        dialect, "UNHEX(MD5(CONCAT(n, '{0}')))"
    )
    body = {"sqlite": "zeroblob(100)", "postgresql": "decode(repeat('00', 100), 'hex')"}.get(
        dialect, "REPEAT('x', 100)"
    )
    message = (
        "INSERT INTO trans_message (id, lane, state, topic, body, delay_us, attempts, due_us, created_us, error) "
        "SELECT "
    )
    waiting, pending = State.WAITING.value, State.PENDING.value
    stuck, case = Stage.STUCK.value, CaseState.STUCK.value
    return [
        f"{message}{identity.format('w')}, n % 64, {waiting}, 'orders', {body}, 0, 16, 0, {old_us} + n, {ERROR} FROM "
        f"{numbers}",
        f"{message}{identity.format('p')}, n % 64, {pending}, 'orders', {body}, 0, 0, 0, {old_us} + n, NULL FROM "
        f"{numbers}",
        "INSERT INTO trans_driven (id, producer_group, state, topic, body, delay_us, attempts, created_us, was, "
        "reason) SELECT "
        f"{identity.format('d')}, 'shop', {stuck}, 'orders', {body}, 0, 3, {old_us} + n, {Stage.STORED.value}, "
        f"'CONFLICT' FROM {numbers}",
        "INSERT INTO trans_compensation_case (name, message_id, state, attempts, first_us, changed_us, reason) SELECT "
        f"'bank', {identity.format('c')}, {case}, 3, {old_us} + n, {old_us} + n, {ERROR} FROM {numbers}",
        "INSERT INTO trans_recv_log (consumer_group, message_id, seen_us, topic) SELECT 'cart', "
        f"{identity.format('m')}, {old_us} + n, 'orders' FROM {numbers}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
