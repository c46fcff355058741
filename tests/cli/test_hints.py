"""What a message tells somebody to do can be done: commands, options, methods, parameters and settings that errors name
exist.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import escrowmq as mq
from escrowmq import outbox
from escrowmq.cli.main import app
from escrowmq.client.admin import Admin
from escrowmq.client.altering import GroupChanges, ProducersChanges
from escrowmq.gateway.limits import GatewaySettings
from escrowmq.settings import BrokerSettings

SOURCE = Path(mq.__file__).parent
FACES = {"bus": mq.Bus, "producer": mq.Producer, "consumer": mq.Consumer, "admin": Admin, "outbox": outbox}


def texts() -> list[tuple[str, str]]:
    """Every string of the product that names something in backticks, docstrings apart: where it stands, and the string.
    What is filled in later is X."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        source = path.read_text()
        if "`escrowmq" not in source:  # saves reading most files as programs
            continue
        tree = ast.parse(source)
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        documents = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | documents:
                text = node.value
            else:
                continue
            if "`escrowmq " in text:
                found.append((path.relative_to(SOURCE).as_posix(), text))
    return found


def command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and what is left of them."""
    found: Any = typer.main.get_command(app)
    while words and hasattr(found, "commands"):
        assert words[0] in found.commands, f"no command {words[0]!r}"
        found, words = found.commands[words[0]], words[1:]
    return found, words


def test_there_are_messages_that_name_commands() -> None:
    assert len(texts()) > 5


def test_every_command_that_is_named_exists_with_its_options() -> None:
    for where, named in [
        (where, named) for where, text in texts() for named in re.findall(r"`escrowmq ([^`]*)`", text)
    ]:
        found, rest = command(named.split())
        options = {name for parameter in found.params for name in parameter.opts}
        for word in rest:
            if word.startswith("-"):
                assert word in options, f"{where}: {named} has no option {word}"


@cache
def names() -> set[str]:
    """Everything with an underscore that a person can set, call or give."""
    found = {f.name for shape in (BrokerSettings, GatewaySettings) for f in dataclasses.fields(shape)}
    found |= set(GroupChanges.__annotations__) | set(ProducersChanges.__annotations__) | set(mq.Message.__annotations__)
    for face in (mq.Bus, mq.Producer, mq.Consumer, Admin):
        for name, member in inspect.getmembers(face, callable):
            found |= {name, *(inspect.signature(member).parameters if not name.startswith("__") else ())}
    return found


@pytest.mark.parametrize("code", [code for code in mq.Code if code.branch is not None], ids=lambda code: code.name)
def test_every_name_in_the_hint_of_a_code_exists(code: mq.Code) -> None:
    known = names()
    plain = re.sub(r"`[^`]*`", "", code.hint)
    for dotted in re.findall(r"@?\b((?:bus|producer|consumer|admin|outbox)(?:\.\w+)+)", plain):
        parts = dotted.split(".")
        face = FACES["admin" if parts[:2] == ["bus", "admin"] else parts[0]]
        assert parts[-1] == "admin" or hasattr(face, parts[-1]), dotted
    for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", plain):
        assert name in known or hasattr(mq, name) or hasattr(outbox, name), name
    for call, given in re.findall(r"bus\.(\w+)\(\.\.\., (\w+)=", plain):
        assert given in inspect.signature(getattr(mq.Bus, call)).parameters


def test_the_checks_find_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match="no command 'grups'"):
        command(["grups", "list"])
    assert "max_delays" not in names()
