"""A data folder read without a broker: the same answers, nothing changed, only what is durable."""

import json
import subprocess
import sys
from contextlib import closing
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest

import escrowmq as mq
from escrowmq.broker import offline
from escrowmq.broker.offline import open_shard
from escrowmq.errors import Code
from escrowmq.log.offline import Durable, OfflineLog, open_offline
from escrowmq.platform.disk import RealDisk, note_url
from escrowmq.wire import ACK_VIEW_NAME, OP_VIEW_NAME, VIEWS


def fill(folder: Path, **options) -> None:
    with mq.connect(f"file:{folder}", transaction_timeout=3600, **options) as bus:
        work(bus)


def work(bus: mq.Bus) -> None:
    plain, producer = bus.producer("plain"), bus.producer("shop", checker=lambda check: mq.UNKNOWN)
    plain.send_batch([mq.Message("t", b"%d" % n, key=f"k{n}", tag="even" if n % 2 else "odd") for n in range(300)])
    receipts = [producer.prepare("t", b"half %d" % n, key=f"h{n}") for n in range(9)]
    for n, receipt in enumerate(receipts):
        if n % 3 == 0:
            producer.commit(receipt.transaction_id)
        elif n % 3 == 1:
            producer.rollback(receipt.transaction_id)
    query = bus.producer("query", checker=lambda check: mq.UNKNOWN)
    query.commit_batch("query", 0, [query.prepare("t", b"of a query").transaction_id])
    with bus.consumer("c", ["t"], max_attempts=1) as consumer:
        for message in islice(consumer, 5):
            message.nack(delay=0, cause="spoilt") if message.body == b"0" else message.ack()


def seen(bus: mq.Bus) -> dict:
    reads = {name: bus.admin.read(name).read_all() for name in ("t", *VIEWS)}
    listings = {
        "topics": bus.admin.topics(),
        "transactions": bus.admin.transactions(),
        "lookup": bus.admin.lookup(key="h0"),
    }
    for rows in listings.values():
        for row in rows:
            row.pop("broker", None)
    return reads | listings


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


@pytest.mark.invariant("I41")
@pytest.mark.parametrize("options", [{}, {"segment_bytes": 1 << 16}, {"compression": "lz4"}])
def test_a_folder_at_rest_reads_as_the_broker_would_and_is_left_as_it_was(tmp_path, options):
    fill(tmp_path / "d", **options)
    before = files(tmp_path / "d")
    with mq.connect(f"file:{tmp_path / 'd'}", read_only=True) as offline:
        found = seen(offline)
    assert files(tmp_path / "d") == before
    with mq.connect(f"file:{tmp_path / 'd'}", transaction_timeout=3600, **options) as bus:
        expected = seen(bus)
    assert found == expected
    assert found["t"].num_rows == 304
    assert found[OP_VIEW_NAME].num_rows == 7
    assert set(found[ACK_VIEW_NAME]["group"].to_pylist()) == {"c"}


def test_a_folder_in_use_is_read_up_to_what_is_durable(tmp_path):
    with mq.connect(f"file:{tmp_path / 'd'}", transaction_timeout=3600) as bus:
        work(bus)
        with mq.connect(f"file:{tmp_path / 'd'}", read_only=True) as offline:
            first = offline.admin.read("t").read_all()
            bus.producer("plain").send("t", b"later")
            assert offline.admin.read("t").read_all().equals(first)  # one view, whatever happens meanwhile
        whole = bus.admin.read("t").read_all()
    assert first.num_rows <= whole.num_rows - 1
    bodies = set(whole["body"].to_pylist())
    assert set(first["body"].to_pylist()) < bodies


def test_frames_that_may_still_be_lost_are_not_shown_while_the_folder_is_in_use(tmp_path):
    fill(tmp_path / "d")
    for path in (tmp_path / "d").iterdir():  # what a crash right after the last write leaves
        if path.suffix in (".snapshot", "") and path.name != "lock":
            path.unlink()
    disk = RealDisk(tmp_path / "d", read_only=True)
    everything = open_offline(disk, in_use=False)
    durable = open_offline(disk, in_use=True)
    last = list(everything.frames())[-1]
    assert durable.next_sequence <= last.sequence
    assert durable.next_position == max((f.position + f.batch.num_rows for f in durable.frames()), default=0)


def position(bus: mq.Bus) -> int:
    return bus.admin.offsets("%half")[0]["end"]


def test_as_far_as_the_broker_says_and_no_further(tmp_path):
    with mq.connect(f"file:{tmp_path / 'd'}") as bus:
        producer = bus.producer("plain")
        ends = []
        for n in range(4):
            producer.send("t", b"%d" % n)
            ends.append(position(bus))
        (hello,) = bus.admin.hello()
        own = Durable(hello["shard"], hello["epoch"], ends[-1])
        disk = RealDisk(tmp_path / "d", read_only=True)
        shown = [open_offline(disk, in_use=True, durable=own._replace(position=end)).next_position for end in ends]
        assert shown == [ends[2], ends[2], ends[2], ends[3]], "the frames themselves say it of all but the last"
        for other in (own._replace(epoch=own.epoch + 1), own._replace(shard=own.shard ^ 1), None):
            assert open_offline(disk, in_use=True, durable=other).next_position == ends[2]


