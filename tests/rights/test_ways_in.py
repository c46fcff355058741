"""Every way into a broker with rights: tokens and certificates over the carrier, HTTP, metrics, services inside the
broker's process; certificates that change or do not fit; and a secret that must stay one.
"""

import datetime as dt
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import trustme
from guarded_broker import RightsFile, guarded
from rights_process import running, until
from served import PATIENT

import escrowmq as mq
from escrowmq.broker.serving import server as serving
from escrowmq.broker.serving.certificates import ServerCertificate
from escrowmq.errors import Code, Denied, EscrowError, Misuse, Unknown
from escrowmq.ledger.commands import Forget
from escrowmq.rights import failures
from escrowmq.rights.tokens import new_token
from escrowmq.wire import frames
from escrowmq.wire.credential import Credential


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


@pytest.mark.invariant("I45")
def test_tokens_certificates_http_and_metrics_are_one_principal(tmp_path, rights):
    with running(tmp_path, rights, "--http", "127.0.0.1:0", "--metrics", "127.0.0.1:0") as broker:
        shop, boss, nobody = (rights.tokens[name] for name in ("shop", "boss", "nobody"))
        with broker.connect(token=shop) as bus:
            bus.producer("shop").send("t", b"by token")
            assert bus.admin.whoami()[0]["principal"] == "shop"
            with pytest.raises(Denied, match="shop may not send to topic u: it needs `send u`"):
                bus.producer("shop").send("u", b"x")
        made = broker.authority.issue_cert("shop.example")
        pem, key = tmp_path / "shop.pem", tmp_path / "shop.key"
        pem.write_bytes(b"".join(one.bytes() for one in made.cert_chain_pems))
        key.write_bytes(made.private_key_pem.bytes())
        with broker.connect(certificate=(str(pem), str(key))) as bus:
            bus.producer("shop").send("t", b"by certificate")
            assert bus.admin.whoami()[0]["authenticated_by"] == "certificate shop.example"
        http = broker.said["http"]
        assert http.startswith("https://")
        message = {"text": "by HTTP"}
        send = f"{http}/v1/topics/t/messages"
        assert broker.http(send, shop, message)[0] == 200
        for token, status, name in (
            (None, 401, "UNAUTHENTICATED"),
            ("emq_wrong", 401, "UNAUTHENTICATED"),
            (nobody, 403, "DENIED"),
        ):
            code, text = broker.http(send, token, message)
            assert (code, json.loads(text)["name"]) == (status, name)
        assert broker.http(f"{http}/v1/topics", shop)[0] == 403
        assert broker.http(f"{http}/v1/topics", boss)[0] == 200
        assert broker.http(f"{http}/healthz")[0] == 200
        metrics = broker.said["metrics"]
        assert [broker.http(f"{metrics}/metrics", token)[0] for token in (None, shop, boss)] == [401, 403, 200]
        assert "escrowmq_denied_total" in broker.http(f"{metrics}/metrics", boss)[1]
        assert broker.http(f"{metrics}/healthz")[0] == 200
        with broker.connect(token=boss) as bus:
            bodies = {row["body"] for row in bus.admin.read("t").read_all().to_pylist()}
            assert bodies == {b"by token", b"by certificate", b"by HTTP"}
            needed = {(one["principal"], one["needs"]) for one in bus.admin.denials()[0]["denials"]}
            assert {("shop", "send u"), ("nobody", "produce gateway"), ("shop", "view")} <= needed
            assert bus.admin.hello()[0]["rights"]
        waiting = []
        receive = f"{http}/v1/consumers/g/receive"
        unsent = {"topics": ["t"], "tags": ["none"], "start": "latest", "wait": 0}
        assert broker.http(receive, shop, unsent)[0] == 200
        thread = threading.Thread(target=lambda: waiting.append(broker.http(receive, shop, {"wait": 30})))
        thread.start()
        rights.remove("shop")
        rights.write()
        until(lambda: broker.http(send, shop, message)[0] == 401)
        thread.join()
        assert waiting[0][0] == 401, waiting
        broker.process.send_signal(signal.SIGHUP)
        with broker.connect(token=boss) as bus:
            [link] = bus.router.links
            link.action("rights.reload", {}, PATIENT)
            acts = link.action("acts.list", {}, PATIENT)["acts"]
        assert [(act["act"], act["by"]) for act in acts] == [("rights.reload", "the file changed")]


