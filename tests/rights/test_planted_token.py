"""Tokens are found in nothing that a complete run printed, logged, drew or stored. Excepted are the files that were
made to hold them."""

import json
import logging
import os
import re
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from guarded_broker import RightsFile
from rights_process import running

import escrowmq as mq
from escrowmq import outbox
from escrowmq.console.views.table import VIEWS
from escrowmq.errors import EscrowError

pytestmark = [pytest.mark.spark, pytest.mark.verify, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
SECRET = re.compile(r"emq_[A-Za-z0-9]{8}_[A-Za-z0-9_-]{43}")
FAILS = """
import os, sys, traceback
import escrowmq as mq
for options in ({}, {"token": os.environ["ESCROWMQ_TOKEN"] + "x"}, {"token_file": os.environ["ESCROWMQ_TOKEN_FILE"]}):
    try:
        with mq.connect(sys.argv[1], **options) as bus:
            bus.producer("nobody", timeout=5).send("t", b"x")
    except mq.errors.EscrowError as problem:
        inner = problem.__traceback__
        while inner.tb_next is not None and "escrowmq/" not in inner.tb_frame.f_code.co_filename:
            inner = inner.tb_next  # the locals of this program are its own
        print("".join(traceback.TracebackException(type(problem), problem, inner, capture_locals=True).format()))
raise SystemError("a crash")
"""


class Run:
    """Commands beside a broker, with the token in the environment, and everything that was printed."""

    def __init__(self, broker, folder, token, file):
        self.broker, self.folder, self.printed = broker, folder, []
        self.variables = {
            **os.environ,
            "ESCROWMQ_URL": broker.url,
            "SSL_CERT_FILE": str(broker.ca),
            "ESCROWMQ_PLANS": str(folder / "plans"),
            "TMPDIR": str(folder / "tmp"),
        }
        for name in ("ESCROWMQ_TOKEN", "ESCROWMQ_TOKEN_FILE"):
            self.variables.pop(name, None)
        self.by_text, self.by_file = {"ESCROWMQ_TOKEN": token}, {"ESCROWMQ_TOKEN_FILE": str(file)}
        (folder / "tmp").mkdir()

    def python(self, *words, code=0, **more):
        """Run a Python program to its end. Returns its standard output."""
        with subprocess.Popen(
            [sys.executable, *words],
            env={**self.variables, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            out, err = process.communicate()
        self.printed += [out, err]
        assert process.returncode == code, err[-5000:]
        return out

    def command(self, *words, code=0):
        """Run a command with the token as text, as a file, and with all that it logs."""
        return self.python("-m", "escrowmq", *words, code=code, **self.by_text)

    def watch_processes(self, stop):
        """What ``ps`` shows of all processes, until told to stop."""
        seen = set()
        while not stop.wait(0.2):
            seen |= set(subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout.splitlines())
        self.printed.append("\n".join(seen))


@pytest.fixture
def rights(tmp_path):
    file = RightsFile(tmp_path)
    rules = [f"{access} {prefix}*" for access in ("send", "read") for prefix in ("t", "escrow")]
    file.add("shop", *rules, "produce *", "consume *", "view", "act *", "admin")
    file.add("other", "read t")
    return file


@pytest.mark.invariant("I45")
def test_a_planted_token_is_found_nowhere(tmp_path, rights, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    state = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    shop, file = rights.tokens["shop"], tmp_path / "shop.token"
    file.write_text(f"{shop}\n")
    served = ["--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--console", "127.0.0.1:0", "--log-level", "debug"]
    stop = threading.Event()
    with running(tmp_path, rights, *served, environment={"ESCROWMQ_TOKEN_FILE": str(file)}) as broker:
        run = Run(broker, tmp_path, shop, file)
        watching = threading.Thread(target=run.watch_processes, args=(stop,))
        watching.start()
        try:
            use_a_client(run, shop)
            use_commands(run)
            use_http(run, shop)
            visit_pages(run, shop)
            use_spark(run)
            run.python("-X", "dev", "-c", FAILS, broker.url, code=1, **run.by_text, **run.by_file)
            assert "a crash" in run.printed[-1]
        finally:
            stop.set()
            watching.join()
        broker.process.kill()  # a crash
    printed = "\n".join([*run.printed, broker.output, caplog.text, json.dumps(broker.said)])
    stored = {
        path: path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file() and path != file
    }
    names = " ".join(str(path) for path in stored)
    for part in (
        "backup.json",
        "events/",
        "checkpoint/",
        "ui-0.html",
        "plan.json",
        "findings/",
        ".segment",
        "rights.toml",
    ):
        assert part in names, f"the run made no {part}: {names}"
    for word in ("Traceback", "RUNNABLE", "escrowmq_denied_total", "pyspark", "Log out", '"principal"', "by the relay"):
        assert word in printed or any(word in text for text in stored.values()), f"the run showed no {word}"
    for where, text in [("printed", printed), *stored.items()]:
        assert SECRET.findall(text) == [], where
        for secret in rights.tokens.values():
            assert secret[13:] not in text, where


def use_a_client(run, token):
    with run.broker.connect(token=token) as bus:
        run.printed += [repr(bus), repr(bus.router.links), str(vars(bus.router.links[0]))]
        producer = bus.producer("shop", checker=lambda check: mq.COMMIT)
        with producer.transaction() as txn:
            txn.send("t", b"x", key="k")
        consumer = bus.consumer("g", "t", max_attempts=1)
        [message] = consumer.receive(1, wait=60)
        message.nack(cause="not today")
        consumer.close()
        for call in (lambda: producer.send("%bad", b"x"), lambda: producer.send("forbidden", b"x")):
            try:
                call()
            except EscrowError as problem:
                run.printed.append(repr(problem))
                logging.getLogger("test").exception("with its traceback")


def use_commands(run):
    database = f"sqlite:///{run.folder / 'shop.db'}"
    engine = sa.create_engine(database)
    outbox.migrate(engine)
    with engine.begin() as connection:
        connection.execute(sa.text("create table orders (id varchar(36) primary key)"))
        connection.execute(sa.text("insert into orders values ('k')"))
        outbox.send_tx(connection, "t", b"by the relay", key="k")
    engine.dispose()
    run.command("outbox", "relay", "--database-url", database, "--once", "--to", run.broker.url)
    for words in (["status"], ["status", "--json"]):
        run.command(*words, code=1)  # a dead letter needs an operator
    for words in (
        ["find", "k", "--json"],
        ["whoami", "--json"],
        ["topics", "list", "--json"],
        ["acts", "list", "--json"],
        ["rights", "denied", "--json"],
        ["plan", "make", "dead_letters.retry", "--group", "g", "--why", "a test", "--json"],
        ["plan", "list", "--json"],
        ["backup", "--to", str(run.folder / "backup"), "--json"],
    ):
        run.command(*words)
    plan = json.loads(run.command("plan", "list", "--json"))[0]["id"]
    run.command("plan", "run", plan, "--yes", "--json")
    run.python("-m", "escrowmq", "send", "forbidden", "x", "--group", "shop", code=7, **run.by_file)


def use_http(run, token):
    http, metrics = run.broker.said["http"], run.broker.said["metrics"]
    for body in ({"text": "x"}, {"text": 7}):
        for one in (token, token[:-1]):
            run.printed.append(run.broker.http(f"{http}/v1/topics/t/messages", one, body)[1])
    for address in (f"{metrics}/metrics", f"{http}/openapi.json", f"{http}/docs", f"{http}/v1/lookup?key=k"):
        run.printed.append(run.broker.http(address, token)[1])


def visit_pages(run, token):
    url = run.broker.said["console"]
    context = ssl.create_default_context(cafile=run.broker.ca)
    with httpx.Client(base_url=url, verify=context, trust_env=False, timeout=60.0) as browser:
        page = browser.get("/login").text
        form = {"token": page.partition('name="token" value="')[2][:64], "access_token": token}
        wrong = browser.post("/login", data={**form, "access_token": token[:-1]}, headers={"Origin": url})
        answer = browser.post("/login", data=form, headers={"Origin": url})
        assert (wrong.status_code, answer.status_code) == (401, 303)
        run.printed += [wrong.text, str(answer.headers)]
        for path, methods, _ in VIEWS:
            if "GET" in methods:
                address = path.format(topic="t", group="g", id="x", number="1") + "?q=k"
                answer = browser.get(address)
                run.printed.append(f"{answer.text}{answer.headers}")


def use_spark(run):
    program = str(HERE / "planted_spark.py")
    run.python(program, run.broker.url, str(run.folder), run.by_file["ESCROWMQ_TOKEN_FILE"], code=1, **run.by_text)
    assert "forbidden" in run.printed[-1]  # the last step
    audit = run.folder / "audit"
    audit.mkdir()
    table = {"database": str(run.folder / "shop.db"), "table": "orders", "id": "id"}
    compared = [{"expected": "table:orders", "found": "topic:t", "columns": []}]
    manifest = {"log": run.broker.url, "tables": {"orders": table}, "topics": ["t"], "comparisons": compared}
    (audit / "manifest.json").write_text(json.dumps(manifest))
    run.python("-m", "escrowmq", "audit", str(audit), "--json", code=1, **run.by_file)  # "k" is there twice
    words = ["reconcile", "--half", "%half", "--commits", "t", "--out", str(run.folder / "findings"), "--json"]
    run.python("-m", "escrowmq", *words, code=1, **run.by_file)  # plain messages are no half messages
