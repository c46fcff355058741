"""The examples that the published packages carry, run against the gateway. docs/rocketmq.md lists what cannot run.

The sources of Go and Rust get an address; the classes of Java have one, and run with a hosts file of their own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from rocketmq_client import PATIENCE
from rocketmq_programs import RUST_EXAMPLES, example_of, java_class_path
from rocketmq_runs import GatewayProcess, Start

import escrowmq as mq

Eventually = Callable[..., Any]
Run = Callable[..., subprocess.Popen[str]]
JAVA_HOST, JAVA_ADDRESS = "foobar.com", "127.77.0.1:8080"
"""The host that the classes name, at their port; on an address of the loopback that nothing else uses."""
pytestmark = [pytest.mark.verify, pytest.mark.timeout(1200)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start a program, with variables for its environment; those that run are ended after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*command: str, **variables: str) -> subprocess.Popen[str]:
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "rocketmq.client.enableSsl": "false"}
        output = tmp_path / f"output{len(started)}"
        with output.open("w") as file:
            one = subprocess.Popen(
                command, stdout=file, stderr=file, text=True, cwd=tmp_path, env=environment | variables
            )
        started.append(one)
        return one

    yield start
    for one in started:
        one.kill()
        one.wait()


def rows_of(bus: mq.Bus, topic: str) -> list[dict[str, Any]]:
    return bus.admin.read(topic).read_all().to_pylist()


def acknowledged(bus: mq.Bus, group: str, topic: str) -> int:
    """The messages of a topic that a group has handled."""
    found = [one for one in bus.admin.groups() if one["name"] == f"{group}.{topic}"]
    return sum(queue["floor"] for one in found for queue in one["queues"])


def test_examples_of_the_go_module(
    run: Run, gateway: GatewayProcess, bus: mq.Bus, topic: str, tmp_path: Path, eventually: Eventually
) -> None:
    producers = {name: f"{topic}-{name}" for name in ("normal", "async", "fifo", "delay", "transaction")}
    endpoint = {"EXAMPLE_ENDPOINT": gateway.ready["rocketmq"]}
    running = []
    for name, to in [*producers.items(), ("delay_recall", f"{topic}-recall")]:
        bus.admin.create_topic(to)
        running.append(run(example_of("go", name), EXAMPLE_TOPIC=to, **endpoint))
    consumed = producers["normal"]
    for name in ("simple_consumer", "push_consumer"):
        run(example_of("go", name), EXAMPLE_TOPIC=consumed, EXAMPLE_CONSUMERGROUP=name.replace("_", "-"), **endpoint)
    assert [one.wait(PATIENCE) for one in running] == [0] * len(running)
    assert "Message recalled successfully" in (tmp_path / "output5").read_text()
    for name, to in producers.items():
        eventually(lambda to=to: len(rows_of(bus, to)) == 10, PATIENCE)
        rows = rows_of(bus, to)
        assert {one["body"] for one in rows} == {b"this is a message : %d" % number for number in range(10)}
        assert {(one["key"], one["tag"]) for one in rows} == {("fifo" if name == "fifo" else "a", "ab")}
    for group in ("simple-consumer", "push-consumer"):
        eventually(lambda group=group: acknowledged(bus, group, consumed) == 10, PATIENCE)
    assert rows_of(bus, f"{topic}-recall") == []


def test_examples_of_the_rust_crate(run: Run, start: Start, bus: mq.Bus, eventually: Eventually) -> None:
    endpoint = start().ready["rocketmq"]
    topics = {"test_topic": None, "fifo_test": "message_group", "delay_test": None, "transaction_test": None}
    for topic in topics:
        bus.admin.create_topic(topic)
    running = [run(example_of("rust", name), EXAMPLE_ENDPOINT=endpoint) for name in RUST_EXAMPLES[:-1]]
    ended = [one.wait(PATIENCE) for one in running]
    assert ended == [101, 0, 0, 0], "producer.rs sends, and then expects that its own shutdown fails: unwrap_err"
    for topic, key in topics.items():
        eventually(lambda topic=topic: rows_of(bus, topic), PATIENCE)
        (row,) = rows_of(bus, topic)
        assert (row["body"], row["key"]) == (b"hello world", key)
    assert run(example_of("rust", "simple_consumer"), EXAMPLE_ENDPOINT=endpoint).wait(PATIENCE) == 0
    eventually(lambda: acknowledged(bus, "SimpleConsumerGroup", "test_topic") == 1, PATIENCE)


@pytest.fixture
def java(run: Run, start: Start, tmp_path: Path) -> Callable[[str], Any]:
    """Run a class of the package ``example``, against a gateway with TLS at the address that the classes name."""
    paths = java_class_path()
    certificate = trustme.CA().issue_cert(JAVA_HOST)
    files = {"--tls-cert": tmp_path / "cert.pem", "--tls-key": tmp_path / "key.pem"}
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(files["--tls-cert"], append=True)
    certificate.private_key_pem.write_to_path(files["--tls-key"])
    words = [str(word) for pair in files.items() for word in pair]
    start(*words, listen=JAVA_ADDRESS, second="127.77.0.1:0")
    hosts = tmp_path / "hosts"
    hosts.write_text(f"{JAVA_ADDRESS.partition(':')[0]} {JAVA_HOST}\n127.0.0.1 localhost\n")
    options = ("-Xmx256m", "-XX:TieredStopAtLevel=1", f"-Djdk.net.hosts.file={hosts}", f"-Duser.home={tmp_path}")
    package = "org.apache.rocketmq.client.java.example"
    return lambda name: run("java", *options, "-cp", paths, f"{package}.{name}")


@pytest.mark.long  # the example sends once, and gives up after three seconds on a busy machine
def test_examples_of_the_java_client(java: Callable[[str], Any], bus: mq.Bus, eventually: Eventually) -> None:
    producers = {
        "ProducerNormalMessageExample": ("yourNormalTopic", "a normal", "yourMessageKey-1c151062f96e"),
        "ProducerFifoMessageExample": ("yourFifoTopic", "a FIFO", "yourMessageGroup0"),
        "ProducerDelayMessageExample": ("yourDelayTopic", "a delay", "yourMessageKey-3ee439f945d7"),
        "ProducerTransactionMessageExample": ("yourTransactionTopic", "a transaction", "yourMessageKey-565ef26f5727"),
    }
    for topic in ("yourTopic", *(topic for topic, _, _ in producers.values())):
        bus.admin.create_topic(topic)
    for name in producers:
        java(name)
    for topic, text, key in producers.values():
        eventually(lambda topic=topic: rows_of(bus, topic), PATIENCE)
        (row,) = rows_of(bus, topic)
        body = f"This is {text} message for Apache RocketMQ".encode()
        assert (row["body"], row["key"], row["tag"]) == (body, key, "yourMessageTagA")
    for number, consumer in enumerate(
        ("SimpleConsumerExample", "AsyncSimpleConsumerExample", "PushConsumerExample"), 1
    ):
        running = java(consumer)
        java("AsyncProducerExample")
        eventually(lambda number=number: acknowledged(bus, "yourConsumerGroup", "yourTopic") >= number, PATIENCE)
        running.kill()
