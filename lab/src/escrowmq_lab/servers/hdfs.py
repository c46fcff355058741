"""HDFS for tests: a NameNode and a DataNode, Hadoop's own programs. Requires Java 17 or newer, ``pyspark`` and Debian's
``maven``. One jar file has the servers (``hdfs-pom.xml``, 56 MB); its dependencies are among those of PySpark. Maven
downloads it once, into the user's cache folder."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from xml.sax.saxutils import escape

from escrowmq.errors import Misuse
from escrowmq.pipeline.java import find_java
from escrowmq_lab.servers import maven
from escrowmq_lab.servers.process import Server, free_port, run, started
from escrowmq_lab.servers.seam import Absent

POM = Path(__file__).with_name("hdfs-pom.xml")
JVM = ["-Xms64m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
"""Options for fast starts rather than long-term speed."""
NAME_NODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
DATA_NODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"

_LOGGING = """\
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %c{1}: %m%n%ex{short}
"""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run the NameNode, with all data in ``folder``; ``url`` is ``hdfs://127.0.0.1:PORT``. The DataNode runs as long as
    the block. All users may read and write everything. Raises :class:`Absent`."""
    try:
        java = [str(find_java().program), *JVM]
    except Misuse:
        raise Absent("HDFS needs Java 17; on Debian: apt-get install openjdk-17-jre-headless") from None
    folder.mkdir(parents=True, exist_ok=True)
    url = f"hdfs://127.0.0.1:{free_port()}"
    java += [f"-Djava.io.tmpdir={folder}"]  # folder for its unpacked pages
    java += ["-cp", f"{_configuration(folder, url)}:{maven.libraries(POM, 'HDFS')}/*:{_pyspark_jars()}/*"]
    run([*java, NAME_NODE, "-format", "-nonInteractive"])
    with contextlib.ExitStack() as stack:
        servers = []
        for name, marker in ((NAME_NODE, "NameNode RPC up at"), (DATA_NODE, "successfully registered with NN")):
            log = folder / f"{name.rpartition('.')[2].lower()}.log"
            ready = partial(_log_contains, log, marker)
            servers.append(stack.enter_context(started(Server(url, [*java, name], ready, log))))
        yield servers[0]


def _log_contains(log: Path, words: str, _: int) -> bool:
    return log.exists() and words in log.read_text(errors="replace")


def _pyspark_jars() -> Path:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise Absent("HDFS runs with PySpark's jar files: pip install 'escrowmq[spark]'")
    return Path(found.origin).parent / "jars"


def _configuration(folder: Path, url: str) -> Path:
    """Write Hadoop's configuration into a separate folder, which must be first on the class path."""
    made = folder / "configuration"
    made.mkdir(exist_ok=True)
    anywhere = "127.0.0.1:0"  # a free port
    _write(made / "core-site.xml", {"fs.defaultFS": url, "hadoop.tmp.dir": str(folder / "tmp")})
    servers = {
        "dfs.namenode.name.dir": f"file://{folder / 'names'}",
        "dfs.datanode.data.dir": f"file://{folder / 'blocks'}",
        "dfs.replication": "1",
        "dfs.permissions.enabled": "false",
        "dfs.namenode.http-address": anywhere,
        "dfs.datanode.address": anywhere,
        "dfs.datanode.ipc.address": anywhere,
        "dfs.datanode.http.address": anywhere,
        "dfs.heartbeat.interval": "1",
        "dfs.namenode.handler.count": "2",
    }
    _write(made / "hdfs-site.xml", servers)
    (made / "log4j2.properties").write_text(_LOGGING)
    return made


def _write(file: Path, settings: Mapping[str, str]) -> None:
    rows = (
        f"<property><name>{name}</name><value>{escape(value)}</value></property>" for name, value in settings.items()
    )
    file.write_text("\n".join(["<configuration>", *rows, "</configuration>", ""]))
