"""``escrowmq serve`` and ``escrowmq gateway``: a broker on the network, and HTTP over brokers."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.flags import HelpAll
from escrowmq.cli.options import DEFAULT_URL, LogJson, LogLevel, Url, start_log
from escrowmq.cli.printing import notice, print_json_line, print_rows
from escrowmq.errors import Code, error
from escrowmq.platform.descriptors import raise_descriptor_limit
from escrowmq.settings import BrokerSettings

if TYPE_CHECKING:
    import ssl

    from escrowmq.broker.serving.brokers import Replication
    from escrowmq.broker.serving.certificates import ServerCertificate
    from escrowmq.broker.serving.serve import Beside, Connect
    from escrowmq.gateway.webhooks import Webhooks
    from escrowmq.wire import Link

SWITCH_SECONDS = 0.001
"""Thread switch interval (s): how long a broker thread may delay another that has a request or response."""

webhooks = typer.Typer(no_args_is_help=True, help="Webhooks for parked transactions, dead letters and other events.")

Listen = Annotated[
    str, typer.Option("--listen", "-l", metavar="HOST:PORT", help="Where to listen; port 0: any free one.")
]
Ask = Annotated[
    list[str] | None,
    typer.Option("--ask", metavar="GROUP=URL", help="Where check-backs of a producer group go; may be given again."),
]
Webhook = Annotated[
    list[str] | None,
    typer.Option(
        "--webhook",
        metavar="EVENTS=URL",
        help="Notify this address of events, such as parked,dead:10/1min=http://127.0.0.1:9000/hook; may be given "
        "again (docs/webhooks.md).",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option("--tls-cert", metavar="FILE", help="Serve over TLS: the certificate and its chain, PEM."),
]
TlsKey = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key, PEM, without a password.")
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without TLS and credentials.")]
ReadyJson = Annotated[bool, typer.Option("--json", help="When ready, one JSON line with the addresses.")]


def serve(
    folder: Annotated[Path, typer.Option("--folder", "-d", help="The data folder; made if it is not there.")] = Path(
        "escrow-data"
    ),
    listen: Listen = "127.0.0.1:7700",
    log: Annotated[
        str | None,
        typer.Option(
            "--log",
            envvar="ESCROWMQ_LOG",
            metavar="kafka://HOST:PORT,.../TOPIC[/PARTITION][?config=FILE]",
            help="The log is kept by Kafka and shared with other brokers, one of which leads; the folder has a copy "
            "(docs/failover.md).",
        ),
    ] = None,
    silence: Annotated[
        float | None,
        typer.Option(
            "--silence",
            help="With --log: seconds without a sign of the leader after which this broker takes over; 2.",
        ),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option("--advertise", metavar="URL", help="With --log: the address for clients, if it is not --listen."),
    ] = None,
    replicas: Annotated[
        str | None,
        typer.Option(
            "--replicas", metavar="escrow://A|B", help="With --log: all brokers of the shard, for clients to know."
        ),
    ] = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics and health here.")
    ] = None,
    socket: Annotated[
        Path | None,
        typer.Option(
            "--socket",
            metavar="PATH",
            help="Listen at a Unix socket, too, which this user alone can reach; with --listen none at that alone.",
        ),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca", metavar="FILE", help="Authorities whose certificates authenticate clients, PEM."
        ),
    ] = None,
    rights: Annotated[
        Path | None,
        typer.Option(
            "--rights",
            envvar="ESCROWMQ_RIGHTS",
            metavar="FILE",
            help="Who may do what: see escrowmq rights init (docs/security.md).",
        ),
    ] = None,
    lean: Annotated[bool | None, typer.Option("--lean/--no-lean", hidden=True)] = None,
    lean_port: Annotated[str | None, typer.Option("--lean-port", hidden=True)] = None,
    lean_socket: Annotated[str | None, typer.Option("--lean-socket", hidden=True)] = None,
    http: Annotated[
        str | None,
        typer.Option("--http", metavar="HOST:PORT", help="Serve the HTTP gateway here too (see escrowmq gateway)."),
    ] = None,
    ask: Ask = None,
    webhook: Webhook = None,
    console: Annotated[
        str | None,
        typer.Option("--console", metavar="HOST:PORT", help="Serve the console here too (see escrowmq console)."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            help="A TOML file with tables \\[broker], \\[gateway], \\[check_back.GROUP] and \\[webhook.NAME].",
        ),
    ] = None,
    insecure: Insecure = False,
    json: ReadyJson = False,
    log_level: LogLevel = "warning",
    log_json: LogJson = False,
    _help_all: HelpAll = False,
    *,
    overrides: dict[str, Any],
) -> None:
    """Serve a data folder until SIGTERM or Ctrl-C; both stop it cleanly.

    With --json one line is printed on standard output once the broker answers:
    {"url": "escrow://127.0.0.1:7700", "socket": null, "metrics": null, "folder": "data", "shard": 1, "epoch": 1, "pid":
    1},
    and "http" and "asks" with --http, "console" with --console.

    Exit code 6 when a write or sync of the log failed.
    """
    from escrowmq.broker.serving.serve import serve as run

    start_log(log_level, log_json)
    _reject_removed_options(lean, lean_port, lean_socket)

    notifier = _webhooks(config, webhook, {"folder": str(folder)})

    def announce(ready: dict[str, Any]) -> None:
        if notifier:
            notifier.source = {
                **notifier.source,
                **{name: ready[name] for name in ("url", "shard", "epoch")},
            }  # read by other threads meanwhile
        if json:
            print_json_line({**ready, "pid": os.getpid()})
        else:
            metrics_at = f", metrics at {ready['metrics']}" if ready["metrics"] else ""
            http_at = f", HTTP at {ready['http']}" if "http" in ready else ""
            http_at += f", the console at {ready['console']}" if "console" in ready else ""
            at = f" and {ready['socket']}" if ready["socket"] and not ready["url"].startswith("escrow+unix:") else ""
            notice(f"serving {ready['folder']} at {ready['url']}{at}{metrics_at}{http_at}; Ctrl-C stops it")

    if ask and http is None:
        raise error(Code.BAD_ARGUMENT, "--ask is for the HTTP gateway", "add --http HOST:PORT")
    beside: list[Beside] = []
    certificate = _tls(tls_cert, tls_key, tls_client_ca)
    secured: Any = {"tls": certificate.context if certificate is not None else None, "rights": rights is not None}
    if http is not None:
        from escrowmq.gateway import beside as run_gateway

        configured = _gateway_options(config, ask)
        beside.append(lambda connect: run_gateway(connect, listen=http, insecure=insecure, **secured, **configured))
    if console is not None:
        from escrowmq.console import beside as run_console

        beside.append(lambda connect: run_console(connect, listen=console, insecure=insecure, **secured))
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_descriptor_limit()
    with notifier or nullcontext():
        status = run(
            folder,
            listen=listen,
            metrics=metrics,
            path=socket,
            tls=certificate,
            rights=rights,
            settings=BrokerSettings.load(config, overrides),
            insecure=insecure,
            announce=announce,
            beside=_combine(beside) if beside else None,
            replication=_replication(log, silence, advertise, replicas),
        )
    if status:
        raise typer.Exit(Exit.CORRUPT)


def _reject_removed_options(lean: bool | None, port: str | None, path: str | None) -> None:
    """Raise Misuse(BAD_ARGUMENT) for options of the second port that brokers of version 0.1 had."""
    if lean is not None or port is not None:
        raise error(
            Code.BAD_ARGUMENT,
            "--lean, --no-lean and --lean-port are gone: everything travels over one port",
            "leave them out; --listen HOST:PORT is that port",
        )
    if path is not None:
        raise error(Code.BAD_ARGUMENT, "--lean-socket is gone", f"write --socket {path}")


def _tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> ServerCertificate | None:
    """Return the certificate, or None without one."""
    if certificate is None and key is None and client_ca is None:
        return None
    if certificate is None or key is None:
        raise error(Code.BAD_ARGUMENT, "--tls-cert and --tls-key belong together", "give both")
    from escrowmq.broker.serving.certificates import ServerCertificate

    return ServerCertificate(certificate, key, client_ca)


@contextmanager
def serving_tls(certificate: Path | None, key: Path | None) -> Iterator[ssl.SSLContext | None]:
    """Provide the TLS settings of an HTTP server, which follow the files; None without a certificate."""
    served = _tls(certificate, key, None)
    if served is None:
        yield None
        return
    served.start()
    try:
        yield served.context
    finally:
        served.stop()


def _replication(
    log: str | None, silence: float | None, advertise: str | None, replicas: str | None
) -> Replication | None:
    """Return the configuration of a shared log, or None without one."""
    from escrowmq.broker.serving.brokers import SILENCE, Replication

    if log is None:
        if silence is not None or advertise is not None or replicas is not None:
            text = "--silence, --advertise and --replicas are for brokers that share a log"
            raise error(Code.BAD_ARGUMENT, text, "add --log kafka://HOST:PORT/TOPIC")
        return None

    from escrowmq.connecting import links
    from escrowmq.log.kafka.cluster.address import KafkaAddress
    from escrowmq.log.kafka.cluster.opening import open_partitions

    def following(urls: Sequence[str], token: str | None) -> Link:
        scheme = urls[0].partition("://")[0]
        (link,) = links(f"{scheme}://" + "|".join(url.partition("://")[2] for url in urls), {"token": token or ""})
        return link

    address = KafkaAddress.parse(log)
    return Replication(
        lambda: open_partitions(address),
        SILENCE if silence is None else silence,
        advertise,
        _addresses(replicas) if replicas is not None else (),
        following,
    )


def _addresses(replicas: str) -> list[str]:
    """Split ``escrow://A|B`` into the URLs of A and B."""
    prefix = "escrows://" if replicas.startswith("escrows://") else "escrow://"
    hosts = replicas.removeprefix(prefix).split("|")
    if not replicas.startswith(prefix) or not all(hosts):
        raise error(Code.BAD_URL, f"{replicas!r} is not a list of brokers", "write escrow://HOST:PORT|HOST:PORT")
    return [prefix + host for host in hosts]


