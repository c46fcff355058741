"""What version 0.1.0 left behind: its folders open and hold what it listed of them, and what its client asks is
answered as then.

``version_writer.py`` made the files, with that version. A field that a newer version adds is no difference; one that is
gone is.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import version_writer

import escrowmq as mq
from escrowmq.backup import FolderSource, restore, take
from escrowmq.connecting import links
from escrowmq.platform.disk import RealDisk
from escrowmq.wire import Exchange, Link
from escrowmq_lab.servers.escrow import serving
from forked import Forked

GOLDEN = Path(__file__).parent / "golden" / "0.1.0"
SETTINGS = json.loads((GOLDEN / "settings.json").read_text())
CALLS = [json.loads(line) for line in (GOLDEN / "requests.jsonl").read_text().splitlines()]


PASSING = {"epoch", "version", "broker", "limits", "bytes"}
"""Fields that name one process, one start or one machine."""


def assert_holds(now: Any, then: Any, where: str = "") -> None:
    """Every value of ``then`` is in ``now``, but for times, connections and what is passing."""
    if isinstance(then, dict):
        for name, value in then.items():
            assert name in now, f"{where}.{name} is gone"
            connected = name == "members" and isinstance(value, int)
            if not (name.endswith("_us") or name in PASSING or connected):
                assert_holds(now[name], value, f"{where}.{name}")
    elif isinstance(then, list):
        assert len(now) == len(then), where
        for row, (one, other) in enumerate(zip(now, then, strict=True)):
            assert_holds(one, other, f"{where}[{row}]")
    else:
        assert now == then, where


# Folders


@pytest.fixture(params=["crashed", "closed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / request.param))


@pytest.mark.invariant("I32")
def test_a_folder_of_0_1_0_holds_what_it_held(folder: Path) -> None:
    with mq.connect(f"file:{folder}", read_only=True) as bus:
        assert_holds(version_writer.listed(bus), json.loads((GOLDEN / f"{folder.name}.json").read_text()))


def test_a_group_of_0_1_0_that_a_mistake_spoilt_is_put_right_by_a_person(folder: Path) -> None:
    """Its groups are of the kind that the log says; the word of a person comes before that, also after a restart."""
    with mq.connect(f"file:{folder}", **SETTINGS) as bus:
        kinds = {group["group"]: group["kind"] for group in bus.admin.producers()}
        assert (kinds["shop"], kinds["plain"]) == ("transactional", "plain")
        with pytest.raises(mq.Rejected, match="GROUP_KIND"):
            bus.producer("shop").send("orders", b"x")
        with pytest.raises(mq.Rejected, match="GROUP_KIND"):
            bus.producer("plain", unasked=True).prepare("orders", b"x")
        bus.admin.alter_producers("shop", kind="plain")
    with mq.connect(f"file:{folder}", **SETTINGS) as bus:
        bus.producer("shop").send("orders", b"plain again")
        with pytest.raises(mq.Rejected, match="GROUP_KIND"):
            bus.producer("shop", unasked=True).prepare("orders", b"x")
        undecided = [row["id"] for row in bus.admin.transactions("undecided")]
        assert [bus.admin.rollback(id) for id in undecided] == [mq.Code.ROLLED_BACK] * len(undecided)


@pytest.mark.invariant("I32")
def test_a_folder_of_0_1_0_goes_on(folder: Path) -> None:
    """Its undecided transactions are decided, its messages delivered, new ones stored; and once more after a
    restart."""
    with mq.connect(f"file:{folder}", **SETTINGS) as bus:
        undecided = [row["id"] for row in bus.admin.transactions("undecided")]
        assert len(undecided) == 2
        shop = bus.producer("shop", checker=lambda _: mq.UNKNOWN)
        assert [shop.commit(id) for id in undecided] == [mq.Code.COMMITTED, mq.Code.COMMITTED]
        assert shop.rollback(bus.admin.transactions("rolled_back")[0]["id"]) is mq.Code.ALREADY_ROLLED_BACK
        again = bus.producer("plain", qos=2).send("orders", b"plain-0", key="k-0", message_id="plain-new")
        assert again.offset is not None
    with mq.connect(f"file:{folder}", **SETTINGS) as bus:
        bodies = {body.decode() for body in bus.admin.read("orders").read_all()["body"].to_pylist()}
        assert bodies == {f"plain-{n}" for n in range(8)} | {"half-0", "half-3", "half-2", "half-5"}
        assert not bus.admin.transactions("undecided")
        bus.admin.retry_dead_letters("cart")
        consumer = bus.consumer("cart", ["orders"], max_attempts=1)
        seen: set[str] = set()
        for message in consumer.messages(idle_timeout=60.0):
            seen.add(message.body.decode())
            if {"half-2", "half-5"} <= seen:
                break
        assert {"half-2", "half-5"} <= seen


# Requests


@pytest.fixture(params=["embedded", "served"])
def link(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Link]:
    """A broker of today on the folder on which the requests were made."""
    place = tmp_path / "escrow"
    shutil.copytree(GOLDEN / "start", place)
    if request.param == "embedded":
        link = links(f"file:{place}", dict(SETTINGS))[0]
        yield link
        link.close()
        return
    options = [word for name, value in SETTINGS.items() for word in ("--" + name.replace("_", "-"), str(value))]
    with serving(tmp_path, *options, launcher=Forked) as server:
        link = links(server.url, {})[0]
        yield link
        link.close()


def batch_of(text: str) -> pa.RecordBatch:
    return pa.ipc.open_stream(base64.b64decode(text)).read_next_batch()


def columns_of(batch: pa.RecordBatch) -> dict[str, list[Any]]:
    """Columns as lists; times are those of the day on which they were written."""
    return {name: batch.column(name).to_pylist() for name in batch.schema.names if not name.endswith("_us")}


def exchanged(link: Link, call: dict[str, Any]) -> None:
    answer = link.exchange(Exchange(call["exchange"]), batch_of(call["batch"]), call["options"]).result(60)
    then = batch_of(call["answer"])
    assert answer.schema.equals(then.schema)
    assert columns_of(answer) == columns_of(then)


def acted(link: Link, call: dict[str, Any]) -> None:
    if "error" in call:
        with pytest.raises(mq.EscrowError) as raised:
            link.action(call["action"], call["request"], 60.0)
        assert raised.value.code.name == call["error"]
    else:
        answer, then = link.action(call["action"], call["request"], 60.0), call["answer"]
        for now, message in zip(answer.get("messages", ()), then.get("messages", ()), strict=False):
            if isinstance(now, dict) and now.get(
                "withheld"
            ):  # of a rolled-back one: clients know null from damaged ones
                message["body_base64"] = None
        assert_holds(answer, then, call["action"])


def was_read(link: Link, call: dict[str, Any]) -> None:
    table = link.read(call["read"]).read_all()
    then = batch_of(call["answer"])
    assert table.schema.names == then.schema.names
    assert {name: column for name, column in table.to_pydict().items() if not name.endswith("_us")} == columns_of(then)


WAYS: dict[str, Callable[[Link, dict[str, Any]], None]] = {"exchange": exchanged, "action": acted, "read": was_read}


@pytest.mark.invariant("I32")
def test_a_client_of_0_1_0_is_answered_as_then(link: Link) -> None:
    for call in CALLS:
        way = next(name for name in WAYS if name in call)
        WAYS[way](link, call)


# Backups


def test_a_folder_of_0_1_0_is_backed_up_and_restored(folder: Path, tmp_path: Path) -> None:
    """Also one whose broker was killed. What is restored holds what that version listed, and goes on."""
    take(FolderSource(folder), RealDisk(tmp_path / "backup"))
    made = restore(RealDisk(tmp_path / "backup"), RealDisk(tmp_path / "restored"))
    with mq.connect(f"file:{tmp_path / 'restored'}", read_only=True) as bus:
        assert_holds(version_writer.listed(bus), json.loads((GOLDEN / f"{folder.name}.json").read_text()))
    with mq.connect(f"file:{tmp_path / 'restored'}", **SETTINGS) as bus:
        undecided = [row["id"] for row in bus.admin.transactions("undecided")]
        shop = bus.producer("shop", checker=lambda _: mq.UNKNOWN)
        assert [shop.commit(id) for id in undecided] == [mq.Code.COMMITTED, mq.Code.COMMITTED]
        assert len(undecided) == made.contents.undecided
