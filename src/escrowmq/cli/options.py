"""Options that several commands share, the parsing of their values, and the connection to the broker."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer import Option

from escrowmq import outbox
from escrowmq.cli.printing import RUN
from escrowmq.errors import Code, error
from escrowmq.platform.logs import LEVELS, log_to_stderr
from escrowmq.settings import BYTES, SECONDS, parse_quantity

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin
    from escrowmq.client.bus import Bus

F = TypeVar("F", bound=Callable[..., None])

DEFAULT_URL = "escrow://127.0.0.1:7700"
PATIENCE = 10.0
"""Timeout (s) of a command's requests to its broker."""

Json = Annotated[bool, Option("--json", help="JSON on standard output, for scripts.")]
JsonLines = Annotated[bool, Option("--json", help="One JSON object a line, for scripts.")]
Limit = Annotated[int, Option("--limit", "-n", min=1, help="At most this many.")]


def flatten(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one parameter per field of each dataclass among its parameters, after its own parameters. Their
    defaults are typer's options and arguments."""
    given = inspect.signature(command, eval_str=True).parameters
    objects: dict[str, Any] = {
        name: each.annotation for name, each in given.items() if dataclasses.is_dataclass(each.annotation)
    }
    if not objects:
        return command
    parameters = [each for name, each in given.items() if name not in objects]
    names: dict[str, list[str]] = {}
    for name, kind in objects.items():
        hints = get_type_hints(kind, include_extras=True)
        names[name] = [each.name for each in dataclasses.fields(kind)]
        for each in dataclasses.fields(kind):
            default = Parameter.empty if each.default is dataclasses.MISSING else each.default
            parameters.append(Parameter(each.name, _KEYWORD, default=default, annotation=hints[each.name]))

    @functools.wraps(command)
    def flat(**values: Any) -> None:
        made = {name: kind(**{each: values.pop(each) for each in names[name]}) for name, kind in objects.items()}
        command(**values, **made)

    parameters = [each.replace(kind=_KEYWORD) for each in parameters]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    return flat


_KEYWORD = Parameter.KEYWORD_ONLY


class App(typer.Typer):
    """A group of commands that may have parameter objects (see :func:`flatten`)."""

    def __init__(self, help: str, **settings: Any) -> None:
        super().__init__(no_args_is_help=True, help=help, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Register a function as a command."""
        register = super().command(name, **settings)

        def register_flat(function: F) -> F:
            register(flatten(function))
            return function

        return register_flat


def time_option(default: str | None, name: str, help: str, *, word: str = "") -> Any:
    """Return an option whose value is a duration such as ``5min``, in seconds; ``word`` remains a text."""
    return Option(default, name, help=help, metavar="TIME", parser=partial(_parse, SECONDS, name, word))


def size_option(default: str | None, name: str, help: str, *, word: str = "") -> Any:
    """Return an option whose value is a size such as ``10GB``, in bytes; ``word`` remains a text."""
    return Option(default, name, help=help, metavar="SIZE", parser=partial(_parse, BYTES, name, word))


def _parse(unit: str, option: str, word: str, text: str) -> float | str:
    if word and text == word:
        return text
    try:
        value = parse_quantity(text, unit)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"{option}: {problem}") from None
    return value if unit == SECONDS else int(value)


def parse_seconds(text: str, option: str) -> float:
    """Parse a duration such as ``5min``. Raises Misuse(BAD_ARGUMENT) that names the option."""
    return float(_parse(SECONDS, option, "", text))


def choice_option(default: str | None, choices: Iterable[str], *names: str, help: str) -> Any:
    """Return an option whose value is one of ``choices``; its help lists them."""
    known = tuple(choices)

    def check(text: str) -> str:
        if text not in known:
            raise error(Code.BAD_ARGUMENT, f"{names[0]} {text}", f"one of {', '.join(known)}")
        return text

    return Option(default, *names, help=f"{help}: {', '.join(known)}.", metavar="TEXT", parser=check)


def _check_reason(why: str | None) -> str | None:
    """Reject a blank reason, which the record could not show."""
    if why is not None and not why.strip():
        raise error(Code.BAD_ARGUMENT, "--why gives no reason", "write one, or leave --why out")
    return why


Why = Annotated[
    str | None, Option("--why", help="The reason, for the record of acts: see escrowmq acts.", callback=_check_reason)
]


Url = Annotated[
    str,
    Option("--url", "-u", envvar="ESCROWMQ_URL", help="The broker: escrow://HOST:PORT[,HOST:PORT...] or file:FOLDER."),
]


@dataclass
class Brokers:
    """The broker or brokers of a command, and how it prints."""

    url: Url = DEFAULT_URL
    json: Json = False

    def admin(self, *, make: bool = False) -> AbstractContextManager[Admin]:
        """Provide the admin interface; see :func:`admin_at`."""
        return admin_at(self.url, make=make)


@dataclass
class Operation(Brokers):
    """An operator action at the brokers."""

    why: Why = None


PASSWORD = " A password can stand in the environment variable instead, where ps does not show it."


@dataclass
class DatabaseUrl:
    """The database of a command."""

    database_url: str = Option(
        ...,
        "--database-url",
        "-d",
        envvar="ESCROWMQ_DATABASE_URL",
        help="The database, as SQLAlchemy names it: sqlite:///shop.db, postgresql://user@host/shop, "
        "mysql://user@host/shop." + PASSWORD,
    )

    def open(self, *, make: bool = False) -> AbstractContextManager[Any]:
        """Provide a SQLAlchemy engine. Raises Misuse(BAD_URL, NO_TABLES, MISSING_PACKAGE)."""
        return outbox.engines.opened(self.database_url, make=make)


@dataclass
class Database(DatabaseUrl):
    """The database of a command, and how it prints."""

    json: Json = False


def _log_level(default: str) -> Any:
    return Option(default, metavar="LEVEL", help="What is logged on standard error: debug, info, warning or error.")


@dataclass
class LogOptions:
    """The log of a process that works until it is stopped."""

    log_level: str = _log_level("info")
    log_json: bool = Option(False, "--log-json", help="One JSON object a line in the log, with the facts as fields.")

    def start(self) -> None:
        """Log to standard error from now on. Raises Misuse(BAD_ARGUMENT) for an unknown level."""
        if self.log_level.lower() not in LEVELS:
            raise error(Code.BAD_ARGUMENT, f"--log-level: {self.log_level!r} is none of {', '.join(LEVELS)}")
        log_to_stderr(self.log_level, as_json=self.log_json)


@dataclass
class ServerLogOptions(LogOptions):
    """The log of a server."""

    log_level: str = _log_level("warning")


@dataclass
class MetricsOptions:
    """Metrics and health of a command."""

    metrics: str | None = Option(None, metavar="HOST:PORT", help="Serve Prometheus metrics and health here.")
    insecure: bool = Option(False, "--insecure", help="Allow --metrics an address that other machines can reach.")

    @contextmanager
    def serve(
        self, collector: Callable[[], Any], health: Callable[[], Mapping[str, Any]] = lambda: {"status": "ok"}
    ) -> Iterator[str | None]:
        """Serve a collector made by ``collector``, and ``health``. Yields the URL, or None without ``--metrics``.
        Raises Misuse for an address that is invalid, in use, or reachable by others without ``--insecure``."""
        if self.metrics is None:
            yield None
            return
        from prometheus_client import CollectorRegistry

        from escrowmq.broker.serving.http import HttpServer
        from escrowmq.platform.listening import check_address, parse_address, shown

        host, port = parse_address(self.metrics)
        check_address(host, self.insecure)
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector())
        try:
            server = HttpServer(host, port, registry, health)
        except OSError as problem:
            raise error(Code.BAD_URL, f"cannot listen on {self.metrics}: {problem}", "is the port in use?") from None
        try:
            yield f"http://{shown(host)}:{server.port}"
        finally:
            server.close()


def check_folder(folder: Path, option: str) -> None:
    """Create the output folder of a command before its work begins. Raises Misuse(BAD_ARGUMENT) if not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as problem:
        text = f"{option}: nothing can be written into {folder}: {problem.strerror or problem}"
        raise error(Code.BAD_ARGUMENT, text, "name a folder that you may write into") from None


REFUSED_SECONDS = 0.5
"""Time (s) for which a command retries an address that refuses connections: its broker may be starting."""
_TRY_SECONDS = 0.1


def check_reachable(url: str) -> None:
    """Raise Overloaded(BROKER_AWAY) if every address of ``url`` refuses connections or has no such host. A client would
    wait for an unreachable broker, but a user may have mistyped an address or not started one. Addresses that do not
    respond are left to the client. Nothing is sent."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("escrow", "escrows"):
        return
    from escrowmq.wire.addresses import parse_address

    parts = rest.partition("?")[0].rstrip("/").replace("|", ",").split(",")
    addresses = [address for part in parts if (address := parse_address(part)) is not None]
    deadline = time.monotonic() + REFUSED_SECONDS
    while True:
        reasons = {address.location: _try_connect(address.host, address.port) for address in addresses}
        if not reasons or not all(reasons.values()):
            return
        if time.monotonic() >= deadline:
            text = "; ".join(f"{location}: {reason}" for location, reason in reasons.items())
            raise error(Code.BROKER_AWAY, f"no broker answers at {text}", "is one running there (escrowmq serve)?")
        time.sleep(_TRY_SECONDS)


def _try_connect(host: str, port: int) -> str | None:
    """Return why a connection is impossible; None if it may be possible."""
    try:
        socket.create_connection((host, port), REFUSED_SECONDS).close()
    except ConnectionRefusedError:
        return "connection refused"
    except socket.gaierror:
        return "no such host"
    except OSError:
        pass
    return None


@contextmanager
def bus_at(url: str, *, make: bool = False) -> Iterator[Bus]:
    """Connect to the broker(s) for the duration of a command. With ``make`` a folder without a log is created. Without
    it, as for commands that only read, raises Misuse(NOT_A_DATA_FOLDER): the name is mistyped."""
    from escrowmq.connecting import connect

    if not make and url.startswith("file:"):
        folder = Path(url.removeprefix("file:").removeprefix("//"))
        if not any(folder.glob("*.segment")):
            hint = "escrowmq send and escrowmq serve create a data folder"
            raise error(Code.NOT_A_DATA_FOLDER, f"there is no data in {folder}", hint)
    check_reachable(url)
    with connect(url) as bus:
        yield bus


@contextmanager
def admin_at(url: str, *, make: bool = False) -> Iterator[Admin]:
    """Provide the admin interface of the broker(s) at ``url`` with a command's timeout. Unreachable brokers are
    recorded for the exit code and named on standard error."""
    from escrowmq.client.admin import Admin

    # Unreachable brokers are reported at the end.
    logging.getLogger("escrowmq.client.links.presence").setLevel(logging.ERROR)
    with bus_at(url, make=make) as bus:
        yield Admin(bus.router, PATIENCE)
        RUN.missing += bus.missing()


def broker_time(admin: Admin) -> int:
    """Return microseconds since 1970 by the clock of the brokers (the earliest), which stamps all times in their
    responses; by this machine's clock if a broker does not send it."""
    return min((hello["time_us"] for hello in admin.hello() if "time_us" in hello), default=time.time_ns() // 1000)


def pairs(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """Parse ``NAME=VALUE`` texts into a dict. Raises Misuse(BAD_ARGUMENT) that names the option."""
    made = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise error(Code.BAD_ARGUMENT, f"{option} {text!r} is not NAME=VALUE")
        made[name] = value
    return made
