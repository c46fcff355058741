"""Tokens are found in nothing that a run printed, logged or stored."""

import io
import json
import logging
import os
import re
import subprocess
import sys

import pytest
from guarded_broker import RightsFile
from rights_process import running
from served import PATIENT

import escrowmq as mq
from escrowmq.errors import EscrowError


@pytest.fixture
def rights(tmp_path):
    file = RightsFile(tmp_path)
    file.add(
        "shop",
        "send t",
        "produce shop",
        "produce gateway",
        "consume g",
        "read t",
        more='certificates = ["shop.example"]',
    )
    file.add("boss", "view", "admin", "act *", "read *")
    file.add("nobody")
    return file


SECRET = re.compile(r"emq_[A-Za-z0-9]{8}_[A-Za-z0-9_-]{43}")


def test_a_planted_token_is_found_nowhere(tmp_path, rights, caplog, monkeypatch):
    """A whole run: producer, check-back, consumer, relay, HTTP, commands, errors with tracebacks, a crash."""
    import sqlalchemy as sa

    from escrowmq import outbox

    caplog.set_level(logging.DEBUG)
    rights.add("shop", "send *", "produce *", "consume *", "read *", "view", "act *")
    shop = rights.tokens["shop"]
    token_file = tmp_path / "shop.token"
    token_file.write_text(shop)
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    printed = []

    def command(broker, *words, code=0):
        variables = {**os.environ, "ESCROWMQ_URL": broker.url, "SSL_CERT_FILE": str(broker.ca), "ESCROWMQ_TOKEN": shop}
        variables.pop("ESCROWMQ_TOKEN_FILE", None)
        done = subprocess.run([sys.executable, "-m", "escrowmq", *words], env=variables, capture_output=True, text=True)
        printed.append(done.stdout + done.stderr)
        assert done.returncode == code, done.stderr

    monkeypatch.delenv("ESCROWMQ_TOKEN_FILE", raising=False)
    environment = {"ESCROWMQ_TOKEN": shop}
    with running(tmp_path, rights, "--http", "127.0.0.1:0", environment=environment) as broker:
        with broker.connect(token=shop) as bus:
            printed += [repr(bus), repr(bus.router.links), str(vars(bus.router.links[0]))]
            producer = bus.producer("shop", checker=lambda check: mq.COMMIT)
            with producer.transaction() as txn:
                txn.send("t", b"x", key="k")
            [message] = bus.consumer("g", "t").receive(1, wait=PATIENT)
            message.ack()
            try:
                producer.send("%bad", b"x")
            except EscrowError as problem:
                printed.append(repr(problem))
                logging.getLogger("test").exception("with its traceback")
        engine = sa.create_engine(f"sqlite:///{tmp_path / 'shop.db'}")
        outbox.migrate(engine)
        with engine.begin() as connection:
            outbox.send_tx(connection, "t", b"by the relay", key="k")
        engine.dispose()
        command(
            broker,
            "outbox",
            "relay",
            "--database-url",
            f"sqlite:///{tmp_path / 'shop.db'}",
            "--once",
            "--to",
            broker.url,
        )
        for words in (
            ["status"],
            ["status", "--json"],
            ["find", "k"],
            ["whoami", "--json"],
            ["topics", "list"],
            ["acts", "list"],
        ):
            command(broker, *words)
        command(broker, "plan", "--help")
        command(broker, "backup", "--to", str(tmp_path / "backup"), code=7)
        command(broker, "topics", "create", "new", code=7)
        send = f"{broker.said['http']}/v1/topics/t/messages"
        printed.append(broker.http(send, shop, {"text": "x"})[1])
        printed.append(broker.http(send, shop[:-1], {"text": "x"})[1])
        line = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        printed.append(line)
        broker.process.kill()  # a crash
    printed += [broker.output, caplog.text, json.dumps(broker.said)]
    stored = io.BytesIO()
    for path in tmp_path.rglob("*"):
        if path.is_file() and path != token_file:
            stored.write(path.read_bytes())
    text = "\n".join(printed) + stored.getvalue().decode("latin-1")
    assert "by the relay" in text
    assert SECRET.findall(text) == []
    for secret in rights.tokens.values():
        assert secret[13:] not in text
