"""``escrowmq rocketmq``: RocketMQ 5 clients over a broker."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer import Option

from escrowmq.cli.options import DEFAULT_URL, ServerLogOptions, Url
from escrowmq.cli.serve import (
    AccessKeysFile,
    Fifo,
    Insecure,
    Listen,
    ReadyJson,
    TlsCert,
    TlsKey,
    announce_ready,
    gateway_settings,
)
from escrowmq.errors import Code, error
from escrowmq.platform.descriptors import raise_descriptor_limit


@dataclass
class _Rocketmq:
    """Where RocketMQ clients are served, and how."""

    listen: Listen = "127.0.0.1:8081"
    second: str = Option(
        "127.0.0.1:8082",
        metavar="HOST:PORT",
        help="Another port of the same service. Clients are sent to the one or the other, so that they connect again "
        "after a restart.",
    )
    advertise: str | None = Option(
        None, metavar="HOST", help="The host that clients are sent to; by default the one by which they come."
    )
    fifo: Fifo = None
    access_keys: AccessKeysFile = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    insecure: Insecure = False


def rocketmq(
    options: _Rocketmq,
    log: ServerLogOptions,
    url: Url = DEFAULT_URL,
    config: Path | None = Option(None, help="A TOML file with a table \\[gateway]."),
    json: ReadyJson = False,
) -> None:
    """Serve RocketMQ 5 clients (gRPC, apache.rocketmq.v2), unchanged, until SIGTERM or Ctrl-C.

    With --json one line is printed on standard output once calls are accepted:
    {"rocketmq": "127.0.0.1:8081", "second": "127.0.0.1:8082", "url": "escrow://127.0.0.1:7700", "pid": 1}.
    """
    from escrowmq.gateway.rocketmq import RocketmqOptions
    from escrowmq.gateway.rocketmq import serve as run

    log.start()
    if (options.tls_cert is None) != (options.tls_key is None):
        raise error(Code.BAD_ARGUMENT, "--tls-cert and --tls-key belong together", "give both")

    def announce(ready: dict[str, Any]) -> None:
        announce_ready(ready | {"url": url}, json, f"serving RocketMQ clients at {ready['rocketmq']} for {url}")

    raise_descriptor_limit()
    served = RocketmqOptions(
        listen=options.listen,
        second=options.second,
        advertise=options.advertise,
        fifo=tuple(options.fifo or ()),
        keys=options.access_keys,
        certificate=options.tls_cert,
        key=options.tls_key,
        insecure=options.insecure,
    )
    run(url, served, settings=gateway_settings(config), announce=announce)
