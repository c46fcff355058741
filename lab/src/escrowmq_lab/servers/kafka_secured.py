"""A single-node Kafka with two more listeners: TLS, and name and password. Requires ``keytool``, a part of Java."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from escrowmq.errors import Misuse
from escrowmq.pipeline.java import find_java, find_tool
from escrowmq_lab.servers import kafka
from escrowmq_lab.servers.process import Server, free_port, run
from escrowmq_lab.servers.seam import Absent

USER, PASSWORD = "escrow", "pa+ss&w?rd%"
"""The only accepted credentials, with characters that a URL must escape."""
_STORE_PASSWORD = "for-a-test"


@dataclass(frozen=True, slots=True)
class Secured:
    """A running server. ``server``: with the URL of the plain listener. ``tls``, ``sasl``: HOST:PORT of the others.
    ``certificate``: a PEM file, the server's own and the authority that signed it."""

    server: Server
    tls: str
    sasl: str
    certificate: Path


@contextmanager
def serving(folder: Path) -> Iterator[Secured]:
    """Run a server with its data in ``folder``. Raises :class:`Absent`."""
    folder.mkdir(parents=True, exist_ok=True)
    store, certificate = folder / "server.p12", folder / "server.pem"
    _make_certificate(store, certificate)
    tls, sasl = free_port(), free_port()
    login = f'org.apache.kafka.common.security.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
    settings = {
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,BESIDE0:SSL,BESIDE1:SASL_PLAINTEXT",
        "ssl.keystore.type": "PKCS12",
        "ssl.keystore.location": str(store),
        "ssl.keystore.password": _STORE_PASSWORD,
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.beside1.plain.sasl.jaas.config": login,
    }
    with kafka.serving(folder, beside=[("localhost", tls), ("127.0.0.1", sasl)], settings=settings) as server:
        yield Secured(server, f"localhost:{tls}", f"127.0.0.1:{sasl}", certificate)


def _make_certificate(store: Path, certificate: Path) -> None:
    try:
        tool = find_tool(find_java(), "keytool")
    except Misuse:
        raise Absent("Kafka needs Java 17; on Debian: apt-get install openjdk-17-jre-headless") from None
    if tool is None:
        raise Absent("a Kafka with TLS needs keytool; on Debian: apt-get install openjdk-17-jre-headless")
    opened = ["-keystore", str(store), "-storepass", _STORE_PASSWORD, "-storetype", "PKCS12", "-alias", "server"]
    names = ["-dname", "CN=localhost", "-ext", "SAN=DNS:localhost,IP:127.0.0.1"]
    quick = ["-J-XX:TieredStopAtLevel=1"]
    run(
        [
            str(tool),
            *quick,
            "-genkeypair",
            "-keyalg",
            "EC",
            "-groupname",
            "secp256r1",
            "-validity",
            "2",
            *names,
            *opened,
        ]
    )
    run([str(tool), *quick, "-exportcert", "-rfc", "-file", str(certificate), *opened])
