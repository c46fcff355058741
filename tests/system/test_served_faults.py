"""A served broker in trouble: stopped cleanly, paused, its disk full, its folder taken or of another version."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from load import QUICK, Broker, eventually

import escrowmq as mq
import forked
from escrowmq.cli.failures import Exit
from escrowmq.errors import Code


def test_sigterm_is_a_clean_stop_and_the_restart_has_everything(tmp_path: Path) -> None:
    with Broker(tmp_path / "data") as broker:
        with mq.connect(broker.url) as bus:
            producer = bus.producer("shop", checker=lambda check: mq.UNKNOWN)
            kept = [producer.prepare("orders", b"x", key=str(n)).transaction_id for n in range(20)]
            assert producer.commit(kept[0]) is Code.COMMITTED
            assert broker.stop() == 0
            broker.start()
            assert [bus.admin.transaction(t)["state"] for t in kept] == ["committed"] + ["open"] * 19
            assert producer.commit(kept[1]) is Code.COMMITTED
        assert broker.stop() == 0
        assert (tmp_path / "data" / "closed").exists()


@pytest.mark.invariant("I1")
def test_a_paused_broker_is_unknown_and_later_consistent(tmp_path: Path) -> None:
    with Broker(tmp_path / "data") as broker, mq.connect(broker.url) as bus:
        producer = bus.producer("shop", timeout=1.5, checker=lambda check: mq.UNKNOWN)
        prepare = lambda body, name: answered(lambda: producer.prepare("orders", body, message_id=name))  # noqa: E731
        first = eventually("it answers", lambda: prepare(b"1", "one")).transaction_id
        second = eventually("it answers", lambda: prepare(b"2", "two")).transaction_id
        broker.pause()
        with pytest.raises(mq.Unknown) as doubt:
            producer.commit(first)
        assert doubt.value.code is Code.TIMED_OUT
        with pytest.raises(mq.Unknown):
            producer.prepare("orders", b"3", message_id="three")
        broker.send_signal(signal.SIGCONT)
        # Asking again under the same ids has one effect, whatever became of the first time.
        assert eventually("it answers", lambda: answered(lambda: producer.commit(first))) in (
            Code.COMMITTED,
            Code.ALREADY_COMMITTED,
        )
        third = eventually("it answers", lambda: prepare(b"3", "three"))
        assert eventually("it answers", lambda: answered(lambda: producer.rollback(second))) in (
            Code.ROLLED_BACK,
            Code.ALREADY_ROLLED_BACK,
        )
        assert eventually("it answers", lambda: answered(lambda: producer.commit(third.transaction_id))) in (
            Code.COMMITTED,
            Code.ALREADY_COMMITTED,
        )
        assert sorted(bus.admin.read("orders").read_all().column("body").to_pylist()) == [b"1", b"3"]
        states = [t["state"] for t in bus.admin.transactions()]
        assert sorted(states) == ["committed", "committed", "rolled_back"]


def answered(call):  # type: ignore[no-untyped-def]
    """What a call answers; None while it is Unknown."""
    try:
        return call()
    except mq.Unknown:
        return None


def test_a_folder_in_use_is_refused_with_its_owner(tmp_path: Path) -> None:
    with Broker(tmp_path / "data") as broker:
        other = serve(tmp_path / "data")
        assert other.returncode == Exit.USAGE
        assert "FOLDER_IN_USE" in other.stderr
        assert str(broker.process.pid) in other.stderr
        with pytest.raises(mq.Misuse) as refusal:
            mq.connect(f"file:{tmp_path / 'data'}")
        assert refusal.value.code is Code.FOLDER_IN_USE
        with mq.connect(broker.url) as bus:
            assert bus.admin.health()[0]["status"] == "ok"


@pytest.mark.invariant("I32")
def test_a_folder_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    with mq.connect(f"file:{folder}") as bus:
        bus.producer("plain").send("orders", b"x")
    (segment,) = folder.glob("*.segment")
    newer(segment)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused = serve(folder)
    assert refused.returncode == Exit.CORRUPT
    assert "NEWER_FORMAT" in refused.stderr
    assert "upgrade" in refused.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"} == {
        name: content for name, content in before.items() if name != "lock"
    }


def newer(segment: Path) -> None:
    """Make it a segment of the format's next version, well formed."""
    import xxhash

    raw = bytearray(segment.read_bytes())
    raw[4:6] = (int.from_bytes(raw[4:6], "little") + 1).to_bytes(2, "little")
    raw[56:64] = xxhash.xxh3_64_intdigest(bytes(raw[:56])).to_bytes(8, "little")
    segment.write_bytes(raw)


def serve(folder: Path) -> subprocess.CompletedProcess[str]:
    """``escrowmq serve``, expected to end by itself."""
    command = [sys.executable, "-m", "escrowmq", "serve", "-d", str(folder), "-l", "127.0.0.1:0"]
    return forked.run(command, env={**os.environ, "COLUMNS": "300"})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB; skipped where mounting is not allowed."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    with ExitStack() as stack:
        stack.callback(lambda: subprocess.run(["umount", "-l", str(place)], check=True))
        yield place


@pytest.mark.invariant("I33")
def test_a_full_disk_refuses_messages_while_the_rest_goes_on(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(16 << 20))
    asked = {**QUICK, "check_max": 1000}  # whatever was left undecided is asked about until it is answered
    with Broker(small_disk / "data", segment_bytes=4 << 20, **asked) as broker, mq.connect(broker.url) as bus:
        decisions: dict[bytes, mq.Outcome] = {}
        producer = bus.producer("shop", checker=lambda check: decisions.get(bytes(check.transaction_id), mq.UNKNOWN))
        plain = bus.producer("plain", timeout=60)
        consumer = bus.consumer("cart", "orders", lease=300)
        held = [producer.prepare("orders", b"held", check_immunity=0.001).transaction_id for _ in range(4)]
        sent = fill(plain)
        assert sent > 10
        assert bus.admin.health()[0]["status"] == "full"
        with pytest.raises(mq.Overloaded):
            producer.prepare("orders", bytes(200_000))
        # reads, acknowledgements, decisions and questions go on
        assert bus.admin.read("orders").read_all().num_rows == sent
        received = consumer.receive(5, wait=60)
        assert received
        for message in received:
            message.ack()
        assert consumer.flush() == 0
        assert producer.commit(held[0]) is Code.COMMITTED
        assert producer.rollback(held[1]) is Code.ROLLED_BACK
        decisions[bytes(held[2])] = mq.COMMIT
        eventually("it is asked about", lambda: bus.admin.transaction(held[2])["state"] == "committed")
        # with space again it takes messages, without a restart
        ballast.unlink()
        eventually("it notices", lambda: bus.admin.health()[0]["status"] == "ok")
        plain.send("orders", bytes(200_000))
        assert bus.admin.read("orders").read_all().num_rows == sent + 3
        assert broker.stop() == 0
        broker.start()
        assert bus.admin.read("orders").read_all().num_rows == sent + 3
        assert producer.commit(held[3]) is Code.COMMITTED


def fill(plain: mq.Producer) -> int:
    """Send until the disk is full; how many messages went in."""
    for sent in range(1000):
        try:
            plain.send("orders", bytes(200_000))
        except mq.Overloaded as refusal:
            assert refusal.code is Code.DISK_FULL  # noqa: PT017
            assert refusal.retry_after > 0  # noqa: PT017
            return sent
    raise AssertionError("the disk never got full")
