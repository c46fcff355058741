"""Options that several commands share, the parsing of their values, and the connection to the broker."""

from __future__ import annotations

import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.printing import RUN
from escrowmq.errors import Code, error
from escrowmq.platform.logs import LEVELS, log_to_stderr
from escrowmq.settings import BYTES, SECONDS, parse_quantity

if TYPE_CHECKING:
    from escrowmq.client.admin import Admin
    from escrowmq.client.bus import Bus

DEFAULT_URL = "escrow://127.0.0.1:7700"
PATIENCE = 10.0
"""Timeout (s) of a command's requests to its broker."""

Url = Annotated[
    str,
    typer.Option(
        "--url", "-u", envvar="ESCROWMQ_URL", help="The broker: escrow://HOST:PORT[,HOST:PORT...] or file:FOLDER."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object a line, for scripts.")]


def _check_reason(why: str | None) -> str | None:
    """Reject a blank reason, which the record could not show."""
    if why is not None and not why.strip():
        raise error(Code.BAD_ARGUMENT, "--why gives no reason", "write one, or leave --why out")
    return why


Why = Annotated[
    str | None,
    typer.Option(
        "--why",
        help="The reason, for the record of acts: see escrowmq acts.",
        show_default=False,
        callback=_check_reason,
    ),
]
LogLevel = Annotated[
    str,
    typer.Option(
        "--log-level", metavar="LEVEL", help="What is logged on standard error: debug, info, warning or error."
    ),
]
LogJson = Annotated[
    bool, typer.Option("--log-json", help="One JSON object a line in the log, with the facts as fields.")
]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many.")]


def check_folder(folder: Path, option: str) -> None:
    """Create the output folder of a command before its work begins. Raises Misuse(BAD_ARGUMENT) if not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        text = f"{option}: nothing can be written into {folder}: {problem.strerror or problem}"
        raise error(Code.BAD_ARGUMENT, text, "name a folder that you may write into") from None


REFUSED_SECONDS = 1.0
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
    reasons = {address: _try_connect(address.host, address.port) for address in addresses}
    while reasons and all(reasons.values()) and time.monotonic() < deadline:
        time.sleep(_TRY_SECONDS)
        reasons = {address: _try_connect(address.host, address.port) for address in addresses}
    if reasons and all(reasons.values()):
        text = "; ".join(f"{address.location}: {reason}" for address, reason in reasons.items())
        raise error(Code.BROKER_AWAY, f"no broker answers at {text}", "is one running there (escrowmq serve)?")


def _try_connect(host: str, port: int) -> str | None:
    """Return why a connection is impossible; None if it may be possible."""
    try:
        socket.create_connection((host, port), REFUSED_SECONDS).close()
    except ConnectionRefusedError:
        return "connection refused"
    except socket.gaierror:
        return "no such host"
    except OSError:
        return None
    return None


@contextmanager
def bus_at(url: str, *, make: bool = False) -> Iterator[Bus]:
    """Connect to the broker(s) for the duration of a command. With ``make`` a folder without a log is created. Without
    it, as for commands that only read, raises Misuse(NOT_A_DATA_FOLDER): the name is mistyped."""
    from escrowmq.connecting import connect

    if not make and url.startswith("file:"):
        folder = Path(url.removeprefix("file:").removeprefix("//"))
        if not any(folder.glob("*.segment")):
            raise error(
                Code.NOT_A_DATA_FOLDER, f"there is no data in {folder}", "escrowmq send makes a folder, and serve"
            )
    check_reachable(url)
    with connect(url) as bus:
        yield bus


@contextmanager
def admin_at(url: str, *, make: bool = False) -> Iterator[Admin]:
    """Provide the admin interface of the broker(s) at ``url`` with a command's timeout. Unreachable brokers are
    recorded for the exit code and named on standard error."""
    from escrowmq.client.admin import Admin

    logging.getLogger("escrowmq.client.links.presence").setLevel(
        logging.ERROR
    )  # unreachable brokers are reported at the end
    with bus_at(url, make=make) as bus:
        yield Admin(bus.router, PATIENCE)
        RUN.missing += bus.missing()


def broker_time(admin: Admin) -> int:
    """Return microseconds since 1970 by the clock of the brokers (the earliest), which stamps all times in their
    responses; by this machine's clock if a broker does not send it."""
    return min((hello["time_us"] for hello in admin.hello() if "time_us" in hello), default=time.time_ns() // 1000)


def start_log(level: str, as_json: bool) -> None:
    """Log to standard error from now on. Raises Misuse(BAD_ARGUMENT) for an unknown level."""
    if level.lower() not in LEVELS:
        raise error(Code.BAD_ARGUMENT, f"--log-level: {level!r} is none of {', '.join(LEVELS)}")
    log_to_stderr(level, as_json=as_json)


def seconds(text: str | None, option: str) -> float | None:
    """Parse a duration such as ``5min`` into seconds. Raises Misuse(BAD_ARGUMENT) that names the option."""
    if text is None:
        return None
    try:
        return parse_quantity(text, SECONDS)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"{option}: {problem}") from None


def broker_or(read: Callable[[str, str], float | None], text: str | None, option: str) -> Any:
    """Parse a text with ``read``; return the word ``broker`` unchanged."""
    return text if text is None or text == "broker" else read(text, option)


def size(text: str, option: str) -> int:
    """Parse a size such as ``10GB`` into bytes. Raises Misuse(BAD_ARGUMENT) that names the option."""
    try:
        return int(parse_quantity(text, BYTES))
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, f"{option}: {problem}") from None


def pairs(texts: Iterable[str] | None, option: str) -> dict[str, str]:
    """Parse ``NAME=VALUE`` texts into a dict. Raises Misuse(BAD_ARGUMENT) that names the option."""
    made = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise error(Code.BAD_ARGUMENT, f"{option} {text!r} is not NAME=VALUE")
        made[name] = value
    return made