def _combine(beside: list[Beside]) -> Beside:
    """Combine several services that run beside a broker, and their announcements, into one."""

    @contextmanager
    def run(connect: Connect) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            facts: dict[str, Any] = {}
            for one in beside:
                facts |= stack.enter_context(one(connect))
            yield facts

    return run


def gateway(
    url: Url = DEFAULT_URL,
    listen: Listen = "127.0.0.1:7780",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    ask: Ask = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file with tables \\[gateway] and \\[check_back.GROUP].")
    ] = None,
    insecure: Insecure = False,
    json: ReadyJson = False,
    log_level: LogLevel = "warning",
    log_json: LogJson = False,
) -> None:
    """Serve the HTTP gateway, for clients with short connections, until SIGTERM or Ctrl-C.

    With --json one line is printed on standard output once requests are accepted:
    {"http": "http://127.0.0.1:7780", "asks": ["shop"], "url": "escrow://127.0.0.1:7700", "pid": 1}.
    """
    from escrowmq.gateway import serve as run

    start_log(log_level, log_json)

    def announce(ready: dict[str, Any]) -> None:
        if json:
            print_json_line({**ready, "pid": os.getpid()})
        else:
            notice(f"serving {ready['http']} for {ready['url']}; see {ready['http']}/docs; Ctrl-C stops it")

    raise_descriptor_limit()
    with serving_tls(tls_cert, tls_key) as tls:
        run(url, listen=listen, insecure=insecure, tls=tls, announce=announce, **_gateway_options(config, ask))


