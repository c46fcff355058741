"""``escrowmq serve``, ``step-down``, ``gateway``, ``console`` and ``webhooks``: a broker, and services over brokers."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from escrowmq.cli.failures import Exit
from escrowmq.cli.flags import Overrides, show_all
from escrowmq.cli.options import DEFAULT_URL, PASSWORD, App, Operation, ServerLogOptions, Url
from escrowmq.cli.plan import PlansFolder
from escrowmq.cli.printing import Columns, notice, print_json_line, print_rows
from escrowmq.errors import Code, error
from escrowmq.platform.descriptors import raise_descriptor_limit
from escrowmq.platform.listening import parse_address, shown, shown_address
from escrowmq.settings import BrokerSettings

if TYPE_CHECKING:
    import ssl

    from escrowmq.broker.serving.brokers import Replication
    from escrowmq.broker.serving.certificates import ServerCertificate
    from escrowmq.broker.serving.serve import Beside, Connect
    from escrowmq.gateway.limits import GatewaySettings
    from escrowmq.gateway.webhooks import Webhooks
    from escrowmq.wire import Link

SWITCH_SECONDS = 0.001
"""Thread switch interval (s): how long a broker thread may delay another that has a request or response."""

webhooks = App("Webhooks for parked transactions, dead letters and other events.")

Listen = Annotated[str, Option("--listen", "-l", metavar="HOST:PORT", help="Where to listen; port 0: any free one.")]
Ask = Annotated[
    list[str] | None, Option(metavar="GROUP=URL", help="Where check-backs of a producer group go; may be given again.")
]
Webhook = Annotated[
    list[str] | None,
    Option(
        metavar="EVENTS=URL",
        help="Notify this address of events, such as parked,dead:10/1min=http://127.0.0.1:9000/hook; may be given "
        "again (docs/webhooks.md).",
    ),
]
Fifo = Annotated[
    list[str] | None,
    Option(metavar="GROUP", help="A RocketMQ consumer group, or PREFIX*, that gets messages in order; repeatable."),
]
AccessKeysFile = Annotated[
    Path | None, Option(metavar="FILE", help="RocketMQ access keys, and their tokens (docs/rocketmq.md).")
]
TlsCert = Annotated[Path | None, Option(metavar="FILE", help="Serve over TLS: the certificate and its chain, PEM.")]
TlsKey = Annotated[Path | None, Option(metavar="FILE", help="Its private key, PEM, without a password.")]
Insecure = Annotated[bool, Option("--insecure", help="Listen beyond loopback without TLS and credentials.")]
ReadyJson = Annotated[bool, Option("--json", help="When ready, one JSON line with the addresses.")]


@dataclass
class _Sockets:
    """Where a broker listens, and how that is protected."""

    listen: Listen = "127.0.0.1:7700"
    socket: Path | None = Option(
        None,
        metavar="PATH",
        help="Listen at a Unix socket, too, which this user alone can reach; with --listen none at that alone.",
    )
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    tls_client_ca: Path | None = Option(
        None, metavar="FILE", help="Authorities whose certificates authenticate clients, PEM."
    )
    rights: Path | None = Option(
        None,
        envvar="ESCROWMQ_RIGHTS",
        metavar="FILE",
        help="Who may do what: see escrowmq rights init (docs/security.md).",
    )
    lean: bool | None = Option(None, "--lean/--no-lean", hidden=True)
    lean_port: str | None = Option(None, hidden=True)
    lean_socket: str | None = Option(None, hidden=True)
    insecure: Insecure = False

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``serve``. Raises Misuse(BAD_ARGUMENT)."""
        self._reject_removed()
        tls = _tls(self.tls_cert, self.tls_key, self.tls_client_ca)
        return {
            "listen": self.listen,
            "path": self.socket,
            "tls": tls,
            "rights": self.rights,
            "insecure": self.insecure,
        }

    def _reject_removed(self) -> None:
        """Raise Misuse(BAD_ARGUMENT) for options of the second port that brokers of version 0.1 had."""
        if self.lean is not None or self.lean_port is not None:
            raise error(
                Code.BAD_ARGUMENT,
                "--lean, --no-lean and --lean-port were removed: all requests use one port",
                "leave them out; --listen HOST:PORT is that port",
            )
        if self.lean_socket is not None:
            raise error(Code.BAD_ARGUMENT, "--lean-socket was removed", f"write --socket {self.lean_socket}")