def test_a_broker_that_stops_while_it_is_asked_leaves_a_folder_at_rest(tmp_path):
    bus = mq.connect(f"file:{tmp_path / 'd'}")
    bus.producer("plain").send("t", b"last")
    note_url(tmp_path / "d", "escrow://127.0.0.1:1")

    def ask(url: str) -> Durable:
        bus.close()
        raise mq.Unknown(Code.DISCONNECTED, "it is gone")

    shard = open_shard(tmp_path / "d", ask)
    assert shard.missing == ""
    assert shard.ledger.next_position == shard.log.next_position
    with mq.connect(f"file:{tmp_path / 'd'}", read_only=True) as offline:
        assert offline.admin.read("t").read_all()["body"].to_pylist() == [b"last"]


def test_a_folder_that_is_behind_its_broker_is_waited_for_and_then_said_to_be(tmp_path, monkeypatch):
    with mq.connect(f"file:{tmp_path / 'd'}") as bus:
        bus.producer("plain").send("t", b"one")
        (hello,) = bus.admin.hello()
        note_url(tmp_path / "d", "escrow://127.0.0.1:1")
        asked = []

        def ask(url: str) -> Durable:
            """As a leader on Kafka: it has answered what comes into its folder a moment later."""
            end = position(bus)
            if not asked:
                asked.append(url)
                end += 1
            return Durable(hello["shard"], hello["epoch"], end)

        assert open_shard(tmp_path / "d", ask).missing == ""
        assert asked == ["escrow://127.0.0.1:1"]
        monkeypatch.setattr(offline, "LAG_SECONDS", 0.05)
        end = position(bus)
        shard = open_shard(tmp_path / "d", lambda url: Durable(hello["shard"], hello["epoch"], end + 7))
    assert f"has the log up to position {end} (opened 1 times), and its broker up to {end + 7} (1)" in shard.missing


def test_damage_and_what_is_missing_are_both_told(tmp_path, monkeypatch):
    fill(tmp_path / "d")
    with closing(RealDisk(tmp_path / "d")) as held:
        held.lock()
        bus = mq.connect(f"file:{tmp_path / 'd'}", read_only=True)
        (health,) = bus.admin.health()
        assert (health["status"], health["reason"]) == ("incomplete", health["missing"])
        monkeypatch.setattr(OfflineLog, "is_damaged", property(lambda _: True))
        monkeypatch.setattr(OfflineLog, "damages", lambda _: ["a place"])
        (damaged,) = bus.admin.health()
    assert (damaged["status"], damaged["missing"]) == ("damaged", health["missing"])
    assert damaged["reason"] == f"a place; {health['missing']}"


def test_whatever_would_write_is_denied(tmp_path):
    fill(tmp_path / "d")
    with mq.connect(f"file:{tmp_path / 'd'}", read_only=True) as bus:
        with pytest.raises(mq.Denied, match="reading only"):
            bus.admin.create_topic("more")
        with pytest.raises(mq.Denied):
            bus.producer("p").send("t", b"")
        with pytest.raises(mq.Denied):
            bus.consumer("c", ["t"])
        assert [health["status"] for health in bus.admin.health()] == ["ok"]
        assert bus.producer("query").last_batch("query") == 0


def test_what_is_no_data_folder_is_refused(tmp_path):
    with pytest.raises(mq.Misuse, match="NOT_A_DATA_FOLDER"):
        mq.connect(f"file:{tmp_path / 'none'}", read_only=True)
    assert not (tmp_path / "none").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    with pytest.raises(mq.Misuse, match="NOT_A_DATA_FOLDER"):
        mq.connect(f"file:{tmp_path / 'other'}", read_only=True)
    with pytest.raises(mq.Misuse, match="lease_seconds"):
        mq.connect(f"file:{tmp_path / 'none'}", read_only=True, lease_seconds=3)


def test_damage_is_reported_not_repaired(tmp_path):
    fill(tmp_path / "d", segment_bytes=1 << 16)
    [first, *_] = sorted((tmp_path / "d").glob("*.segment"))
    raw = bytearray(first.read_bytes())
    raw[len(raw) // 2] ^= 1
    first.write_bytes(raw)
    for path in (tmp_path / "d").glob("*.index"):
        path.unlink()
    before = files(tmp_path / "d")
    with pytest.raises(mq.Corrupt, match=first.name):
        mq.connect(f"file:{tmp_path / 'd'}", read_only=True)
    assert files(tmp_path / "d") == before


def test_whether_a_folder_is_in_use_is_asked_without_taking_it(tmp_path):
    fill(tmp_path / "d")
    disk = RealDisk(tmp_path / "d", read_only=True)
    assert not disk.in_use()
    code = (
        f"import escrowmq as mq, json\nwith mq.connect({'file:' + str(tmp_path / 'd')!r}) as bus:\n"
        "    print(json.dumps('open'), flush=True)\n    input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as child:
        assert json.loads(child.stdout.readline()) == "open"
        assert disk.in_use()
        child.communicate("\n")
    assert not disk.in_use()
    assert isinstance(open_offline(disk, in_use=False).read([0][:0]), pa.RecordBatch)