def test_tokens_of_others_do_not_share_a_connection_of_the_gateway(tmp_path, rights):
    rights.add("other", "send t", "produce gateway")
    with running(tmp_path, rights, "--http", "127.0.0.1:0", tls=False) as broker:
        send = f"{broker.said['http']}/v1/topics/t/messages"
        for _ in range(3):
            for name in ("shop", "nobody", "other"):
                status, _ = broker.http(send, rights.tokens[name], {"text": name})
                assert status == (403 if name == "nobody" else 200)


def test_a_client_reads_its_token_file_again_when_it_connects(tmp_path, rights):
    file = tmp_path / "token"
    file.write_text(rights.tokens["shop"] + "\n")
    with guarded(tmp_path, rights) as served, mq.connect(f"escrow://127.0.0.1:{served.port}", token_file=file) as bus:
        producer = bus.producer("shop")
        producer.send("t", b"1")
        fresh = new_token()
        rights.tokens["shop"] = fresh.text
        rights.add("shop", "send t", "produce shop")
        file.write_text(fresh.text)
        rights.write()
        served.guard.reload()  # closes the connection of the old token
        producer.send("t", b"2")


@pytest.mark.parametrize(
    ("host", "private"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("broker.example", False)]
)
def test_a_token_never_leaves_the_machine_without_tls(host, private):
    if private:
        mq.connect(f"escrow://{host}:1", token="emq_x").close()
        return
    with pytest.raises(Misuse, match="escrows://"):
        mq.connect(f"escrow://{host}:1", token="emq_x")


def test_credentials_that_are_none_are_refused(tmp_path):
    with pytest.raises(Misuse):
        mq.connect("escrow://127.0.0.1:1", token="a", token_file="b")
    with pytest.raises(Misuse):
        mq.connect("escrow://127.0.0.1:1", token=7)
    (tmp_path / "empty").touch()
    for file in (tmp_path / "empty", tmp_path / "absent", tmp_path):
        with mq.connect("escrow://127.0.0.1:1", token_file=file) as bus, pytest.raises(Misuse, match="token file"):
            bus.producer("p", timeout=PATIENT).send("t", b"x")


def test_the_environment_is_used_unless_an_option_says_otherwise(tmp_path):
    variables = {"ESCROWMQ_TOKEN_FILE": str(tmp_path / "f")}
    (tmp_path / "f").write_text("from the file\n")
    assert Credential.choose(None, None, variables).read() == "from the file"
    assert Credential.choose("given", None, variables).read() == "given"
    assert Credential.choose("", None, variables).read() is None
    assert Credential.choose(None, None, {"ESCROWMQ_TOKEN": "t"}).read() == "t"
    assert not Credential.choose(None, None, {}).is_set


def test_a_renewed_certificate_serves_new_connections_and_no_call_fails(tmp_path, rights):
    with running(tmp_path, rights) as broker:
        errors, stop, sent = [], threading.Event(), []

        def work(number):
            try:
                while not stop.is_set():
                    with broker.connect(token=rights.tokens["shop"]) as bus:  # a new connection each time
                        producer = bus.producer("shop", instance=f"i{number}", timeout=PATIENT)
                        for _ in range(5):
                            sent.append(producer.send("t", b"x"))
            except Exception as problem:
                errors.append(problem)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        old = serial(broker)
        for _ in range(3):
            broker.issue()
            until(lambda old=old: serial(broker) != old)
            old = serial(broker)
            count = len(sent)
            until(lambda count=count: len(sent) > count + 20 or errors)
        stop.set()
        for thread in threads:
            thread.join()
        assert errors == []


def serial(broker):
    """The serial number of the certificate that a new connection sees."""
    import socket

    host, _, port = broker.url.partition("://")[2].rpartition(":")
    context = ssl.create_default_context(cafile=broker.ca)
    plain = socket.create_connection((host, int(port)), PATIENT)
    with context.wrap_socket(plain, server_hostname=host) as secure:
        return secure.getpeercert()["serialNumber"]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_key_that_others_can_read_is_named(tmp_path, mode, caplog):
    made = trustme.CA().issue_cert("127.0.0.1")
    certificate, key = tmp_path / "broker.pem", tmp_path / "broker.key"
    made.cert_chain_pems[0].write_to_path(certificate)
    made.private_key_pem.write_to_path(key)
    key.chmod(mode)
    ServerCertificate(certificate, key)
    assert ("can read the private key" in caplog.text) == (mode != 0o600)


