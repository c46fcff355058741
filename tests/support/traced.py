"""Memory that Python allocates, measured in a process of its own.

``tracemalloc.stop`` frees its tables while threads of native libraries may still allocate, which has crashed the whole
process of the tests. So it is switched on when a process begins, and never off: the process ends without tidying up.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys, pytest
code = pytest.main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""


def run_traced(module: str, names: str = "measured_*") -> None:
    """Run the functions of a test module that are called ``names`` (which the ordinary run does not collect) with
    tracemalloc on."""
    root = Path(__file__).parents[2]
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-o", f"python_functions={names}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        [sys.executable, "-X", "tracemalloc", "-c", PROGRAM, *options, module],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
