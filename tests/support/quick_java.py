"""The Java of the tests, as ``JAVA_HOME``: it takes the classes that it loads to be sound, and compiles them plainly.

The suite starts dozens of Java processes that live for seconds, and nearly all that they do is load classes: those of
Spark and Kafka, which their publishers have compiled. To verify them takes Java a fifth of the processor time of a
Spark session's start, and a quarter of a Kafka's.
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

FLAGS = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote -XX:TieredStopAtLevel=1 -XX:-UsePerfData"
FLAGS += " -Dspark.python.authenticate.socketTimeout=300s"  # of Python, when it fetches a result: not 15 s


def write(folder: Path) -> Path | None:
    """A home in ``folder`` whose Java is the one that would be found without it; None where there is none."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None or not os.access(java, os.X_OK):
        return None
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(java)} {FLAGS} -Duser.home="$HOME" "$@"\n')
    program.chmod(0o755)
    return folder
