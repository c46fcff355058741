"""``escrowmq sql``: topics, system views and what groups get, as tables of DuckDB."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from cli_runs import Run, Served

import escrowmq as mq
import escrowmq.sql
from escrowmq.errors import Code, EscrowError
from escrowmq.sql import query, stream

GROUPED = 'select tag, count(*) "n" from orders group by 1 order by 1'
COUNTS = [{"tag": "a", "n": 2}, {"tag": "b", "n": 1}]


def fill(url: str) -> None:
    with mq.connect(url) as bus:
        bus.admin.create_topic("orders", 2)
        producer = bus.producer("shop")
        for number, tag in enumerate("aba"):
            producer.send("orders", b"body %d" % number, key=str(number), tag=tag)
        bus.producer("later", checker=lambda check: mq.UNKNOWN).prepare("orders", b"\xff", key="half")


def refusal(url: str, sql: str) -> EscrowError:
    with pytest.raises(EscrowError) as problem:
        query(url, sql)
    return problem.value


def test_a_topic_and_a_view_of_a_folder(run: Run, url: str) -> None:
    fill(url)
    assert run("sql", GROUPED, "--json").lines == COUNTS
    assert "tag" in run("sql", GROUPED).out
    assert run("sql", 'select key, state, body from "%half"', "--json").lines == [
        {"key": "half", "state": "open", "body": "ff"}
    ]
    rest = run("sql", "select count(*) n from orders a join orders b using (key) where a.tag = 'a'", "--json")
    assert rest.lines == [{"n": 2}], "a table is read as often as it is named"
    cut = run("sql", "select key from orders order by key", "--json", "--limit", "2")
    assert cut.lines == [{"key": "0"}, {"key": "1"}]
    assert "the first 2 rows" in cut.err
    assert "--limit" not in run("sql", "select key from orders", "--limit", "3").err


def test_a_result_is_streamed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from escrowmq.spark import brokers

    fill(url)
    read, reads = brokers.read, itertools.count()

    def read_forever(*arguments: Any) -> Iterator[pa.RecordBatch]:
        [batch] = read(*arguments)
        while True:
            next(reads)
            yield batch

    monkeypatch.setattr(brokers, "read", read_forever)
    with stream(url, "select key from orders") as found:
        assert {key for batch in itertools.islice(found, 3) for key in batch["key"].to_pylist()} <= {"0", "1", "2"}


def test_a_query_that_needs_too_much_memory_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(url)
    monkeypatch.setitem(escrowmq.sql._CONFIG, "memory_limit", "20MB")
    problem = refusal(url, "select range, hash(range) from range(10000000), orders order by 2")
    assert (problem.code, "WHERE before sorting" in str(problem)) == (Code.BAD_ARGUMENT, True)


def test_a_broker(run: Run, serve: Callable[..., Served]) -> None:
    url = serve().url
    fill(url)
    assert run("sql", GROUPED, "--json", "--url", url).lines == COUNTS


def test_rows_are_whole_and_only_what_is_needed_is_read(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from escrowmq.spark import brokers

    fill(url)
    asked: list[list[str]] = []
    read = brokers.read
    monkeypatch.setattr(brokers, "read", lambda one, columns, *rest: asked.append(columns) or read(one, columns, *rest))
    assert query(url, GROUPED).to_pylist() == COUNTS
    assert {tuple(columns) for columns in asked} == {("tag",)}
    found = query(url, "from orders order by key")
    assert found["body"].to_pylist() == [b"body 0", b"body 1", b"body 2"]
    assert found.schema.field("stored").type == pa.timestamp("us")
    assert query(url, "describe orders").num_rows == found.num_columns
    [newest] = query(url, "with o as (from orders) select max(stored) from o")[0].to_pylist()
    assert newest == max(found["stored"].to_pylist())


def test_what_a_group_gets_after_operator_actions(url: str) -> None:
    fill(url)
    with mq.connect(url) as bus:
        with bus.consumer("cart", ["orders"], start="earliest") as consumer:
            for message in itertools.islice(consumer, 3):
                message.reject("broken")
        one, two, _ = sorted(bus.admin.dead_letters("cart"), key=lambda row: row["key"])
        bus.admin.discard_dead_letters("cart", [one])
        bus.admin.edit_dead_letter("cart", two, body=b"mended")
    side = 'select key, body from "group:cart/orders" order by key'
    assert [tuple(row.values()) for row in query(url, side).to_pylist()] == [("1", b"mended"), ("2", b"body 2")]
    assert query(url, 'select count(*) from "group:other/orders"')[0].to_pylist() == [3]
    assert query(url, "select count(*) from orders")[0].to_pylist() == [3]


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("from ordres", Code.UNKNOWN_TOPIC),
        ('from "%hafl"', Code.BAD_SETTING),
        ('from "%dead-letters.nobody"', Code.UNKNOWN_GROUP),
        ('from "group:cart"', Code.BAD_ARGUMENT),
        ('from "group:cart/ordres"', Code.UNKNOWN_TOPIC),
        ("select nothing from orders", Code.BAD_ARGUMENT),
        ("from or-ders", Code.BAD_ARGUMENT),
        ("selec 1", Code.BAD_ARGUMENT),
        ("", Code.BAD_ARGUMENT),
        ("select 1; select 2", Code.BAD_ARGUMENT),
        ("create table x (a int)", Code.BAD_ARGUMENT),
        ("copy (from orders) to 'file.csv'", Code.BAD_ARGUMENT),
        ("set threads = 1", Code.BAD_ARGUMENT),
        ("from read_csv('/etc/passwd')", Code.BAD_ARGUMENT),
        ("from '/etc/passwd'", Code.UNKNOWN_TOPIC),
    ],
)
def test_a_query_that_cannot_be_answered(url: str, sql: str, code: Code) -> None:
    fill(url)
    assert refusal(url, sql).code is code


def test_a_variable_of_a_program_is_no_table(url: str) -> None:
    fill(url)
    hidden = pa.table({"a": [1]})
    assert refusal(url, "from hidden").code is Code.UNKNOWN_TOPIC
    assert hidden.num_rows == 1


def test_without_the_extra_the_error_names_it(run: Run, made: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    monkeypatch.delitem(sys.modules, "escrowmq.sql", raising=False)
    failed = run("sql", "select 1")
    assert failed.code == 2
    assert "MISSING_PACKAGE" in failed.err
    assert "escrowmq[sql]" in failed.err


def test_neither_spark_nor_java_is_needed() -> None:
    program = "import sys, escrowmq.sql; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
