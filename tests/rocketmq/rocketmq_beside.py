"""Compares a topic of a RocketMQ server with one of a broker: ``python rocketmq_beside.py real|gateway
FOLDER``. A program of its own, because a real RocketMQ listens on every address and so gets a network of its own.

Prints one JSON object: {"absent": why}, or the reports of three comparisons. The first comparison is killed between
writing its copy and acknowledging it, or close to that; the others go on with its copy.
"""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from rocketmq_runs import RawClient

import escrowmq as mq
from escrowmq.gateway.rocketmq.protocol import definition
from escrowmq_lab.servers import escrow, rocketmq
from escrowmq_lab.servers.isolation import isolate, last_error
from escrowmq_lab.servers.process import free_port
from escrowmq_lab.servers.seam import Absent

COUNT = 60
TOPIC, GROUP = "orders", "comparison"


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    try:
        with serving(kind, folder / "theirs") as (address, begin), escrow.serving(folder / "ours") as ours:
            fill(address, ours.url)
            begin()
            command = [sys.executable, "-m", "escrowmq", "reconcile", "--url", ours.url, "--json", "--grace", "0s"]
            command += ["--rocketmq", f"{address}/{TOPIC}", "--topic", TOPIC]
            command += ["--group", GROUP, "--copy", str(folder / "copy")]
            kill_after_first_file([*command, "--quiet", "20s"], folder / "copy")
            print(json.dumps([reconcile(command), reconcile([*command, "--quiet", "20s"])]))
    except Absent as absent:
        print(json.dumps({"absent": str(absent)}))


@contextmanager
def serving(kind: str, folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """Serve a RocketMQ, or a broker of ours with a gateway. Yields the address for RocketMQ clients, and what makes the
    group begin with the first message (docs/from-rocketmq.md)."""
    if kind == "real":
        rocketmq.libraries()  # may download
        if not isolate():
            raise Absent(f"RocketMQ listens on every address; a network of its own takes root ({last_error()})")
        # As with a topic that is larger than the broker's memory: a new group begins with the newest messages.
        with rocketmq.serving(folder, settings={"initPopOffsetByCheckMsgInMem": "false"}, heap="512m") as server:
            server.create_topic(TOPIC, "NORMAL")
            server.create_group(GROUP)
            yield server.url, lambda: server.admin("resetOffsetByTime", "-g", GROUP, "-t", TOPIC, "-s", "0")
    else:
        address = f"127.0.0.1:{free_port()}"
        with escrow.serving(folder, "--rocketmq", address):
            yield address, lambda: None


def fill(address: str, url: str) -> None:
    """Send orders to both sides, with one difference of each kind."""
    theirs = RawClient(address)
    with mq.connect(url) as bus:
        producer = bus.producer("shop")
        for number in range(COUNT):
            key, body = f"order-{number}", f"body {number}".encode()
            packed = {"body": gzip.compress(body), "body_encoding": definition.GZIP} if number % 2 else {"body": body}
            for _ in range(2 if number == 7 else 1):  # twice on both sides: no difference
                insist(theirs, **packed, keys=[key])
                if number != 3:
                    producer.send(TOPIC, b"other" if number == 4 else body, key=key)
        producer.send(TOPIC, b"body 5", key="order-5")
        producer.send(TOPIC, b"body", key="order-99")
        insist(theirs, body=b"none")
    theirs.close()


def insist(client: RawClient, body: bytes, **system: Any) -> None:
    """Send until the server takes it: a RocketMQ that has just started rejects messages for some time."""
    system.setdefault("body_encoding", definition.IDENTITY)
    message = client.message(TOPIC, body, **system)
    message.system_properties.born_timestamp.GetCurrentTime()
    while client.send(message).status.code != definition.OK:
        time.sleep(0.1)


def kill_after_first_file(command: list[str], copy: Path) -> None:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not any(copy.glob("*.parquet")):
        assert process.poll() is None, "it ended without a copy"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


def reconcile(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    return {**json.loads(done.stdout), "notices": done.stderr}


if __name__ == "__main__":
    main()
