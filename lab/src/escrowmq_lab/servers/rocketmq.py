"""RocketMQ 5 for tests and benchmarks: a name server, and a broker with its gRPC proxy in one process ("local mode").
Debian packages: ``maven`` and ``openjdk-17-jre-headless``; Maven downloads RocketMQ once, into the user's cache folder.

Some of its ports listen on every address, and no setting changes that: start it in a process that has called
:func:`escrowmq_lab.servers.isolation.isolate`.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from escrowmq.errors import Misuse
from escrowmq.pipeline.java import find_java
from escrowmq_lab.servers import maven
from escrowmq_lab.servers.process import Server, accepts, free_port, run, started
from escrowmq_lab.servers.seam import Absent

POM = Path(__file__).with_name("rocketmq-pom.xml")
_OPENS = ("java.base/java.nio", "java.base/sun.nio.ch", "java.base/java.lang", "java.base/java.util")
JVM = ["-Xshare:auto", *(f"--add-opens={name}=ALL-UNNAMED" for name in _OPENS)]
JVM += ["--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED"]


@dataclass
class Rocketmq(Server):
    """A broker with its proxy. ``url`` is the HOST:PORT of gRPC clients."""

    names: str = ""
    broker: str = ""
    """Its HOST:PORT for commands: it may not have told the name server yet that it is there."""
    tool: tuple[str, ...] = ()
    """The command of RocketMQ's ``mqadmin``."""

    def create_topic(self, name: str, kind: str, queues: int = 8) -> None:
        """Create a topic for messages of one kind: NORMAL, FIFO, DELAY or TRANSACTION."""
        sizes = ["-r", str(queues), "-w", str(queues)]
        self.admin("updateTopic", "-b", self.broker, "-t", name, *sizes, "-a", f"+message.type={kind}")

    def create_group(self, name: str) -> None:
        """Create a consumer group, which a gRPC client needs."""
        self.admin("updateSubGroup", "-b", self.broker, "-g", name)

    def admin(self, command: str, *words: str) -> None:
        """Run a command of ``mqadmin``. Raises RuntimeError if it fails."""
        run([*self.tool, command, "-n", self.names, *words])


@contextlib.contextmanager
def serving(folder: Path, *, settings: Mapping[str, str] | None = None, heap: str = "1g") -> Iterator[Rocketmq]:
    """Run it with its data in ``folder``. ``settings``: further properties of the broker. Raises :class:`Absent`."""
    java, classes = _java(), libraries()
    names, port, proxy, remoting = (free_port() for _ in range(4))
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "names.conf", _name_server(folder, names))
    _write(folder / "broker.conf", _broker(folder, names, port) | dict(settings or {}))
    ports = {"grpcServerPort": proxy, "remotingListenPort": remoting, "localServeAddr": "127.0.0.1"}
    cluster = {"rocketMQClusterName": "DefaultCluster", "proxyMode": "local", "namesrvAddr": f"127.0.0.1:{names}"}
    (folder / "proxy.json").write_text(json.dumps({**ports, **cluster, "brokerConfigPath": f"{folder}/broker.conf"}))
    base = [java, *JVM, f"-Drocketmq.home.dir={folder}", f"-Duser.home={folder}", "-cp", f"{classes}/*"]
    proxy_main = ["org.apache.rocketmq.proxy.ProxyStartup", "-pc", f"{folder}/proxy.json"]
    made = Rocketmq(
        url=f"127.0.0.1:{proxy}",
        command=[*base[:1], f"-Xms{heap}", "-Xmx2g", *base[1:], *proxy_main],
        ready=lambda _: accepts(proxy),
        log=folder / "proxy.log",
        environment={"RMQ_PROXY_HOME": str(folder)},
        stop_signal=signal.SIGKILL,  # its own way to an end takes many seconds; its data goes with it
        names=f"127.0.0.1:{names}",
        broker=f"127.0.0.1:{port}",
        tool=(*base[:1], "-XX:TieredStopAtLevel=1", *base[1:], "org.apache.rocketmq.tools.command.MQAdminStartup"),
    )
    naming = Server(
        url="",
        command=[*base, "org.apache.rocketmq.namesrv.NamesrvStartup", "-c", f"{folder}/names.conf"],
        ready=lambda _: accepts(names),
        log=folder / "names.log",
        stop_signal=signal.SIGKILL,
    )
    with started(naming), started(made):
        yield made


def libraries() -> Path:
    """Return the folder of RocketMQ's jar files; see :func:`escrowmq_lab.servers.maven.libraries`."""
    return maven.libraries(POM, "RocketMQ-proxy")


def _name_server(folder: Path, port: int) -> dict[str, str]:
    stored = {"kvConfigPath": f"{folder}/kv.json", "configStorePath": f"{folder}/names.properties"}
    return {"listenPort": str(port), "bindAddress": "127.0.0.1", **stored}


def _broker(folder: Path, names: int, port: int) -> dict[str, str]:
    return {
        "brokerClusterName": "DefaultCluster",
        "brokerName": "broker",
        "brokerId": "0",
        "namesrvAddr": f"127.0.0.1:{names}",
        "listenPort": str(port),
        "haListenPort": str(free_port()),
        "bindAddress": "127.0.0.1",
        "brokerIP1": "127.0.0.1",
        "storePathRootDir": f"{folder}/store",
        "storePathCommitLog": f"{folder}/store/commitlog",
    }


def _write(path: Path, settings: Mapping[str, str]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))


def _java() -> str:
    try:
        return str(find_java().program)
    except Misuse:
        raise Absent("RocketMQ needs Java 17; on Debian: apt-get install openjdk-17-jre-headless") from None
