"""Celery's own worker on EscrowMQ: real processes, killed and stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery_world import TimedBroker, Workers, until

import escrowmq as mq
from escrowmq_lab.servers.process import Server

Make = Callable[..., Workers]
LEASE = 60.0
STEP = 20.0
TASK_SECONDS = 30 * 60.0


def send(workers: Workers, *calls: dict[str, Any], **conf: Any) -> None:
    """Send tasks from another process, as a web application does: ``task`` with the arguments of ``apply_async``."""
    program = "import json, sys, tasks_app\nfor call in json.loads(sys.argv[1]):\n"
    program += "    getattr(tasks_app, call.pop('task')).apply_async(**call)"
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(calls)],
        env=workers.environment(**conf),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def counts(url: str, group: str = "celery") -> dict[str, int]:
    """How many messages of a group are in which state."""
    with mq.connect(url) as bus:
        queues = [queue for one in bus.admin.groups() if one["name"] == group for queue in one["queues"]]
    states = ("waiting", "leased", "retrying", "dead", "acked")
    return {state: sum(queue[state] for queue in queues) for state in states}  # type: ignore[literal-required]


def settled(url: str) -> bool:
    found = counts(url)
    return found["acked"] > 0 and not found["waiting"] + found["leased"] + found["retrying"]


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_every_task_runs_once_and_the_worker_is_controlled(broker: Server, make_workers: Make, pool: str) -> None:
    workers = make_workers(broker.url)
    names = [f"t{number}" for number in range(20)]
    send(workers, *({"task": "note", "args": [name]} for name in names))
    send(workers, {"task": "retry", "args": ["again"]}, {"task": "note", "args": ["later"], "countdown": 1})
    worker = workers.start(pool, 2)
    workers.wait_for(*(f"ended {name}" for name in names), "ended later", "tried again 2")
    asked = "import json, tasks_app; inspect = tasks_app.app.control.inspect(timeout=60, limit=1)\n"
    asked += "print(json.dumps([inspect.ping(), list(inspect.active_queues()['w0@here'])]))"
    found = subprocess.run(
        [sys.executable, "-c", asked], env=workers.environment(), capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    ping, queues = json.loads(found.stdout)
    assert ping == {"w0@here": {"ok": "pong"}}
    assert [queue["name"] for queue in queues] == ["celery"]
    until(lambda: settled(broker.url), "nothing left")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait() == 0
    ran = [line for line in workers.told() if line.startswith("began")]
    assert sorted(ran) == sorted(f"began {name}" for name in [*names, "later"])
    assert counts(broker.url)["acked"] == 20 + 1 + 3  # a retry is a message of its own


def test_a_task_of_thirty_minutes_runs_once_with_a_lease_of_one(
    timed_broker: TimedBroker, make_workers: Make, tmp_path: Path
) -> None:
    """Another worker waits for work all the time."""
    workers = make_workers(timed_broker.url, lease=LEASE, extend_every=0.02)
    end = tmp_path / "end"
    send(workers, {"task": "late", "args": ["long", str(end)]})
    for _ in range(2):
        workers.start()
    workers.wait_for("began long")
    for number in range(2):
        workers.wait_until_ready(number)
    clock, passed = timed_broker.clock, 0.0
    while passed < TASK_SECONDS:
        now = clock.advance(STEP)
        passed += STEP
        extended = now + (LEASE - 1) * 1e6
        until(lambda: [x for x in timed_broker.deadlines("celery") if x >= extended], "an extended lease")
    end.touch()
    workers.wait_for("ended long")
    until(lambda: settled(timed_broker.url), "nothing left")
    clock.advance(10 * LEASE)
    send(workers, {"task": "note", "args": ["after"]})
    workers.wait_for("ended after")
    assert workers.told().count("began long") == 1
    assert counts(timed_broker.url)["acked"] == 2


def test_without_extensions_it_would_run_twice(timed_broker: TimedBroker, make_workers: Make, tmp_path: Path) -> None:
    """So the test above can fail."""
    workers = make_workers(timed_broker.url, lease=LEASE, extend_every=1e6)
    end = tmp_path / "end"
    send(workers, {"task": "late", "args": ["long", str(end)]})
    for _ in range(2):
        workers.start()
    workers.wait_for("began long")

    def ran_twice() -> bool:
        timed_broker.clock.advance(STEP)
        return workers.told().count("began long") == 2

    until(ran_twice, "a second run")
    end.touch()


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_the_late_task_of_a_killed_worker_runs_again(
    broker: Server, make_workers: Make, pool: str, tmp_path: Path
) -> None:
    workers = make_workers(broker.url, lease=2.0)
    first = workers.start(pool)
    send(workers, {"task": "late", "args": ["late", str(tmp_path / "end")]}, {"task": "note", "args": ["prefetched"]})
    workers.wait_for("began late")
    workers.kill(first)
    workers.options["lease"] = 3600.0  # the second worker keeps what it has, however long it stands still
    (tmp_path / "end").touch()
    workers.start(pool)
    workers.wait_for("ended late", "ended prefetched")
    until(lambda: settled(broker.url), "nothing left")
    assert [workers.told().count(line) for line in ("began late", "ended late", "ended prefetched")] == [2, 1, 1]


@pytest.mark.parametrize("pool", ["solo", "prefork"])
def test_a_graceful_stop_returns_what_was_not_started(
    broker: Server, make_workers: Make, pool: str, tmp_path: Path
) -> None:
    """The lease is an hour: only a return lets the next worker have them."""
    workers = make_workers(broker.url, lease=3600.0)
    first = workers.start(pool, 1, worker_prefetch_multiplier=4)
    late = [f"t{number}" for number in range(8)]
    send(workers, *({"task": "late", "args": [name, str(tmp_path / "end")]} for name in late))
    workers.wait_for("began t0")
    first.send_signal(signal.SIGTERM)
    until(lambda: "Warm shutdown" in workers.log(), "a worker that stops")
    (tmp_path / "end").touch()
    assert first.wait() == 0
    left = counts(broker.url)
    assert left["leased"] == 0
    assert left["acked"] >= 1
    workers.start(pool)
    workers.wait_for(*(f"ended {name}" for name in late))
    until(lambda: settled(broker.url), "nothing left")
    assert sorted(line for line in workers.told() if line.startswith("ended")) == [f"ended {name}" for name in late]


def test_what_is_rejected_or_unknown_is_a_dead_letter(broker: Server, make_workers: Make) -> None:
    workers = make_workers(broker.url)
    send(workers, {"task": "refuse", "args": ["bad"]}, {"task": "requeue", "args": ["busy"]})
    unknown = "import tasks_app; tasks_app.app.send_task('nobody.knows.it', task_id='id-of-it')"
    subprocess.run([sys.executable, "-c", unknown], env=workers.environment(), check=True)
    with mq.connect(broker.url) as bus, bus.consumer("celery", "celery", max_attempts=3):
        pass
    workers.start()
    until(lambda: counts(broker.url)["dead"] == 3, "three dead letters")
    assert workers.told().count("refused bad") == 1
    assert workers.told().count("requeued busy") == 3
    with mq.connect(broker.url) as bus:
        letters = list(bus.admin.dead_letters("celery"))
        assert all("rejected by the worker" in letter["cause"] for letter in letters)
        shown = [bus.admin.lookup(message_id=letter["message_id"])[0]["properties"] for letter in letters]
        assert {"task": "nobody.knows.it", "id": "id-of-it"} in [dict(one) for one in shown]
        again = [letter for letter in letters if letter["attempts"] == 3]
        assert bus.admin.retry_dead_letters("celery", again) == 1
    until(lambda: workers.told().count("requeued busy") == 6, "three more attempts")


def test_a_task_that_kills_its_process_is_a_dead_letter_in_the_end(broker: Server, make_workers: Make) -> None:
    workers = make_workers(broker.url)
    with mq.connect(broker.url) as bus, bus.consumer("celery", "celery", max_attempts=3):
        pass
    send(workers, {"task": "die", "args": ["poison"]}, {"task": "late", "args": ["neighbour"]})
    workers.start("prefork", 2)
    until(lambda: counts(broker.url)["dead"] == 1, "a dead letter")
    workers.wait_for("ended neighbour")
    assert workers.told().count("died poison") == 3


def test_a_busy_worker_holds_no_more_than_its_prefetch(broker: Server, make_workers: Make, tmp_path: Path) -> None:
    workers = make_workers(broker.url, lease=3600.0)
    for _ in range(2):
        workers.start(worker_prefetch_multiplier=1)
    for number in range(2):
        workers.wait_until_ready(number)
    names = ["a", "b"]
    send(workers, *({"task": "late", "args": [name, str(tmp_path / "end")]} for name in names))
    workers.wait_for("began a", "began b")  # neither waits behind the other
    send(workers, {"task": "late", "args": ["c", str(tmp_path / "end")]})
    assert counts(broker.url)["waiting"] == 1
    (tmp_path / "end").touch()
    workers.wait_for("ended c")


def test_a_broker_that_restarts_interrupts_nothing(broker: Server, make_workers: Make, tmp_path: Path) -> None:
    workers = make_workers(broker.url)
    worker = workers.start("prefork", 1)
    send(workers, {"task": "late", "args": ["long", str(tmp_path / "end")]})
    workers.wait_for("began long")
    broker.kill()
    broker.start()
    (tmp_path / "end").touch()
    send(workers, {"task": "note", "args": ["next"]})
    workers.wait_for("ended long", "ended next")
    until(lambda: settled(broker.url), "nothing left")
    assert worker.poll() is None
    assert workers.told().count("began long") == 1
