"""What a session brings along for the Python processes that it starts, and who gets anything of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from escrowmq.pipeline import session

LISTEN = "0A"
LOOPBACK, LOOPBACK_IN_SIX = "0100007F", "0000000000000000FFFF00000100007F"
RPC_REQUEST, RPC_RESPONSE, RPC_FAILURE = 3, 4, 5
"""Kinds of messages between Spark's Java processes."""


def test_its_processes_import_what_is_installed_not_the_archive(spark: SparkSession) -> None:
    """In the archive nothing is compiled: each process would compile all that it imports."""

    def where(_: int) -> str:
        import pyspark

        return str(pyspark.__file__)

    assert spark.sparkContext.parallelize([1]).map(where).collect() == [where(0)]


GONE = (FileNotFoundError, ProcessLookupError)
"""A thread or process that ended while it was looked at."""


def listening(process: int) -> set[tuple[str, int]]:
    """Where a process listens: addresses (in the system's hexadecimal) and ports."""
    sockets = set()
    with contextlib.suppress(*GONE):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(*GONE):
                sockets.add(os.readlink(descriptor))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTEN and f"socket:[{words[9]}]" in sockets:
                address, _, port = words[1].partition(":")
                found.add((address, int(port, 16)))
    return found


def processes(first: int) -> list[int]:
    """A process, and all that it and they have started."""
    children: list[int] = []
    with contextlib.suppress(*GONE):
        for task in Path(f"/proc/{first}/task").iterdir():
            with contextlib.suppress(*GONE):
                children += map(int, (task / "children").read_text().split())
    return [first, *(process for child in children for process in processes(child))]


def open_block(port: int, app: str, block: str, patience: float) -> tuple[int, bytes]:
    """What is answered to a plain request for a block of an application's data: its kind, and its content.

    Kind -1: nothing, or what is no frame of Spark's.
    """

    def text(word: str) -> bytes:
        return struct.pack(">i", len(word)) + word.encode()

    body = b"\0" + text(app) + text("driver") + struct.pack(">i", 1) + text(block)  # OpenBlocks
    request = struct.pack(">bqi", RPC_REQUEST, 7, len(body)) + body
    with socket.create_connection(("127.0.0.1", port), patience) as connection:
        connection.sendall(struct.pack(">q", len(request) + 8) + request)
        reader = connection.makefile("rb")
        try:
            if len(head := reader.read(8)) < 8:
                return -1, b""
            size = struct.unpack(">q", head)[0] - 8
            if not 0 < size <= 1 << 20:  # whoever else listens there answers in words
                return -1, head
            frame = reader.read(size)
        except OSError:
            return -1, b""
    return frame[0], frame[1:]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system does not tell who listens")
def test_nobody_gets_anything_who_does_not_know_the_secret(spark: SparkSession) -> None:
    context = spark.sparkContext
    kept = context.parallelize(["a secret"], 1).cache()
    assert kept.count() == 1
    java = context._gateway.proc.pid
    every = {process: listening(process) for process in (os.getpid(), *processes(java))}  # and no server of other tests
    assert len(every[java]) >= 3, "its gateway, the driver, the blocks"
    assert {address for found in every.values() for address, _ in found} <= {LOOPBACK, LOOPBACK_IN_SIX}
    answers: list[tuple[int, bytes]] = []
    for patience in (10.0, 120.0):  # a port that does not answer takes as long; so does every one of a busy machine
        with ThreadPoolExecutor(32) as pool:
            block = f"rdd_{kept.id()}_0"
            ask = [pool.submit(open_block, port, context.applicationId, block, patience) for _, port in every[java]]
            answers += [one.result() for one in ask]
        if any(kind == RPC_FAILURE for kind, _ in answers):
            break
    kept.unpersist()
    assert RPC_RESPONSE not in [kind for kind, _ in answers]
    assert any(kind == RPC_FAILURE and b"Expected SaslMessage" in text for kind, text in answers), answers