@webhooks.command("test")
def webhooks_test(
    webhook: Webhook = None,
    config: Annotated[Path | None, typer.Option("--config", help="A TOML file with tables \\[webhook.NAME].")] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Send a test event (`escrowmq.test`) to each webhook once, and print its response. Exit code 4 if one fails."""
    hooks = _webhooks(config, webhook, {"command": "webhooks test"})
    if hooks is None:
        raise error(Code.BAD_ARGUMENT, "there is no address to try", "name one: --webhook or --config")
    found = hooks.test()
    rows = [
        {"webhook": hook.name, "url": hook.url, "ok": problem is None, "problem": problem} for hook, problem in found
    ]
    print_rows(rows, json, {"webhook": "webhook", "url": "url", "answer": lambda row: row["problem"] or "ok"}, "none")
    if any(problem is not None for _, problem in found):
        raise typer.Exit(Exit.UNKNOWN)


def _webhooks(config: Path | None, flags: list[str] | None, source: dict[str, Any]) -> Webhooks | None:
    """Create the webhooks of the file's tables and the flags; None without any."""
    tables = _read_tables(config).get("webhook")
    if not flags and not tables:
        return None
    from escrowmq.gateway.webhooks import Webhooks, read_hooks

    return Webhooks(read_hooks(flags or (), tables), source)


def _gateway_options(config: Path | None, ask: list[str] | None) -> dict[str, Any]:
    """Return addresses and limits from the file's tables and the flags."""
    from escrowmq.gateway import GatewaySettings, read_addresses

    tables = _read_tables(config)
    return {
        "addresses": read_addresses(ask or (), tables.get("check_back")),
        "settings": GatewaySettings.of(tables.get("gateway", {})),
    }


def _read_tables(config: Path | None) -> dict[str, Any]:
    tables: dict[str, Any] = {}
    if config is not None:
        try:
            tables = tomllib.loads(config.read_text())
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
            raise error(Code.BAD_SETTING, f"cannot read {config}: {problem}") from problem
    return tables
