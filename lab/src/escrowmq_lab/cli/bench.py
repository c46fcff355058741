"""``escrowmq-lab bench``: run the benchmark scripts of a source checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import Json
from escrowmq.cli.printing import notice, print_json, print_table
from escrowmq.errors import Code, error


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Which benchmarks; all scripts when none is named (not `peers`, which takes long).",
        ),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the benchmark scripts are.")] = Path("bench"),
    list_only: Annotated[bool, typer.Option("--list", help="Only list what there is.")] = False,
    url: Annotated[
        str | None,
        typer.Option(help="Measure this broker, with the token of the environment. For scripts that start one."),
    ] = None,
    only: Annotated[str | None, typer.Option(help="Only figures whose name contains this.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length of one measurement.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Measurements per figure.")] = None,
    json: Json = False,
) -> None:
    """Run the benchmarks in bench/: one script per claim; each prints machine, settings, medians and spread."""
    scripts = {path.stem: path for path in sorted(folder.glob("*.py")) if not path.stem.startswith("_")}
    every = list(scripts)
    scripts |= {path.parent.name: path for path in sorted(folder.glob("*/__main__.py"))}
    if not scripts:
        raise error(
            Code.BAD_ARGUMENT,
            f"there are no benchmark scripts in {folder}",
            "run it in a source checkout, or name their folder with --folder",
        )
    for name in names or []:
        if name not in scripts:
            raise error(Code.BAD_ARGUMENT, f"there is no benchmark {name!r}", f"one of {', '.join(scripts)}")
    if list_only:
        listed = [{"name": name, "claim": _claim(path)} for name, path in scripts.items()]
        if json:
            print_json(listed)
        else:
            print_table(("benchmark", "claim"), [(one["name"], one["claim"]) for one in listed], "none")
        return
    given = {"--url": url, "--only": only, "--seconds": seconds, "--repeats": repeats}
    options = [*(["--json"] if json else []), *(f"{name}={one}" for name, one in given.items() if one is not None)]
    failed = [name for name in names or every if not _run_script(scripts[name], options)]
    if failed:
        notice(f"failed: {', '.join(failed)}")
        raise typer.Exit(Exit.FINDING)


def _run_script(script: Path, options: list[str]) -> bool:
    """Run one script in a separate process, with this Python."""
    command = [sys.executable, str(script), *options]
    return subprocess.run(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False).returncode == 0


def _claim(script: Path) -> str:
    """Return the first line of a script's docstring."""
    import ast

    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    return text.splitlines()[0] if text else ""
