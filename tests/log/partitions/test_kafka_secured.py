"""A Kafka with TLS and with passwords: who is let in, what is said to who is not, and that no secret is in what is
said.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import quote

import pytest

import escrowmq as mq
from escrowmq.errors import Code, Denied, EscrowError, Misuse
from escrowmq.log.kafka.cluster.opening import create_topics, open_partitions
from escrowmq.outbox.targets.opening import open_target
from escrowmq.testing.ledgers import outgoing
from escrowmq_lab.servers.kafka_secured import PASSWORD, USER, Secured

WRONG = "not-the-password"


@contextmanager
def refused(error: type[EscrowError], code: Code, words: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    assert caught.value.code is code
    assert words in str(caught.value)
    assert not any(secret in str(caught.value) for secret in (PASSWORD, WRONG, quote(PASSWORD)))


def settings_file(folder: Path, password: str = PASSWORD) -> Path:
    lines = ["# for a test", "", "security.protocol=SASL_PLAINTEXT", "sasl.mechanism = PLAIN"]
    path = folder / f"{uuid.uuid4().hex}.properties"
    path.write_text("\n".join([*lines, f"sasl.username={USER}", f"sasl.password={password}"]))
    return path


def new_topic() -> str:
    return f"log-{uuid.uuid4().hex}"


def test_tls(secured_kafka: Secured) -> None:
    trusted = f"security.protocol=SSL&ssl.ca.location={secured_kafka.certificate}"
    address = f"kafka://{secured_kafka.tls}/{new_topic()}?replication=1&{trusted}"
    assert len(create_topics(address)) == 2
    partitions = open_partitions(address)
    partitions.check()
    partition = partitions.log()
    partition.produce(0, b"over TLS")
    assert partition.acknowledged(60) == [(0, 0)]
    assert partition.read(0, timeout=60) == [(0, b"over TLS")]
    partitions.close()
    unknown = address.replace(f"&ssl.ca.location={secured_kafka.certificate}", "")
    with refused(Misuse, Code.BAD_SETTING, "ssl.ca.location"):
        open_partitions(unknown).check()


def test_a_password(secured_kafka: Secured, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    place = f"kafka://{secured_kafka.sasl}/{new_topic()}?replication=1"
    address = f"{place}&config={settings_file(tmp_path)}"
    with refused(Denied, Code.DENIED, "sasl.password"):
        create_topics(f"{place}&config={settings_file(tmp_path, WRONG)}")
    assert len(create_topics(address)) == 2
    open_partitions(address).check()
    in_url = (
        f"security.protocol=SASL_PLAINTEXT&sasl.mechanism=PLAIN&sasl.username={USER}&sasl.password={quote(PASSWORD)}"
    )
    open_partitions(f"{place}&{in_url}").check()
    with refused(Denied, Code.DENIED, "sasl.password"):
        open_partitions(f"{place}&{in_url.replace(quote(PASSWORD), WRONG)}").check()
    assert not any(secret in caplog.text for secret in (PASSWORD, WRONG, quote(PASSWORD)))


def test_a_relays_target_reads_the_same_file(secured_kafka: Secured, tmp_path: Path) -> None:
    target = open_target(f"kafka://{secured_kafka.sasl}?config={settings_file(tmp_path)}")
    try:
        assert list(target.send(outgoing([{"topic": new_topic(), "body": b"one"}]))) == [Code.OK]
    finally:
        target.close()


@contextmanager
def serving(*words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "escrowmq", "serve", "-l", "127.0.0.1:0", "--json", *words]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ, **environment}) as process:
        try:
            yield process
        finally:
            process.kill()


def ready(process: subprocess.Popen[str]) -> dict[str, object]:
    out: IO[str] | None = process.stdout
    assert out is not None
    line = out.readline()
    assert line, process.stderr.read() if process.stderr is not None else ""
    told: dict[str, object] = json.loads(line)
    return told


def test_a_served_broker_and_who_gives_it_the_wrong_password(secured_kafka: Secured, tmp_path: Path) -> None:
    """The address is in the environment: others see neither it nor the password."""
    place = f"kafka://{secured_kafka.sasl}/{new_topic()}?replication=1"
    right, wrong = (f"{place}&config={settings_file(tmp_path, password)}" for password in (PASSWORD, WRONG))
    create_topics(right)
    with serving("-d", str(tmp_path / "b"), ESCROWMQ_LOG=wrong) as process:
        out, said = process.communicate()
    assert (process.returncode, out) == (7, "")
    assert "sasl.password" in said
    assert WRONG not in said
    with serving("-d", str(tmp_path / "a"), ESCROWMQ_LOG=right) as process:
        with mq.connect(str(ready(process)["url"])) as bus:
            bus.producer("p").send("t", b"one")
            (hello,) = bus.admin.hello()
        process.terminate()
        _, said = process.communicate()
    assert process.returncode == 0
    for text in (said, json.dumps(hello), *(p.read_text(errors="replace") for p in (tmp_path / "a").iterdir())):
        assert PASSWORD not in text
