"""Java peers: their libraries by Maven, once, into the user's cache; our loads compiled against them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from seam import Missing

HERE = Path(__file__).parent / "java"
QUIET = ["-Xshare:auto", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error"]


def cache() -> Path:
    """Where fetched and compiled things are kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "escrowmq" / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def program(name: str, package: str) -> str:
    """The path of a program; raises Missing with the Debian package that has it."""
    found = shutil.which(name)
    if found is None:
        raise Missing(f"{name} is not installed; on Debian: apt-get install {package}")
    return found


def libraries(pom: Path, name: str) -> Path:
    """The folder of the jar files that a pom names."""
    folder = cache() / name
    if not folder.is_dir():
        maven = program("mvn", "maven")
        with tempfile.TemporaryDirectory(dir=cache()) as making:
            shutil.copy(pom, Path(making) / "pom.xml")
            goal = ["dependency:copy-dependencies", f"-DoutputDirectory={making}/jars"]
            _run([maven, "-q", "-B", "-f", f"{making}/pom.xml", *goal])
            (Path(making) / "jars").rename(folder)
    return folder


def built(checkout: Path) -> Path:
    """The folder of the jar files of a FastMiniMQ checkout, which Maven builds in a copy."""
    folder = cache() / "fastminimq"
    if not folder.is_dir():
        maven = program("mvn", "maven")
        with tempfile.TemporaryDirectory(dir=cache()) as making:
            copy = Path(making) / "checkout"
            shutil.copytree(checkout, copy, ignore=shutil.ignore_patterns(".git"))
            goals = ["package", "dependency:copy-dependencies", "-DincludeScope=runtime"]
            _run([maven, "-q", "-B", "-DskipTests", "-f", str(copy), "-pl", "fastminimq-core", "-am", *goals])
            jars = Path(making) / "jars"
            jars.mkdir()
            target = copy / "fastminimq-core" / "target"
            for jar in [*target.glob("fastminimq-core-*.jar"), *(target / "dependency").glob("*.jar")]:
                if "sources" not in jar.name:
                    shutil.copy(jar, jars)
            jars.rename(folder)
    return folder


def compiled(source: str, jars: Path) -> str:
    """The class path on which the load ``source`` runs."""
    javac = program("javac", "openjdk-17-jdk-headless")
    classes = cache() / f"{jars.name}-classes"
    classes.mkdir(exist_ok=True)
    _run([javac, "-cp", f"{jars}/*", "-d", str(classes), str(HERE / source)])
    return f"{classes}:{jars}/*"


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise Missing(f"{Path(command[0]).name} failed: {done.stdout[-2000:]}")
