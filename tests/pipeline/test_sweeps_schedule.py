"""Sweeps on a schedule: rows 3.16 and 3.18. One machine at a time has the turn, and a person hears what failed."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from sweeps_killing import EACH
from sweeps_world import SHARDS, world

from escrowmq.errors import Code, Misuse, Unknown
from escrowmq.pipeline.sweeps import Act, Swept, schedule
from escrowmq.pipeline.sweeps.schedule import Totals, keep_sweeping, seconds_to_turn, turn

NOTHING = {"orders": Swept({}, ())}
FAILED = {"orders": Swept({Act.SOLD: 2, Act.FAILED: 1}, (("t-7", "the stock is gone"),))}
PATIENT = 60.0


@pytest.fixture(autouse=True)
def _patient_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each delivery of an alarm counts, and is not given up because the machine stalls."""
    monkeypatch.setattr(schedule, "ALARM_SECONDS", PATIENT)


class Person:
    """Takes alarms over HTTP. ``refusals``: how many it answers with 503 first."""

    def __init__(self, refusals: int = 0) -> None:
        self.alarms: queue.Queue[dict[str, Any]] = queue.Queue()
        left = [refusals]
        alarms = self.alarms

        class Taking(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(503 if left[0] > 0 else 204)
                self.end_headers()
                if left[0] <= 0:
                    alarms.put({"type": self.headers["Content-Type"], **json.loads(body)})
                left[0] -= 1

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Taking)
        self.url = f"http://127.0.0.1:{self.server.server_port}/alarm"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


def empty(folder: Path) -> str:
    """Make a database without tables; its URL."""
    path = folder / "products.db"
    path.touch()
    return f"sqlite:///{path}"


@pytest.fixture
def person() -> Iterator[Person]:
    made = Person()
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgresql", "mariadb"])
def products(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return empty(tmp_path)
    return str(request.getfixturevalue("mariadb_url" if request.param == "mariadb" else "postgres_url"))


@contextmanager
def own_turn(url: str) -> Iterator[None]:
    """As soon as nobody else has it: a server takes a moment to notice that the connection that had it has ended."""
    while True:
        with turn(url) as mine:
            if mine:
                yield
                return


def test_one_has_the_turn_and_the_next_gets_it_afterwards(products: str) -> None:
    for _ in range(2):
        with own_turn(products), turn(products) as others:
            assert not others


def test_products_of_two_schemas_do_not_wait_for_each_other(postgres_url: str) -> None:
    other = sa.make_url(postgres_url).update_query_dict({"options": "-csearch_path=pg_catalog"})
    with own_turn(postgres_url), turn(other.render_as_string(hide_password=False)) as others:
        assert others


def test_what_another_sweeps_is_left_out(tmp_path: Path) -> None:
    url = empty(tmp_path)
    began, ends, stop = threading.Event(), threading.Event(), threading.Event()
    busy, idle = Totals(), Totals()

    def slowly() -> dict[str, Swept]:
        began.set()
        assert ends.wait(PATIENT)
        stop.set()
        return NOTHING

    thread = threading.Thread(target=keep_sweeping, args=(slowly, url, 3600.0, stop), kwargs={"totals": busy})
    thread.start()
    assert began.wait(PATIENT)
    over = threading.Event()
    keep_sweeping(pytest.fail, url, 3600.0, over, totals=idle, on_run=lambda found: over.set())
    ends.set()
    thread.join()
    assert (busy.runs, busy.left_out, idle.runs, idle.left_out) == (1, 0, 0, 1)


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (
            Unknown(Code.DISCONNECTED, "the orders are away"),
            "DISCONNECTED: the orders are away (it may have been applied; repeat with the same id)",
        ),
        (
            sa.exc.ProgrammingError("SELECT secret", {"it": "secret"}, Exception("no more\nconnections")),
            "no more connections",
        ),
        (RuntimeError("the gateway of Java has ended"), "the gateway of Java has ended"),
    ],
)
def test_it_goes_on_with_the_next_turn_whatever_broke_the_last_one_off(
    tmp_path: Path, person: Person, problem: Exception, told: str
) -> None:
    url, stop, totals, runs = empty(tmp_path), threading.Event(), Totals(), []

    def sweeps() -> dict[str, Swept]:
        runs.append(1)
        if len(runs) == 1:
            raise problem
        stop.set()
        return NOTHING

    keep_sweeping(sweeps, url, 0.02, stop, totals=totals, alarm=person.url)
    assert (totals.broken_off, totals.runs) == (1, 1)
    assert person.alarms.get(timeout=PATIENT) == {
        "type": "application/json",
        "event": "sweep.broken_off",
        "error": told,
    }