@dataclass
class _SharedLog:
    """The log that brokers of a shard share, and the brokers of the shard."""

    log: str | None = Option(
        None,
        envvar="ESCROWMQ_LOG",
        metavar="kafka://HOST:PORT,.../TOPIC[/PARTITION][?config=FILE]",
        help="The log is kept by Kafka and shared with other brokers, one of which leads; the folder has a copy "
        "(docs/failover.md).",
    )
    silence: float | None = Option(None, help="With --log: seconds without a sign of the leader before a takeover; 2.")
    advertise: str | None = Option(None, metavar="URL", help="With --log: the address for clients, if not --listen.")
    replicas: str | None = Option(None, metavar="escrow://A|B", help="With --log: all brokers of the shard.")

    def replication(self) -> Replication | None:
        """Return the configuration of a shared log, or None without one."""
        from escrowmq.broker.serving.brokers import SILENCE, Replication

        log = self.log
        if log is None:
            if self.silence is not None or self.advertise is not None or self.replicas is not None:
                text = "--silence, --advertise and --replicas are for brokers that share a log"
                raise error(Code.BAD_ARGUMENT, text, "add --log kafka://HOST:PORT/TOPIC")
            return None

        from escrowmq.connecting import links
        from escrowmq.log.kafka.cluster.address import KafkaAddress
        from escrowmq.log.kafka.cluster.opening import open_partitions

        def following(urls: Sequence[str], token: str | None) -> Link:
            scheme = urls[0].partition("://")[0]
            address = "|".join(url.partition("://")[2] for url in urls)
            (link,) = links(f"{scheme}://{address}", {"token": token or ""})
            return link

        address = KafkaAddress.parse(log)
        return Replication(
            lambda: open_partitions(address),
            SILENCE if self.silence is None else self.silence,
            self.advertise,
            _addresses(self.replicas) if self.replicas is not None else (),
            following,
        )


@dataclass
class _Services:
    """The services beside a broker, and the file with their settings."""

    metrics: str | None = Option(None, metavar="HOST:PORT", help="Serve Prometheus metrics and health here.")
    http: str | None = Option(None, metavar="HOST:PORT", help="Serve the HTTP gateway here too (see escrowmq gateway).")
    ask: Ask = None
    webhook: Webhook = None
    console: str | None = Option(None, metavar="HOST:PORT", help="Serve the console here too (see escrowmq console).")
    rocketmq: str | None = Option(
        None, metavar="HOST:PORT", help="Serve RocketMQ clients here and at the next port (see escrowmq rocketmq)."
    )
    fifo: Fifo = None
    access_keys: AccessKeysFile = None
    config: Path | None = Option(
        None, help="A TOML file with tables \\[broker], \\[gateway], \\[check_back.GROUP] and \\[webhook.NAME]."
    )

    def beside(self, listening: dict[str, Any]) -> Beside | None:
        """Return what serves the gateways and the console; None without any. ``listening``: see
        :meth:`_Sockets.arguments`."""
        certificate, rights = listening["tls"], listening["rights"]
        secured: dict[str, Any] = {
            "tls": certificate.context if certificate is not None else None,
            "rights": rights is not None,
            "insecure": listening["insecure"],
        }
        if self.ask and self.http is None:
            raise error(Code.BAD_ARGUMENT, "--ask is for the HTTP gateway", "add --http HOST:PORT")
        services: list[Beside] = []
        if (http := self.http) is not None:
            from escrowmq.gateway import beside as run_gateway

            configured = _gateway_options(self.config, self.ask)
            services.append(lambda connect: run_gateway(connect, listen=http, **secured, **configured))
        if (console := self.console) is not None:
            from escrowmq.console import beside as run_console

            services.append(lambda connect: run_console(connect, listen=console, **secured))
        if self.rocketmq is not None:
            services.append(self._rocketmq(self.rocketmq, listening))
        elif self.fifo or self.access_keys is not None:
            raise error(Code.BAD_ARGUMENT, "--fifo and --access-keys are for RocketMQ clients", "add --rocketmq")
        return combine(services) if services else None

    def _rocketmq(self, listen: str, listening: dict[str, Any]) -> Beside:
        from escrowmq.gateway.rocketmq import RocketmqOptions
        from escrowmq.gateway.rocketmq import beside as run_rocketmq

        host, port = parse_address(listen)
        certificate = listening["tls"]
        options = RocketmqOptions(
            listen=listen,
            second=f"{shown(host)}:{port and port + 1}",
            fifo=tuple(self.fifo or ()),
            keys=self.access_keys,
            certificate=certificate and certificate.certificate,
            key=certificate and certificate.key,
            insecure=listening["insecure"],
        )
        settings, rights = gateway_settings(self.config), listening["rights"] is not None
        return lambda connect: run_rocketmq(connect, options, settings=settings, rights=rights)