def test_half_of_a_new_certificate_changes_nothing(tmp_path, rights):
    with running(tmp_path, rights) as broker:
        old = serial(broker)
        broker.certificate.write_bytes(broker.certificate.read_bytes()[:200])
        until(lambda: "the former certificate stays" in broker.log.read_text())
        assert serial(broker) == old
        with broker.connect(token=rights.tokens["shop"]) as bus:
            bus.producer("shop").send("t", b"x")
    assert "the former certificate stays" in broker.output


def refusal(bus, match):
    """Send until the error says why: a busy broker may not have answered a first try in its time."""

    def is_said():
        with pytest.raises(Unknown) as caught:
            bus.producer("shop", timeout=3).send("t", b"x")
        return re.search(match, str(caught.value))

    until(is_said)


def test_each_certificate_that_does_not_fit_has_its_message(tmp_path, rights):
    with running(tmp_path, rights) as broker:
        foreign = tmp_path / "foreign.pem"
        trustme.CA().cert_pem.write_to_path(foreign)
        token = rights.tokens["shop"]
        with mq.connect(broker.url, tls=str(foreign), token=token) as bus:
            refusal(bus, "not trusted")
        url = broker.url.replace("127.0.0.1", "localhost")
        with mq.connect(url, tls=str(broker.ca), token=token) as bus:
            refusal(bus, r"not valid for|doesn't match")
        old = serial(broker)
        broker.issue(not_after=dt.datetime.now(dt.UTC) - dt.timedelta(days=1))

        def is_expired():
            try:
                return serial(broker) == "" and old == ""
            except ssl.SSLCertVerificationError as problem:
                return "expired" in problem.verify_message

        until(is_expired)
        with broker.connect(token=token) as bus:
            refusal(bus, "expired")


