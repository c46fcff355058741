"""Downloads of a ``pom.xml`` from Maven's repository, once, into the user's cache. Debian package: ``maven``."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path

from escrowmq_lab.servers.process import run
from escrowmq_lab.servers.seam import Absent


def libraries(pom: Path, name: str) -> Path:
    """Return the folder of the jar files of ``pom``, downloaded at the first request for its version; ``name`` is the
    server's, for users and the folder's name. Safe for concurrent processes. Raises :class:`Absent` without Maven or
    access to its repository."""
    version = re.search(r"<version>([\d.]+)</version>", pom.read_text())
    assert version is not None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "escrowmq"
    folder = cache / f"{name.lower()}-{version[1]}"
    if folder.is_dir():
        return folder
    maven = shutil.which("mvn")
    if maven is None:
        raise Absent(f"{name} is fetched by Maven, which is not installed; on Debian: apt-get install maven")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name.lower()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():  # else another process was faster
            _fetch(maven, pom, name, folder)
    return folder


def _fetch(maven: str, pom: Path, name: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as making:
        shutil.copy(pom, Path(making) / "pom.xml")
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={making}/jars"]
        try:
            run([maven, "-q", "-B", "-f", f"{making}/pom.xml", *goal])
        except RuntimeError as problem:
            raise Absent(f"Maven could not fetch {name}: {problem}") from None
        (Path(making) / "jars").rename(folder)