def serve(
    sockets: _Sockets,
    shared: _SharedLog,
    services: _Services,
    logging: ServerLogOptions,
    overrides: Overrides,
    folder: Path = Option("escrow-data", "--folder", "-d", help="The data folder; made if it is not there."),
    json: ReadyJson = False,
    help_all: bool = Option(False, "--help-all", callback=show_all, is_eager=True, help="Show all flags."),
) -> None:
    """Serve a data folder until SIGTERM or Ctrl-C; both stop it cleanly.

    With --json one line is printed on standard output once the broker answers:
    {"url": "escrow://127.0.0.1:7700", "socket": null, "metrics": null, "folder": "data", "shard": 1, "epoch": 1,
    "pid": 1}, and "http" and "asks" with --http, "console" with --console, "rocketmq" and "second" with --rocketmq.

    Exit code 6 when a write or sync of the log failed.
    """
    from escrowmq.broker.serving.serve import serve as run

    logging.start()
    listening = sockets.arguments()
    notifier = _webhooks(services.config, services.webhook, {"folder": str(folder)})
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_descriptor_limit()
    with notifier or nullcontext():
        status = run(
            folder,
            **listening,
            metrics=services.metrics,
            settings=BrokerSettings.load(services.config, dataclasses.asdict(overrides)),
            announce=partial(_on_ready, notifier, json),
            beside=services.beside(listening),
            replication=shared.replication(),
        )
    if status:
        raise typer.Exit(Exit.CORRUPT)


def _tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> ServerCertificate | None:
    """Return the certificate of a server, or None without one. Raises Misuse(BAD_ARGUMENT, BAD_SETTING)."""
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


def _on_ready(notifier: Webhooks | None, json: bool, ready: dict[str, Any]) -> None:
    if notifier:  # its other threads read the source meanwhile
        notifier.source = notifier.source | {name: ready[name] for name in ("url", "shard", "epoch")}
    gc.freeze()  # imported modules: looking through them for garbage stops every thread for 100 ms and more
    announce_ready(ready, json, f"serving {ready['folder']} at {_list_addresses(ready)}")


def _list_addresses(ready: dict[str, Any]) -> str:
    at = str(ready["url"])
    at += f" and {ready['socket']}" if ready["socket"] and not at.startswith("escrow+unix:") else ""
    at += f", metrics at {ready['metrics']}" if ready["metrics"] else ""
    at += f", HTTP at {ready['http']}" if "http" in ready else ""
    at += f", RocketMQ clients at {ready['rocketmq']}" if "rocketmq" in ready else ""
    return at + (f", the console at {ready['console']}" if "console" in ready else "")


def announce_ready(ready: dict[str, Any], json: bool, text: str) -> None:
    """Print that a server is ready: as JSON, or as a sentence."""
    if json:
        print_json_line({**ready, "pid": os.getpid()})
    else:
        notice(f"{text}; Ctrl-C stops it")


def _addresses(replicas: str) -> list[str]:
    """Split ``escrow://A|B`` into the URLs of A and B."""
    prefix = "escrows://" if replicas.startswith("escrows://") else "escrow://"
    hosts = replicas.removeprefix(prefix).split("|")
    if not replicas.startswith(prefix) or not all(hosts):
        raise error(Code.BAD_URL, f"{replicas!r} is not a list of brokers", "write escrow://HOST:PORT|HOST:PORT")
    return [prefix + host for host in hosts]


def combine(beside: list[Beside]) -> Beside:
    """Combine several services that run beside a broker, and their announcements, into one."""

    @contextmanager
    def run(connect: Connect) -> Iterator[dict[str, Any]]:
        with ExitStack() as stack:
            facts: dict[str, Any] = {}
            for one in beside:
                facts |= stack.enter_context(one(connect))
            yield facts

    return run


def step_down(operation: Operation) -> None:
    """Make the leading broker hand over to a standby, for example before maintenance of its machine.

    It answers requests in flight and rejects new ones, which clients send to the new leader. It requires a log on Kafka
    (docs/failover.md). The broker continues as a standby. If no other broker takes over, it leads again after some
    seconds.
    """
    with operation.admin() as admin:
        found = admin.step_down(why=operation.why)
    columns: Columns = {
        "broker": "broker",
        "leads now": lambda row: row.get("leader", "none"),
        ">seconds": lambda row: f"{row['seconds']:.2f}",
    }
    print_rows(found, operation.json, columns, "no broker")


