"""``escrowmq reconcile --rocketmq`` names each difference between a RocketMQ topic and one here: with a real RocketMQ
5.5, and with the gateway in its place.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from escrowmq.cli.failures import Exit
from escrowmq.errors import Code, Misuse, Overloaded
from escrowmq.gateway.rocketmq import RocketmqTopic, copy_topic
from escrowmq_lab.servers.process import free_port

PROGRAM = Path(__file__).parent / "rocketmq_beside.py"
EXPECTED = {
    ("missing", "order-3", 1, 0),
    ("unexpected", "order-99", 0, 1),
    ("differing", "order-4", 1, 1),
    ("repeated", "order-5", 1, 2),
    ("nameless", None, 1, 0),
}


@pytest.mark.verify
@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["real", pytest.param("gateway", marks=pytest.mark.long)])
def test_each_difference_to_a_rocketmq_topic_is_named(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), kind, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: Any = json.loads(done.stdout.splitlines()[-1])
    if "absent" in found:
        if os.environ.get("CI"):
            pytest.fail(found["absent"])
        pytest.skip(found["absent"])
    resumed, again = found
    for report in found:
        named = {(one["kind"], one["id"], one["halves"], one["commits"]) for one in report["named"]}
        assert named == EXPECTED, report
        # each of the 60 once, order-7 twice, one without a key: what was delivered twice around the kill counts once
        assert (report["half_rows"], report["commit_rows"]) == (62, 62), report
        assert (report["covered_from"], report["incomplete"]) == (None, ""), report
    assert "0 messages from RocketMQ" in again["notices"]
    assert resumed["named"] == again["named"]


def test_a_copy_belongs_to_one_topic_and_group(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    source = RocketmqTopic.parse(f"127.0.0.1:{free_port()}/orders", "comparison")
    with pytest.raises(Misuse, match="not empty"):
        copy_topic(source, tmp_path / "other")
    with pytest.raises(Overloaded, match="RocketMQ at") as away:
        copy_topic(source, tmp_path / "copy")
    assert away.value.code is Code.BROKER_AWAY
    with pytest.raises(Misuse, match="has a copy of"):
        copy_topic(RocketmqTopic.parse("127.0.0.1:1/orders", "another"), tmp_path / "copy")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--rocketmq", "10.0.0.5/orders", "--topic", "t", "--group", "g", "--copy", "c"), "HOST:PORT/TOPIC"),
        (("--rocketmq", "10.0.0.5:1/orders", "--topic", "t"), "--group --copy"),
        (("--group", "g", "--half", "h", "--commits", "c"), "--group without --rocketmq"),
        (("--half", "h"), "--half and --commits, or --rocketmq and --topic"),
        (
            ("--rocketmq", "h:1/t", "--topic", "t", "--group", "g", "--copy", "c", "--half", "h"),
            "compares with --topic",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_named(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "escrowmq", "reconcile", "--url", f"file:{tmp_path}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, text in " ".join(done.stderr.split())) == (Exit.USAGE, True), done.stderr


def test_the_secret_key_is_not_shown() -> None:
    source = RocketmqTopic.parse("h:1/t", "g", "AK", "top-secret")
    assert "top-secret" not in repr(source)
