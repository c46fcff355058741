"""Ways to a broker that is not open to everybody: TLS, tokens with few rights, a Unix socket."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme
from celery_world import Workers, until
from kombu import Connection, Exchange, Producer, Queue
from test_celery_transport import Taking, publish, work_queue
from test_celery_workers import Make, send

import escrowmq.celery
from escrowmq.errors import Denied
from escrowmq.rights.tokens import new_token
from escrowmq_lab.servers import escrow

__all__ = ["escrowmq"]


@pytest.mark.parametrize("pool", ["solo"])
def test_tls_and_a_token_with_the_rights_of_a_service(tmp_path: Path, make_workers: Make, pool: str) -> None:
    """Which may make no topic, and list nothing."""
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1", "localhost")
    certificate, key, trusted = (tmp_path / name for name in ("broker.pem", "broker.key", "ca.pem"))
    own.private_key_pem.write_to_path(str(key))
    own.cert_chain_pems[0].write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(trusted))
    token, token_file, rights = new_token(), tmp_path / "celery.token", tmp_path / "rights.toml"
    token_file.write_text(token.text)
    entry = f'{{ id = "{token.identity}", sha256 = "{token.sha256}" }}'
    rights.write_text(f'[principals.celery]\ntokens = [{entry}]\nroles = ["service"]\n')
    flags = ("--rights", str(rights), "--tls-cert", str(certificate), "--tls-key", str(key))
    with escrow.serving(tmp_path, *flags) as server:
        url = server.url.replace("escrow:", "escrows:")
        with Connection(url, connect_timeout=0.5) as stranger, pytest.raises(stranger.connection_errors):
            stranger.connect()
        given = {"transport_options": {"tls": str(trusted)}, "connect_timeout": 60}
        with Connection(url, **given) as unknown, pytest.raises(Denied):
            unknown.connect()
        workers: Workers = make_workers(url, tls=str(trusted), token_file=str(token_file))
        workers.start(pool)
        send(workers, {"task": "note", "args": ["t"]})
        workers.wait_for("ended t")
        until(lambda: " ready." in workers.log(), "a worker with remote control")
        options = {"tls": str(trusted), "token_file": str(token_file)}
        with Connection(url, transport_options=options, connect_timeout=60) as connection:
            exchange = Exchange("news", type="fanout")
            taking = Taking(connection, Queue("news-mine", exchange, auto_delete=True))
            Producer(connection).publish("now", exchange=exchange)
            assert taking.drain(1) == ["now"]
            taking.close()


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    url = f"escrow+unix://{path}"
    with escrow.serving(tmp_path, "--socket", str(path)), Connection(url, connect_timeout=60) as connection:
        publish(connection, work_queue("q"), "x")
        message = work_queue("q")(connection.default_channel).get()
        assert message.payload == "x"
        message.ack()
