"""``escrowmq log dump``: the stored frames, and damage in its place."""

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_runs import Run

import escrowmq as mq
from escrowmq.cli.failures import Exit


@pytest.fixture
def folder(run: Run, tmp_path: Path) -> Path:
    """A data folder with ten messages in two frames, closed."""
    run("send", "orders", "m{n}", "-k", "k{n}", "-c", "9")
    run("send", "orders", "secret", "-k", "last")
    return tmp_path / "data"


def test_frames_are_printed_in_order(run: Run, folder: Path) -> None:
    entries = run("log", "dump", str(folder), "--json").lines
    assert [e["sequence"] for e in entries] == list(range(len(entries)))
    assert sum(e["rows"] for e in entries if e["kind"] == "PLAIN") == 10
    text = run("log", "dump", str(folder))
    assert len(text.out.splitlines()) == len(entries)
    assert "PLAIN" in text.out


def test_frames_can_be_chosen(run: Run, folder: Path) -> None:
    plain = run("log", "dump", str(folder), "-k", "plain", "--json", "--rows").lines
    assert {e["kind"] for e in plain} == {"PLAIN"}
    assert [row["body"] for e in plain for row in e["data"]] == [f"m{n}" for n in range(9)] + ["secret"]
    some = run("log", "dump", str(folder), "--start", "1", "--end", "3", "--json").lines
    assert [e["sequence"] for e in some] == [1, 2]


def test_a_sound_log_checks(run: Run, folder: Path) -> None:
    checked = run("log", "dump", str(folder), "--check")
    assert (checked.code, checked.out) == (0, "")
    assert "no damage was found" in checked.err


@pytest.mark.invariant("I30", "I31")
def test_a_flipped_bit_is_reported_with_its_place(run: Run, folder: Path) -> None:
    (segment,) = [path for path in folder.iterdir() if b"secret" in path.read_bytes()]
    content = bytearray(segment.read_bytes())
    at = content.index(b"m5")
    content[at] ^= 1
    segment.write_bytes(content)
    checked = run("log", "dump", str(folder), "--check", "--json")
    assert checked.code == Exit.CORRUPT
    damage = json.loads(checked.out.splitlines()[0])["damage"]
    assert damage["file"] == segment.name
    assert damage["offset"] <= at
    dumped = run("log", "dump", str(folder))
    assert dumped.code == Exit.CORRUPT
    assert "DAMAGE" in dumped.out
    refused = run("topics", "list")
    assert (refused.code, "DAMAGED" in refused.err) == (Exit.CORRUPT, True), "the broker refuses to pretend"
    assert segment.read_bytes() == content


def test_a_folder_in_use_can_be_dumped(run: Run, undecided: Callable[[str], str], bus: mq.Bus, tmp_path: Path) -> None:
    undecided("o-1")
    kinds = [e["kind"] for e in run("log", "dump", str(tmp_path / "data"), "--json").lines]
    assert "HALF" in kinds


@pytest.mark.parametrize(
    ("words", "told"),
    [(("absent",), "absent"), ((".", "--kind", "halff"), "did you mean 'half'?"), ((".", "--start", "-1"), "--start")],
)
def test_wrong_questions(run: Run, words: tuple[str, ...], told: str) -> None:
    ran = run("log", "dump", *words)
    assert (ran.code, told in ran.err) == (Exit.USAGE, True), ran


def test_a_folder_without_a_log_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ran = run("log", "dump", str(tmp_path / "empty"))
    assert (ran.code, "NOT_A_DATA_FOLDER" in ran.err) == (Exit.USAGE, True)
    assert list((tmp_path / "empty").iterdir()) == [], "looking makes nothing"


def test_the_topics_of_a_log_in_kafka_are_made(run: Run, kafka_url: str) -> None:
    url = f"{kafka_url}/cli-{uuid.uuid4().hex}"
    topic = url.rpartition("/")[2]
    assert "cannot have 3 replicas" in run("log", "create", url).err
    made = run("log", "create", f"{url}?replication=1", "--partitions", "2", "--json").lines
    assert made == [
        {"topic": topic, "made": True, "replicas": 1},
        {"topic": f"{topic}.base", "made": True, "replicas": 1},
    ]
    assert (
        f"{topic}: exists, with the settings that a log requires" in run("log", "create", f"{url}/1?replication=1").out
    )
    assert "min.insync.replicas is 1" in run("log", "create", url).err
    assert "BAD_URL" in run("log", "create", "kafka://h").err


def test_a_log_is_copied_to_kafka_and_back(run: Run, folder: Path, tmp_path: Path, kafka_url: str) -> None:
    url, back = f"{kafka_url}/cli-{uuid.uuid4().hex}?replication=1", tmp_path / "back"
    run("log", "create", url)
    before = run("log", "dump", str(folder), "--rows").out
    there = run("log", "copy", str(folder), url, "--json").json
    assert (there["first"], there["end"]) == (0, len(run("log", "dump", str(folder), "--json").lines))
    assert run("log", "copy", url, str(back), "--json").json == there
    assert run("log", "dump", str(back), "--rows").out == before
    with mq.connect(f"file:{back}") as bus:
        assert bus.admin.read("orders").read_all().num_rows == 10
        bus.producer("p").send("orders", b"on the way")
    assert "BAD_ARGUMENT" in run("log", "copy", str(folder), url).err  # its topics are not new any more
    assert "NOT_A_DATA_FOLDER" in run("log", "copy", url, str(back)).err
    assert "BAD_ARGUMENT" in run("log", "copy", str(folder), str(back)).err
