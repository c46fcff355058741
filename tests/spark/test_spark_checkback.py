"""What a query's checkpoint says about rows that nobody decided: real folders, made by hand."""

import os
from datetime import UTC, datetime, timedelta
from threading import Thread as thread

import pytest

import escrowmq as mq
from escrowmq.model import Check, CheckedMessage, TransactionId
from escrowmq.spark import checkback
from escrowmq.spark.checkback import SKEW, CheckpointChecker, find_last_commit, to_arrow_uri, warn_if_unreadable

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def checkpoint(folder, **commits):
    """A checkpoint of a query: files of ``commits/`` by name (``b0`` for 0), and when they were written."""
    for part in ("commits", "offsets", "sources/0", "state/0/0"):
        (folder / part).mkdir(parents=True)
    (folder / "metadata").write_text('{"id":"0e807fcc-83db-4e72-82d3-3788887ea3aa"}')
    for name, at in commits.items():
        for file in (name.removeprefix("b"), f".{name.removeprefix('b')}.crc"):
            (folder / "commits" / file).write_text('v1\n{"nextBatchWatermarkMs":0}')
            os.utime(folder / "commits" / file, (at.timestamp(),) * 2)
    return folder


def check(*born):
    messages = [CheckedMessage("revenue", b"x", None, None, {}, bytes(16), at) for at in born]
    return Check(TransactionId.from_bytes(b"\x01" * 16), 1, tuple(messages))


def test_the_newest_commit_counts_whatever_its_number_and_files_beside_it_do_not(tmp_path):
    made = checkpoint(tmp_path / "c", b9=NOON, b10=NOON + 5 * SECOND)
    for other in (".11.crc", "12.tmp", "_note"):
        (made / "commits" / other).touch()
    assert find_last_commit(str(made)) == NOON + 5 * SECOND
    assert find_last_commit(f"{made}/") == NOON + 5 * SECOND
    assert find_last_commit(made.as_uri()) == NOON + 5 * SECOND


def test_a_path_with_blanks(tmp_path):
    made = checkpoint(tmp_path / "my query", b0=NOON)
    assert find_last_commit(str(made)) == NOON
    assert find_last_commit(made.as_uri()) == NOON


@pytest.mark.parametrize("where", ["nothing", "file:/nowhere/at/all", "gopher://host/c", "hdfs://"])
def test_a_checkpoint_that_cannot_be_read_says_nothing(tmp_path, where, caplog):
    assert find_last_commit(str(tmp_path / where) if where == "nothing" else where) is None
    assert CheckpointChecker(where).decide_batch([check(NOON)]) == [mq.UNKNOWN]
    assert "cannot read the checkpoint" in caplog.text


def test_no_batch_done_yet_and_no_checkpoint_known(tmp_path):
    made = checkpoint(tmp_path / "c")
    assert CheckpointChecker(str(made)).decide_batch([check(NOON)]) == [mq.UNKNOWN]
    assert CheckpointChecker(None).decide_batch([check(NOON)]) == [mq.UNKNOWN]


@pytest.mark.invariant("I42")
def test_what_the_query_has_moved_past_is_rolled_back_all_else_is_in_progress(tmp_path):
    checker = CheckpointChecker(str(checkpoint(tmp_path / "c", b0=NOON - SECOND, b1=NOON)))
    passed = NOON - SKEW - SECOND
    asked = [
        check(passed),
        check(passed, passed - SECOND),
        check(passed, NOON - SKEW),  # the youngest row counts
        check(NOON - SKEW),  # clocks may differ by so much
        check(NOON + SECOND),
        check(),
    ]
    assert checker.decide_batch(asked) == [mq.ROLLBACK, mq.ROLLBACK, *[mq.UNKNOWN] * 4]


def test_what_a_process_without_java_can_read_of_s3_is_read():
    assert to_arrow_uri("s3a://bucket/checkpoints/q") == "s3://bucket/checkpoints/q"
    assert to_arrow_uri("S3N://bucket/q") == "s3://bucket/q"
    for same in ("s3://bucket/q", "hdfs://name:8020/q", "file:/c/q", "/c/s3a:/q", "c/q"):
        assert to_arrow_uri(same) == same


@pytest.mark.parametrize(
    ("checkpoint", "words"),
    [("gopher://host/c", "the checkpoint gopher://host/c"), (None, "option checkpointLocation")],
)
def test_a_process_that_will_not_be_able_to_answer_says_so_once_at_its_start(checkpoint, words, monkeypatch, caplog):
    monkeypatch.setattr(checkback, "_checked", set())
    threads = []
    monkeypatch.setattr(checkback.threading, "Thread", lambda **given: threads.append(thread(**given)) or threads[-1])
    warn_if_unreadable(checkpoint)
    warn_if_unreadable(checkpoint)
    [only] = threads
    only.join()
    [record] = caplog.records
    assert words in record.message
    assert "answers 'unknown'" in record.message


def test_a_process_that_can_answer_says_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkback, "_checked", set())
    threads = []
    monkeypatch.setattr(checkback.threading, "Thread", lambda **given: threads.append(thread(**given)) or threads[-1])
    warn_if_unreadable(str(checkpoint(tmp_path / "c")))
    threads[0].join()
    assert caplog.records == []