def test_the_secret_is_in_no_setting_and_no_command(spark: SparkSession) -> None:
    settings = dict(spark.sparkContext.getConf().getAll())
    assert settings["spark.authenticate"] == "true"
    assert settings["spark.ui.enabled"] == "false"
    assert [name for name in settings if "secret" in name.lower()] == []
    java = spark.sparkContext._gateway.proc.pid
    every = processes(java)
    assert java in processes(os.getpid())
    for process in every:
        with contextlib.suppress(*GONE):
            assert b"secret" not in Path(f"/proc/{process}/cmdline").read_bytes().lower()


def test_a_session_of_others_is_left_as_it_is(spark: SparkSession) -> None:
    def settings() -> dict[str, str | None]:
        own = {name: spark.conf.get(name) for name in ("spark.sql.shuffle.partitions", "spark.authenticate")}
        return dict(spark.sparkContext.getConf().getAll()) | own

    before = settings()
    wanted = {"spark.sql.shuffle.partitions": "7", "spark.authenticate": "false"}
    with session.local_session("another", settings=wanted) as given:
        assert given is spark
        assert settings() == before
    assert settings() == before


def test_a_session_of_another_thread_is_used_and_left_running(spark: SparkSession) -> None:
    def use() -> bool:
        with session.local_session("another") as given:
            return given is spark and given.range(3).count() == 3

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(use).result()
    assert spark.range(4).count() == 4


def test_who_is_broken_off_while_it_waits_leaves_a_session_that_answers(spark: SparkSession) -> None:
    """As by the limit of a test: the answer that still comes is not that of the next question."""

    class BrokenOffError(BaseException):
        pass

    def break_off(*_: object) -> None:
        raise BrokenOffError

    before = signal.signal(signal.SIGUSR1, break_off)
    main, over = threading.get_ident(), threading.Event()
    tracker = spark.sparkContext.statusTracker()

    def tell() -> None:
        while not over.wait(0.05):
            if tracker.getActiveJobsIds():
                signal.pthread_kill(main, signal.SIGUSR1)
                return

    telling = threading.Thread(target=tell)
    telling.start()
    try:
        with pytest.raises(BrokenOffError):
            spark.sparkContext.parallelize([0], 1).map(lambda _: time.sleep(600)).count()
    finally:
        over.set()
        telling.join()
        signal.signal(signal.SIGUSR1, before)
    assert spark.range(11).count() == 11
    with session.local_session("another") as given:
        assert given is spark
    assert spark.range(12).count() == 12


@pytest.mark.parametrize(("master", "own"), [(None, True), ("local[2]", True), ("spark://127.0.0.1:7077", False)])
def test_with_a_cluster_its_own_secret_counts(master: str | None, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, str]] = []

    def start(name: str, master: str, folder: Path, rows: int | None, more: dict[str, str], sharing: str) -> None:
        given.append(more)
        raise InterruptedError

    monkeypatch.setattr(session, "_find_session", lambda name: None)
    monkeypatch.setattr(session, "check_master", lambda master: None)
    monkeypatch.setattr(session, "_start", start)
    for settings in ({}, {"spark.authenticate": "no"}):
        with pytest.raises(InterruptedError), session.local_session(master=master, settings=settings):
            pass
    assert [more.get("spark.authenticate") for more in given] == ["true" if own else None, "no"]
    assert {more["spark.driver.bindAddress"] for more in given} == {"127.0.0.1"}
    assert {more.get("spark.sql.adaptive.enabled") for more in given} == {"false" if own else None}  # a cluster's own


TWO_SESSIONS = """
import warnings
from pyspark import SparkContext
from escrowmq.pipeline.session import local_session
warnings.simplefilter("ignore")  # Spark's own, that Java was killed
with local_session("first", rows=1000):
    SparkContext._gateway.proc.kill()
    SparkContext._gateway.proc.wait()
with local_session("second", rows=1000) as spark:
    print(spark.range(5).count())
"""


@pytest.mark.verify
def test_a_session_ends_whose_java_process_was_killed_and_the_next_works() -> None:
    """A signal to the process group ends Java before Python stops Spark."""
    run = subprocess.run([sys.executable, "-c", TWO_SESSIONS], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "5\n"), run.stderr
