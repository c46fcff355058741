"""Clients that close, or just end, while their broker dies: none is aborted, none hangs.

The short form is part of the suite. The long form (``make chaos``, or ``pytest -m long``) runs 100 client processes;
``ESCROWMQ_CLIENTS`` sets another number for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import closing_programs
import ending_programs
import pytest
from load import PATIENCE, Broker

import escrowmq as mq
import forked
from escrowmq_lab.servers.process import free_port

BESIDE = 4
"""Clients at a time."""
LONGEST_CLOSE = 20.0
"""Seconds, as the client has them: calls give up after one, and each part of closing is bounded, together by half of
this.
"""
ENDS = 240.0
"""Seconds after which a client that has not ended hangs."""


def program(module: object, *given: object) -> list[str]:
    return [sys.executable, str(module.__file__), *map(str, given)]  # type: ignore[attr-defined]


@contextmanager
def dying_broker(folder: Path, seed: int) -> Iterator[str]:
    """The URL of a broker that is killed again and again."""
    port = free_port()
    process = forked.Forked(program(closing_programs, "broker", port, folder / "data", seed), stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        yield f"escrow://127.0.0.1:{port}"
        process.terminate()
        assert int(process.stdout.read()) > 0, "it was never killed"
    finally:
        process.terminate()
        assert process.wait(PATIENCE) == 0
        process.stdout.close()


def client(kind: str, url: str, folder: Path, seconds: float, seed: int) -> tuple[str, int, str, str]:
    """One client process: its kind, exit code, and what it said."""
    own = folder / f"{kind}-{seed}"
    own.mkdir()
    run = program(closing_programs, kind, url, own, seconds, seed)
    with forked.Forked(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, errors = process.communicate(timeout=seconds + ENDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # it shows its stacks
            threading.Event().wait(1)
            process.kill()
            said, errors = process.communicate()
            errors += "\nIT HANGS"
    return kind, process.returncode, said, errors


def closing(folder: Path, clients: int, seconds: float, seed: int) -> list[str]:
    """What went wrong with ``clients`` processes, of each kind in turn, beside a broker that is killed again and
    again."""
    kinds = list(closing_programs.KINDS)
    wrong = []
    with dying_broker(folder, seed) as url, ThreadPoolExecutor(BESIDE) as beside:
        runs = [
            beside.submit(client, kinds[number % len(kinds)], url, folder, seconds, seed + number)
            for number in range(clients)
        ]
        for run in runs:
            kind, code, said, errors = run.result()
            print(kind, code, said.strip())
            if code:
                wrong.append(f"{kind} ended with {code}: {errors[-3000:]}")
            else:
                rounds, _, longest = said.split()
                if not int(rounds) or float(longest) > LONGEST_CLOSE:
                    wrong.append(f"{kind}: {rounds} rounds, closing took {longest} s")
    return wrong


@pytest.mark.invariant("I35")
def test_clients_close_while_their_broker_is_killed(tmp_path):
    assert not closing(tmp_path, clients=6, seconds=2.0, seed=int(os.environ.get("ESCROWMQ_SEED", "5")))


@pytest.mark.long
def test_a_hundred_clients_close_while_their_broker_is_killed(tmp_path):
    clients = int(os.environ.get("ESCROWMQ_CLIENTS", "100"))
    assert not closing(tmp_path, clients=clients, seconds=8.0, seed=int(os.environ.get("ESCROWMQ_SEED", "1000")))


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("ends") / "data", transaction_timeout=0.2, check_interval=0.2) as served:
        yield served


@pytest.mark.invariant("I35")
@pytest.mark.parametrize("way", [way for way in ending_programs.WAYS if "still" not in way])
def test_a_client_may_end_in_any_way(broker, way):
    run = program(ending_programs, way, broker.url)
    done = subprocess.run(run, capture_output=True, text=True, timeout=ENDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("way", ["leaves", "in_a_signal_handler", "in_a_forked_child"])
def test_so_may_one_with_the_broker_inside(tmp_path, way):
    run = program(ending_programs, way, f"file:{tmp_path / 'data'}")
    done = subprocess.run(run, capture_output=True, text=True, timeout=ENDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    with mq.connect(f"file:{tmp_path / 'data'}") as bus:
        bus.producer("plain").send("orders", b"x")
        assert bus.admin.health()[0]["status"] == "ok"


@pytest.mark.invariant("I35")
def test_closing_does_not_wait_for_a_broker_that_stands_still(tmp_path):
    """Nor does the end of the process, which leaves another bus open."""
    with Broker(tmp_path / "data", transaction_timeout=0.2, check_interval=0.2) as served:
        run = program(ending_programs, "of_a_broker_that_stands_still", served.url)
        with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            served.pause()
            process.communicate("\n", timeout=ENDS)
    assert process.returncode == 0
