"""RabbitMQ for tests, with its own ``epmd``. Debian package: ``rabbitmq-server``. The Debian command
``rabbitmq-server`` changes to the user rabbitmq and its folders; the script in the library does neither."""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from escrowmq_lab.servers.process import Server, accepts, free_port, started
from escrowmq_lab.servers.seam import Absent

HELLO = b"AMQP\x00\x00\x09\x01"
"""First bytes of an AMQP 0-9-1 client; the response is a frame that begins with 1, 0, 0 and a length."""
ANY = bytes(range(256))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server with its data in ``folder``. Raises :class:`Absent`."""
    program, epmd = _find_program(), shutil.which("epmd")
    if program is None or epmd is None:
        raise Absent("RabbitMQ is not installed; on Debian: apt-get install rabbitmq-server")
    home = folder / "rabbitmq"
    home.mkdir(parents=True, exist_ok=True)
    password, port, names_port = secrets.token_hex(8), free_port(), free_port()
    environment = _environment(home, names_port)
    _write_configuration(home, port, password)
    names = Server(
        url="",
        command=[epmd, "-address", "127.0.0.1", "-port", str(names_port)],
        ready=lambda _: accepts(names_port),
        log=folder / "epmd.log",
        environment=environment,
    )
    broker = Server(
        url=f"amqp://escrow:{password}@127.0.0.1:{port}/",
        command=[str(program)],
        ready=lambda _: accepts(port, say=HELLO, hear=ANY),
        log=folder / "rabbitmq.log",
        environment=environment,
    )
    with started(names), started(broker):
        yield broker


def _find_program() -> Path | None:
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("*/sbin/rabbitmq-server"))
    on_path = shutil.which("rabbitmq-server")
    return found[-1] if found else Path(on_path) if on_path else None


def _environment(home: Path, names_port: int) -> dict[str, str]:
    loopback = "-kernel inet_dist_use_interface {127,0,0,1}"
    return {
        "HOME": str(home),  # the Erlang cookie is created here
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "ERL_EPMD_PORT": str(names_port),
        "RUNNING_UNDER_SYSTEMD": "true",  # the script then becomes the server, instead of waiting beside it
        "RABBITMQ_NODENAME": "escrowmq@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": f"{loopback} +sbwt none +sbwtdcpu none +sbwtdio none",
        "RABBITMQ_MNESIA_BASE": str(home / "data"),
        "RABBITMQ_LOG_BASE": str(home / "logs"),
        "RABBITMQ_LOGS": "-",
        "RABBITMQ_CONF_ENV_FILE": str(home / "no-rabbitmq-env.conf"),
        "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
        "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "no-advanced.config"),
        "RABBITMQ_GENERATED_CONFIG_DIR": str(home / "config"),
        "RABBITMQ_SCHEMA_DIR": str(home / "schema"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "enabled_plugins"),
        "RABBITMQ_PID_FILE": str(home / "pid"),
    }


def _write_configuration(home: Path, port: int, password: str) -> None:
    (home / "enabled_plugins").write_text("[].\n")
    settings = home / "rabbitmq.conf"
    settings.touch(mode=0o600)
    settings.write_text(
        f"listeners.tcp.1 = 127.0.0.1:{port}\n"
        "default_user = escrow\n"
        f"default_pass = {password}\n"
        "log.console = true\n"
        "log.console.level = warning\n"
        "vm_memory_high_watermark.absolute = 512MB\n"
        "disk_free_limit.absolute = 1MB\n"
        "handshake_timeout = 120000\n"  # of a client on a busy machine
    )
