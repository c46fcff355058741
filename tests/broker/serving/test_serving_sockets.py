"""Where a broker listens: a port, a Unix socket, either with TLS or without, and what cannot be."""

import socket
import threading
from contextlib import contextmanager

import pytest
import trustme
from served import PATIENT, Client

import escrowmq as mq
from escrowmq.broker.serving.certificates import ServerCertificate
from escrowmq.broker.serving.serve import serve
from escrowmq.errors import Code, Misuse
from escrowmq.wire.actions.brokers import Hello
from escrowmq.wire.frames import Kind
from wire_conformance import check


@contextmanager
def serving(folder, **options):
    """What it announced; it stops at the end, and cleanly."""
    stop, announced, told, codes = threading.Event(), threading.Event(), {}, []

    def announce(facts):
        told.update(facts)
        announced.set()

    options = {"listen": "127.0.0.1:0", **options}
    thread = threading.Thread(target=lambda: codes.append(serve(folder, announce=announce, stop=stop, **options)))
    thread.start()
    assert announced.wait(PATIENT)
    try:
        yield told
    finally:
        stop.set()
        thread.join(PATIENT)
    assert codes == [0]


def test_a_unix_socket_beside_the_port(tmp_path):
    path = tmp_path / "socket"
    with serving(tmp_path / "data", path=path) as told:
        assert told["socket"] == str(path)
        assert path.stat().st_mode & 0o777 == 0o600
        with (
            Client(int(told["url"].rpartition(":")[2])) as by_port,
            Client(0, family=socket.AF_UNIX, address=str(path)) as by_path,
        ):
            for client in (by_port, by_path):
                check(client.hello, Hello, "hello")
                assert (client.hello["shard"], client.hello["epoch"]) == (told["shard"], told["epoch"])
            assert by_path.plain(b"x")[0][0] == Code.OK
            stats = by_port.act("stats")
            assert (stats["connections"], stats["requests_total"]) == (2, 2)
    assert not path.exists()


def test_a_unix_socket_alone(tmp_path):
    path = tmp_path / "socket"
    with serving(tmp_path / "data", listen="none", path=path) as told:
        assert told["url"] == f"escrow+unix://{path}"
        with mq.connect(told["url"]) as bus:
            bus.producer("p").send("t", b"x")
            assert [message["body"] for message in bus.admin.read("t").read_all().to_pylist()] == [b"x"]
    with pytest.raises(Misuse, match="nowhere"):
        serve(tmp_path / "data", listen="none")


def test_a_path_that_cannot_be_had_is_said(tmp_path):
    for path in (tmp_path / "absent" / "socket", tmp_path / ("x" * 200)):
        with pytest.raises(Misuse) as caught:
            serve(tmp_path / "data", listen="127.0.0.1:0", path=path)
        assert caught.value.code is Code.BAD_URL


def test_a_clean_stop_says_goodbye(tmp_path):
    with serving(tmp_path / "data") as told:
        client = Client(int(told["url"].rpartition(":")[2]))
    with client:
        assert [frame.kind for frame in client.closed()] == [Kind.GONE]


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def secure(authority, tmp_path):
    """A broker whose certificate is for 127.0.0.1, and the file with its authority."""
    certificate = authority.issue_cert("127.0.0.1")
    chain, key, trusted = tmp_path / "chain.pem", tmp_path / "key.pem", tmp_path / "authority.pem"
    chain.write_bytes(b"".join(one.bytes() for one in certificate.cert_chain_pems))
    key.write_bytes(certificate.private_key_pem.bytes())
    key.chmod(0o600)
    authority.cert_pem.write_to_path(trusted)
    with serving(tmp_path / "data", tls=ServerCertificate(chain, key)) as told:
        yield told, trusted


def test_tls_from_a_transaction_to_its_delivery(secure):
    told, trusted = secure
    assert told["url"].startswith("escrows://")
    body = bytes(range(256)) * 12_000  # of many records
    for url, tls in ((told["url"], trusted), (told["url"].replace("escrows", "escrow"), str(trusted))):
        with mq.connect(url, tls=tls) as bus:
            with bus.producer("p", checker=lambda check: mq.COMMIT).transaction() as txn:
                txn.send("t", body)
            consumer = bus.consumer("g", "t")
            [message] = consumer.receive(10, wait=60.0)
            assert message.body == body
            message.ack()
            assert {row["body"] for row in bus.admin.read("t").read_all().to_pylist()} == {body}


def says_why(url, text, **given):
    """A send fails for this reason. A second may be too short for the handshake that gives it."""
    for timeout in (1, 60):
        with mq.connect(url, **given) as bus, pytest.raises(mq.Unknown) as caught:
            bus.producer("p", timeout=timeout).send("t", b"x")
        if text in str(caught.value):
            return
    raise AssertionError(str(caught.value))


def test_who_is_not_trusted_or_speaks_no_tls_is_told_so(secure, tmp_path):
    told, trusted = secure
    says_why(told["url"], "certificate is not trusted")
    says_why(told["url"].replace("escrows", "escrow"), "escrows://")
    with serving(tmp_path / "plain") as plain:
        says_why(plain["url"], "does the broker speak TLS", tls=trusted)
        with mq.connect(plain["url"]) as bus:
            assert bus.admin.health()[0]["status"] == "ok"


@pytest.mark.parametrize(("tls", "code"), [(7, Code.BAD_ARGUMENT), ("no such file", Code.BAD_SETTING)])
def test_tls_that_is_none_is_refused(tls, code):
    with pytest.raises(Misuse) as caught:
        mq.connect("escrow://127.0.0.1:1", tls=tls)
    assert caught.value.code is code
