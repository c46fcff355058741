"""Keep the classes that a Spark session has loaded, so that Java need not read and verify them again.

Java writes such an archive at its end, and later maps it at its start (class data sharing, JEP 350), if it is the same
Java, and the path, size and time of each file of the class path are the same. So the paths are fixed ones in the user's
cache, ``$XDG_CACHE_HOME/escrowmq/spark-DIGEST``:

==============  =====================================================================
``home``        a ``SPARK_HOME`` of links to the installed PySpark
``conf``        an empty ``SPARK_CONF_DIR``: Java accepts no other folder
``java-*.jsa``  the archive, about 160 MB; its name has its size
==============  =====================================================================
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.java import Java, run_java

logger = logging.getLogger(__name__)

_SILENT = "-Xlog:cds*=off"
"""Java would print what it cannot archive, and why it does not use an archive."""


@dataclass(frozen=True, slots=True)
class SparkFolder:
    """The fixed paths of one Java and one PySpark. ``lasts``: whether later processes find them."""

    folder: Path
    java: Path
    lasts: bool

    @property
    def home(self) -> Path:
        """Return the path for ``SPARK_HOME``."""
        return self.folder / "home"

    @property
    def conf(self) -> Path:
        """Return the path for ``SPARK_CONF_DIR``."""
        return self.folder / "conf"

    def find_archive(self) -> Path | None:
        """Return the archive, if it is there and whole: Java crashes with the beginning of one."""
        for found in self.folder.glob("java-*.jsa"):
            with contextlib.suppress(OSError):
                if found.stem == f"java-{found.stat().st_size}":
                    return found
        return None

    @contextlib.contextmanager
    def share_classes(self, *, keeps: bool) -> Iterator[str]:
        """Context manager: yield Java's options for a session that maps the archive, if there is one. With ``keeps``
        the session writes a new one at its end, which takes about as long as a small audit; it must end within the
        block. Raises Misuse(BAD_SETTING) if the user's cache cannot be written."""
        archive = self.find_archive()
        if not keeps:
            yield "" if archive is None else f'"-XX:SharedArchiveFile={archive}" {_SILENT}'
            return
        with self._make_temporary() as new:
            written = Path(new, "java.jsa")
            yield f'"-XX:ArchiveClassesAtExit={written}" {_SILENT}'
            try:
                self._keep(written)
            except OSError as problem:
                logger.warning("Java's classes were not kept: %s", problem)

    def _make_temporary(self) -> tempfile.TemporaryDirectory[str]:
        if self.lasts:
            with contextlib.suppress(OSError):  # it was made before, and cannot be written now
                return tempfile.TemporaryDirectory(dir=self.folder)
        text = "classes cannot be kept: the user's cache cannot be written"
        raise Misuse(Code.BAD_SETTING, text, "set XDG_CACHE_HOME")

    def _keep(self, written: Path) -> None:
        """Make a written archive the one that sessions use, if Java can use it. It is on disk before it has its name:
        after a power failure it would have the right size, and other content."""
        with written.open("rb") as file:
            os.fsync(file.fileno())
        options = (f"-XX:SharedArchiveFile={written}", f"-XX:ErrorFile={written}.log", _SILENT, "-version")
        if not run_java(self.java, *options):
            raise OSError("Java cannot use what it has written")
        for old in self.folder.glob("java-*.jsa"):
            old.unlink(missing_ok=True)
        written.rename(self.folder / f"java-{written.stat().st_size}.jsa")


def open_spark_folder(java: Java, otherwise: Path) -> SparkFolder | None:
    """Return the folder of this Java and the installed PySpark, created if needed; in the folder ``otherwise`` if the
    user's cache cannot be written. None if PySpark is missing or was not installed as a package."""
    found = importlib.util.find_spec("pyspark")
    packages = (found and found.submodule_search_locations) or ()
    parts = [Path(package, part) for package in packages for part in ("bin", "jars")]
    if not parts or not all(part.is_dir() for part in parts):
        return None
    known = [os.path.realpath(java.program), *map(str, parts)]
    key = repr([(path, os.stat(path).st_mtime_ns) for path in known])
    name = f"spark-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return _make(SparkFolder(cache / "escrowmq" / name, java.program, lasts=True), parts)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return _make(SparkFolder(otherwise / name, java.program, lasts=False), parts)


def _make(made: SparkFolder, parts: Sequence[Path]) -> SparkFolder:
    """Create what is missing in the folder. Spark's home links to ``parts`` of the installed PySpark. It lacks the
    archive of its Python part, which Spark puts first in the search path of its Python processes: its modules are not
    compiled, so each process would compile its imports, 1.3 s of processor time instead of 0.1 s."""
    made.conf.mkdir(parents=True, exist_ok=True)
    made.home.mkdir(exist_ok=True)
    for part in parts:
        with contextlib.suppress(FileExistsError):
            (made.home / part.name).symlink_to(part)
    return made