def test_an_error_after_the_signal_to_stop_alarms_nobody(tmp_path: Path, person: Person) -> None:
    """The signal of `timeout` and systemd ends Spark's Java process too, in the middle of a sweep."""
    stop, totals = threading.Event(), Totals()

    def sweeps() -> dict[str, Swept]:
        stop.set()
        raise RuntimeError("the gateway of Java has ended")

    keep_sweeping(sweeps, empty(tmp_path), 0.02, stop, totals=totals, alarm=person.url)
    assert (totals.broken_off, totals.runs, totals.alarms, person.alarms.empty()) == (0, 0, 0, True)


def test_no_further_turn_would_mend_a_misuse(tmp_path: Path) -> None:
    def sweeps() -> dict[str, Swept]:
        raise Misuse(Code.BAD_ARGUMENT, "no such column")

    with pytest.raises(Misuse, match="no such column"):
        keep_sweeping(sweeps, empty(tmp_path), 0.01, threading.Event())


def test_3_16_a_person_hears_of_each_row_that_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By an alarm, which is tried again where nobody takes it, and by the metrics."""
    stop, totals, person = threading.Event(), Totals(), Person(refusals=schedule.ALARM_TRIES - 1)

    def sweeps() -> dict[str, Swept]:
        stop.set()
        return FAILED

    try:
        keep_sweeping(sweeps, empty(tmp_path), 0.01, stop, totals=totals, alarm=person.url)
        assert person.alarms.get(timeout=PATIENT) == {
            "type": "application/json",
            "event": "sweep.failed",
            "failed": {"orders": 1},
            "rows": [{"sweep": "orders", "trans_id": "t-7", "error": "the stock is gone"}],
        }
    finally:
        person.close()
    stop.clear()
    keep_sweeping(sweeps, empty(tmp_path), 0.01, stop, totals=totals, alarm=person.url)
    assert "ALERT: the alarm could not be delivered" in caplog.text
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in schedule.collector(totals).collect()
        for sample in metric.samples
    }
    assert samples["escrowmq_sweep_waiting", "orders"] == 1
    assert samples["escrowmq_sweep_acts_total", "orders", Act.SOLD] == 4
    assert samples["escrowmq_sweep_alarms_total",] == samples["escrowmq_sweep_alarms_lost_total",] == 1


@given(st.integers(0, 1 << 52), st.floats(0.001, 1e6))
def test_turns_are_the_same_moments_on_every_machine(now_us: int, every: float) -> None:
    pause = seconds_to_turn(now_us, every)
    assert 0 < pause <= every + 1e-6
    assert (now_us + round(pause * 1e6)) % round(every * 1e6) == 0


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--every", "0s"], "--every 0"),
        (["--alarm", "file:///etc/passwd"], "--alarm file"),
        (["--metrics", "127.0.0.1:0"], "--metrics without --every"),
    ],
)
def test_words_that_make_no_sense(words: list[str], problem: str, tmp_path: Path) -> None:
    url = empty(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-m", "escrowmq", "sweep", "--orders", url, "--products", url, *words],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2
    assert problem in ran.stderr


@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_3_18_the_command_sweeps_by_itself_until_it_is_stopped(tmp_path: Path, person: Person) -> None:
    names = ["products", "warehouse", *(f"orders_{number}" for number in range(SHARDS))]
    with world([f"sqlite:///{tmp_path / name}.db" for name in names]) as shop:
        shop.fill(EACH)
        with shop.shop.products.begin() as connection:
            connection.execute(sa.text("UPDATE freezes SET state = 'released unsold' WHERE trans_id = 't-0000'"))
        databases = [word for url in shop.databases.orders for word in ("--orders", url)]
        words = ["sweep", *databases, "--products", shop.databases.products, "--only", "orders", "--json"]
        words += ["--every", "1s", "--alarm", person.url, "--metrics", "127.0.0.1:0"]
        running = subprocess.Popen(
            [sys.executable, "-m", "escrowmq", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert running.stdout is not None
            first, second = (json.loads(running.stdout.readline())["orders"] for _ in range(2))
            assert (first["acts"][Act.SOLD], first["acts"][Act.FAILED]) == (EACH - 1, 1)
            assert second["acts"] == {Act.FAILED: 1}
            for _ in range(2):
                assert [row["trans_id"] for row in person.alarms.get(timeout=PATIENT)["rows"]] == ["t-0000"]
            assert running.stderr is not None
            at = next(line for line in running.stderr if "metrics at" in line).partition("metrics at ")[2].split(";")[0]
            with urllib.request.urlopen(f"{at}/metrics") as answer:
                assert 'escrowmq_sweep_waiting{sweep="orders"} 1.0' in answer.read().decode()
        finally:
            running.send_signal(signal.SIGTERM)
            running.communicate()
        assert running.returncode == 0