def gateway(
    log: ServerLogOptions,
    url: Url = DEFAULT_URL,
    listen: Listen = "127.0.0.1:7780",
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    ask: Ask = None,
    config: Path | None = Option(None, help="A TOML file with tables \\[gateway] and \\[check_back.GROUP]."),
    insecure: Insecure = False,
    json: ReadyJson = False,
) -> None:
    """Serve the HTTP gateway, for clients with short connections, until SIGTERM or Ctrl-C.

    With --json one line is printed on standard output once requests are accepted:
    {"http": "http://127.0.0.1:7780", "asks": ["shop"], "url": "escrow://127.0.0.1:7700", "pid": 1}.
    """
    from escrowmq.gateway import serve as run

    log.start()

    def announce(ready: dict[str, Any]) -> None:
        announce_ready(ready, json, f"serving {ready['http']} for {ready['url']}; see {ready['http']}/docs")

    raise_descriptor_limit()
    with serving_tls(tls_cert, tls_key) as tls:
        run(url, listen=listen, insecure=insecure, tls=tls, announce=announce, **_gateway_options(config, ask))


@dataclass
class _Console:
    """The sources of the web console, and its addresses."""

    database: list[str] | None = Option(
        None,
        "--database-url",
        metavar="URL",
        envvar="ESCROWMQ_DATABASE_URL",
        help="A database with EscrowMQ's tables; may be given again." + PASSWORD,
    )
    host: list[str] | None = Option(None, metavar="NAME", help="A name for browsers, besides localhost; repeatable.")
    plans: PlansFolder = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    insecure: Insecure = False


def console(
    options: _Console,
    log: ServerLogOptions,
    url: Url = DEFAULT_URL,
    listen: Listen = "127.0.0.1:7790",
    json: ReadyJson = False,
) -> None:
    """Serve the web console until SIGTERM or Ctrl-C: pending work, its causes, and operations on it.

    With --json one line is printed on standard output once pages are served:
    {"console": "http://127.0.0.1:7790", "url": "escrow://127.0.0.1:7700", "pid": 1}.
    """
    from escrowmq.console import ConsoleSettings
    from escrowmq.console import serve as run

    log.start()

    def announce(ready: dict[str, Any]) -> None:
        announce_ready(ready, json, f"the console of {ready['url']} is at {ready['console']}")

    raise_descriptor_limit()
    with serving_tls(options.tls_cert, options.tls_key) as tls:
        run(
            url,
            listen=listen,
            databases=options.database or (),
            plans=options.plans,
            settings=ConsoleSettings(hosts=tuple(options.host or ())),
            insecure=options.insecure,
            tls=tls,
            announce=announce,
        )


@webhooks.command("test")
def webhooks_test(
    webhook: Webhook = None,
    config: Path | None = Option(None, help="A TOML file with tables \\[webhook.NAME]."),
    json: bool = Option(False, "--json", help="JSON instead of a table."),
) -> None:
    """Send a test event (`escrowmq.test`) to each webhook once, and print its response. Exit code 4 if one fails."""
    hooks = _webhooks(config, webhook, {"command": "webhooks test"})
    if hooks is None:
        raise error(Code.BAD_ARGUMENT, "there is no address to try", "name one: --webhook or --config")
    found = hooks.test()
    rows = [
        {"webhook": hook.name, "url": shown_address(hook.url), "ok": problem is None, "problem": problem}
        for hook, problem in found
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


def gateway_settings(config: Path | None) -> GatewaySettings:
    """Return the limits in the table ``[gateway]`` of a file."""
    from escrowmq.gateway.limits import GatewaySettings

    return GatewaySettings.of(_read_tables(config).get("gateway", {}))


def _gateway_options(config: Path | None, ask: list[str] | None) -> dict[str, Any]:
    """Return addresses and limits from the file's tables and the flags."""
    from escrowmq.gateway import GatewaySettings, read_addresses

    tables = _read_tables(config)
    return {
        "addresses": read_addresses(ask or (), tables.get("check_back")),
        "settings": GatewaySettings.of(tables.get("gateway", {})),
    }


def _read_tables(config: Path | None) -> dict[str, Any]:
    try:
        return {} if config is None else tomllib.loads(config.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise error(Code.BAD_SETTING, f"cannot read {config}: {problem}") from problem
