"""Golden scripts: behaviour as text.

A script is a text file of blocks. Each block has commands, a line ``---``, and what they print. A line that begins with
``#`` is a comment, and an empty line ends a block::

    # A half message is invisible until it is committed.
    prepare shop id=a
    ---
    a: OK

:func:`run` compares what a script prints with what it says; ``UPDATE_GOLDEN=1`` writes the outputs anew, for you to
read the difference.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

Interpreter = Callable[[str, list[str], dict[str, str]], Iterator[str]]
"""Runs a command with its words and its ``name=value`` options, and yields the lines that it prints."""


def run(path: Path, interpret: Interpreter) -> None:
    """Run a script; raise AssertionError where it prints something else than it says."""
    said = path.read_text()
    printed = "\n".join(_run_block(block, interpret) for block in said.rstrip("\n").split("\n\n")) + "\n"
    printed = printed.replace("\n\n\n", "\n\n")
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(printed)
    assert printed == said, f"{path.name} prints something else; UPDATE_GOLDEN=1 writes it anew"


def _run_block(block: str, interpret: Interpreter) -> str:
    lines = block.strip("\n").split("\n")
    given = lines[: lines.index("---")] if "---" in lines else lines
    commands = [line for line in given if line and not line.startswith("#")]
    if not commands:
        return block.strip("\n") + "\n"
    printed = [text for line in commands for text in _run_line(line, interpret)]
    return "\n".join([*given, "---", *printed]) + "\n"


def _run_line(line: str, interpret: Interpreter) -> Iterator[str]:
    name, *rest = shlex.split(line)
    words = [word for word in rest if "=" not in word]
    options = dict(word.split("=", 1) for word in rest if "=" in word)
    yield from interpret(name, words, options)