def test_many_wrong_greetings_leave_the_others_served(tmp_path, rights):
    with guarded(tmp_path, rights) as served:
        stop, guesses = threading.Event(), []

        def guess():
            while not stop.is_set():
                try:
                    served.client(token="emq_guess")
                except (EscrowError, OSError, AttributeError) as problem:
                    guesses.append(problem)

        threads = [threading.Thread(target=guess, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        with mq.connect(f"escrow://127.0.0.1:{served.port}", token=rights.tokens["shop"]) as bus:
            producer = bus.producer("shop", timeout=PATIENT)
            until(lambda: len(guesses) > 20)
            for number in range(50):
                producer.send("t", b"%d" % number)
        stop.set()
        for thread in threads:
            thread.join()
        assert served.guard.unauthenticated > 20
        assert served.guard.failures.delay("127.0.0.1") > 0


def test_strangers_wait_for_the_next_check_when_they_have_had_their_time(tmp_path, rights, monkeypatch):
    monkeypatch.setattr(serving, "STRANGERS_SECONDS", 0.0)
    monkeypatch.setattr(failures, "DELAY_SECONDS", 0.0)
    with guarded(tmp_path, rights) as served, served.client(token=rights.tokens["boss"]) as known:
        began = time.monotonic()
        for number in range(5):
            with pytest.raises(Denied):
                served.client(token="emq_guess")
            assert known.act("health")["status"] == "ok", number
        assert time.monotonic() - began > 3 * serving.LOOK_SECONDS, "one in each of five checks"
        served.client(token=rights.tokens["boss"]).socket.close()


def test_suspects_are_closed_unread_while_too_many_refusals_are_delayed(tmp_path, rights, monkeypatch):
    for name, value in (("MOST_WAITING", 3), ("DELAY_SECONDS", 1e6), ("FAILURE_SECONDS", 1e6)):
        monkeypatch.setattr(failures, name, value)

    def is_closed_unread():
        with served.client(greet=False) as suspect:
            try:
                suspect.send(frames.hello(rights.tokens["boss"]))
            except ConnectionError:
                return True
            return suspect.next() is None

    with guarded(tmp_path, rights) as served, served.client(token=rights.tokens["boss"]) as known, ExitStack() as held:
        for number in range(failures.FREE_FAILURES):
            with pytest.raises(Denied):
                served.client(token=f"emq_{number}")
        for number in range(3):
            guesser = held.enter_context(served.client(greet=False))
            guesser.send(frames.hello(f"emq_guess_{number}"))
        served.until(lambda: served.guard.unauthenticated == failures.FREE_FAILURES + 3)
        before = served.server.accepted
        assert is_closed_unread(), "even with a token that is known"
        assert served.server.accepted == before
        assert known.act("health")["status"] == "ok"
        monkeypatch.setattr(failures, "DELAY_SECONDS", 0.0)
        assert not is_closed_unread()


def test_a_token_is_shown_by_no_text_of_the_client():
    credential = Credential(token="emq_secret")
    assert "secret" not in repr(credential)
    with pytest.raises(Misuse):
        __import__("pickle").dumps(credential)
    assert Code.UNAUTHENTICATED.branch is Denied


def test_a_consumer_and_a_reader_of_a_revoked_token_end_with_the_reason(tmp_path, rights):
    with guarded(tmp_path, rights) as served:
        url, token = f"escrow://127.0.0.1:{served.port}", rights.tokens["shop"]
        with mq.connect(url, token=token) as bus, mq.connect(url, token=token) as other:
            bus.producer("shop").send("t", b"x")
            ends, begun = [], threading.Barrier(3)

            def run(work):
                try:
                    work(begun)
                except EscrowError as problem:
                    ends.append(problem)

            def consume(begun):
                for number, message in enumerate(bus.consumer("g", "t").messages()):
                    message.ack()
                    if not number:
                        begun.wait(PATIENT)

            def follow(begun):
                for number, _ in enumerate(other.reader("t", start="earliest").batches()):
                    if not number:
                        begun.wait(PATIENT)

            threads = [threading.Thread(target=run, args=(work,)) for work in (consume, follow)]
            for thread in threads:
                thread.start()
            begun.wait(PATIENT)
            rights.remove("shop")
            rights.write()
            for thread in threads:
                thread.join(PATIENT)
            assert [problem.code for problem in ends] == [Code.UNAUTHENTICATED] * 2


def test_brokers_with_different_rights_are_seen_in_the_status(tmp_path, rights):
    (tmp_path / "other").mkdir()
    changed = RightsFile(tmp_path / "other")
    changed.tokens = dict(rights.tokens)
    changed.add("boss", "view")
    with guarded(tmp_path, rights) as one, guarded(tmp_path / "other", changed) as two:
        url = f"escrow://127.0.0.1:{one.port},127.0.0.1:{two.port}"
        variables = {**os.environ, "ESCROWMQ_TOKEN": rights.tokens["boss"]}
        words = [sys.executable, "-m", "escrowmq", "status", "--url", url]
        done = subprocess.run(words, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for served in (one, two):
            assert f"127.0.0.1:{served.port} {served.guard.rights.digest}" in done.stderr
        done = subprocess.run([*words, "--json"], env=variables, capture_output=True, text=True)
        digests = {broker["rights"] for broker in json.loads(done.stdout)["brokers"]}
        assert digests == {one.guard.rights.digest, two.guard.rights.digest}


@pytest.mark.verify
def test_a_benchmark_measures_a_broker_with_rights_and_tls(tmp_path, rights):
    rights.add("bench", "send *", "produce *")
    bench = Path(__file__).parents[2] / "bench"
    with running(tmp_path, rights) as broker:
        command = [sys.executable, "-m", "escrowmq_lab", "bench", "transactions", "--folder", str(bench), "--json"]
        command += ["--url", broker.url, "--only", "64 threads", "--seconds", "0.1", "--repeats", "1"]

        def measure(token):
            variables = {**os.environ, "SSL_CERT_FILE": str(broker.ca), "ESCROWMQ_TOKEN": token}
            return subprocess.run(command, env=variables, capture_output=True, text=True)

        measured = measure(rights.tokens["bench"])
        assert measured.returncode == 0, measured.stderr
        report = json.loads(measured.stdout)
        assert [(one["name"], one["median"] > 0) for one in report["figures"]] == [("64 threads", True)]
        assert report["settings"]["broker"] == broker.url
        unknown = measure("emq_wrong")
        assert unknown.returncode != 0
        assert "UNAUTHENTICATED" in unknown.stderr


def test_a_producer_whose_session_is_forgotten_opens_another_one(tmp_path):
    rights = RightsFile(tmp_path)
    token = rights.add("shop", "send t", "produce shop", "view")
    with guarded(tmp_path, rights) as served, mq.connect(f"escrow://127.0.0.1:{served.port}", token=token) as bus:
        producer = bus.producer("shop")
        producer.send("t", b"0")
        nobody = np.array([], np.int64)
        assert served.engine.submit(Forget(before_us=1 << 62, connected=nobody)).result(PATIENT) == 1
        producer.send("t", b"1")
        assert {one["group"] for one in bus.admin.producers()} == {"shop"}
