"""Runs commands one after the other in the environment's own Python, and prints what came of each as a JSON line.

``python runner.py FOLDER`` reads the commands as a JSON list of lists from standard input. One that serves runs as a
process of its own, which is stopped when it has said that it is ready.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import traceback
from typing import Any

SERVING = ("serve", "dev", "gateway", "console")


def main() -> None:
    os.chdir(sys.argv[1])
    with contextlib.suppress(ModuleNotFoundError, AttributeError):  # typer is not there, or is another version
        import typer.testing

        # The tree of all commands is made once, not for each command.
        typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]
    for words in json.load(sys.stdin):
        serves = words[0] in SERVING and words[-1] != "--help"
        print(json.dumps({"words": words, **(served(words) if serves else ran(words))}), flush=True)


def ran(words: list[str]) -> dict[str, Any]:
    """Run a command in this process, which keeps what it imported."""
    try:
        from typer.testing import CliRunner
    except ModuleNotFoundError:
        return typed(words)

    from escrowmq.cli.main import app

    result = CliRunner().invoke(app, words)
    failed = result.exception if not isinstance(result.exception, SystemExit) else None
    trace = "".join(traceback.format_exception(failed)) if failed is not None else ""
    return {"code": result.exit_code, "told": result.output, "trace": trace}


def typed(words: list[str]) -> dict[str, Any]:
    """Run the program where the extra ``cli`` is missing; it exits before it reads the command."""
    from escrowmq.__main__ import main as program

    code: object = 0
    told, trace, sys.argv = io.StringIO(), "", ["escrowmq", *words]
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        try:
            program()
        except SystemExit as end:
            code = end.code
        except Exception:
            trace = traceback.format_exc()
    return {"code": code, "told": told.getvalue(), "trace": trace}


def served(words: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "escrowmq", *words, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = process.stdout.readline()
    if ready:
        process.terminate()
    rest, errors = process.communicate()
    trace = errors if "Traceback" in errors else ""
    return {"code": process.returncode, "told": ready + rest + errors, "trace": trace}


if __name__ == "__main__":
    main()
