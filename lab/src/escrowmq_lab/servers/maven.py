"""Fetches what a ``pom.xml`` names from Maven's repository, once, into the user's cache folder. Debian package:
``maven``.
"""

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
    """Return the folder of the jar files that ``pom`` names, fetched the first time that its version is asked for;
    ``name`` is the server's, for people and as the name of a folder. Safe against other processes that do the same;
    raises :class:`Absent` without Maven or a way to its repository."""
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
        if not folder.is_dir():  # else another process was quicker
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
