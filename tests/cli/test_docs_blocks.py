"""The first program of every page of docs/ runs in an empty folder, and runs again there: a reader tries it twice."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
import textwrap
from itertools import islice
from pathlib import Path

import pytest
import typer.main

import escrowmq as mq
import forked
from escrowmq.cli.main import app

DOCS = Path(__file__).parents[2] / "docs"
FIRST = {
    page.name: match[1]
    for page in sorted(DOCS.glob("*.md"))
    if (match := re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
}
READING = {"audit.md", "consuming.md", "delta.md", "django.md", "reconcile.md", "report.md", "security.md", "sweeps.md"}
"""Pages whose programs begin with what is there already: tests/pipeline/test_jobs_docs.py has it,
test_consuming_page.py, tests/spark/test_delta_page.py, tests/rights/test_security_page.py and tests/django (as files of
a site).
"""
GIVEN = {"relay-targets.md": "from escrowmq.outbox import inbox\n"}
"""What a page takes for granted: its block goes on from another page."""


def test_every_page_with_programs_is_known() -> None:
    assert set(FIRST) >= READING | set(GIVEN)
    assert set(FIRST) - READING >= {"barrier.md", "modes.md", "outbox.md", "spark.md"}


def fresh(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True)


def test_the_first_two_programs_of_the_barrier_run_twice(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "barrier.md").read_text(), re.DOTALL)
    for turn in ("first", "second"):
        result = fresh([sys.executable, "-W", "ignore::ResourceWarning", "-c", "".join(blocks[:2])], cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, ""), turn


@pytest.mark.parametrize("page", sorted(set(FIRST) - READING))
def test_the_first_program_of_a_page_runs_twice(page: str, tmp_path: Path) -> None:
    """The first time by a Python that starts, which is how a reader has it; what is asked of the second is not how it
    starts."""
    program = GIVEN.get(page, "") + FIRST[page]
    for turn, run in (("first", fresh), ("second", forked.run)):
        words = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-c", program]
        result = run(words, cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, ""), (page, turn)


@pytest.mark.verify
@pytest.mark.parametrize("page", ["asyncio.md", "from-celery.md", "from-outbox.md", "hooks.md"])
def test_all_programs_of_a_page_run_one_after_the_other_twice(page: str, tmp_path: Path) -> None:
    program = "".join(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL))
    for turn in ("first", "second"):
        words = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-c", program]
        result = fresh(words, cwd=tmp_path)
        assert (result.returncode, result.stderr) == (0, ""), (page, turn)


MOVE_TWICE = """
python move.py
escrowmq outbox relay --database-url sqlite:///shop.db --to file:./data --once
escrowmq outbox list --database-url sqlite:///shop.db
"""


@pytest.mark.verify
def test_rows_of_another_outbox_reach_the_broker_once_and_in_order(tmp_path: Path) -> None:
    """The program and the commands of docs/from-outbox.md, twice: each run adds three rows."""
    (tmp_path / "move.py").write_text(FIRST["from-outbox.md"])
    page = (DOCS / "from-outbox.md").read_text()
    for line in MOVE_TWICE.strip().splitlines() * 2:
        words = shlex.split(line)
        assert words[0] == "python" or line in page
        start = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "escrowmq"]
        result = fresh([*start, *words[1:]], cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    with mq.connect(f"file:{tmp_path / 'data'}") as bus, bus.consumer("test", ["orders"]) as consumer:
        found = [(message.key, message.message_id) for message in islice(consumer.messages(idle_timeout=60), 6)]
    assert [key for key, _ in found] == ["o-1"] * 6
    assert len(set(found)) == 6


@pytest.mark.parametrize("page", sorted(FIRST))
def test_every_block_of_a_page_is_python_and_imports_what_exists(page: str) -> None:
    """Parts of programs, too, which cannot run by themselves."""
    for block in re.findall(r"^ *```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE):
        for node in ast.walk(ast.parse(textwrap.dedent(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in (
                "escrowmq",
                "pyspark_escrow",
            ):
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name) or importlib.import_module(f"{node.module}.{name.name}")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mq":
                assert hasattr(mq, node.attr), node.attr


@pytest.mark.parametrize("page", sorted(page.name for page in DOCS.glob("*.md")))
def test_no_command_hides_a_variable_from_the_shell(page: str) -> None:
    """Within single quotes the shell puts nothing for $NAME: the command would send the name itself."""
    for block in re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        assert not re.search(r"'[^'\n]*\$[A-Z][^'\n]*'", block), block


def commands(page: str) -> list[list[str]]:
    """The words of each call of escrowmq in a page, without comments."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for language, block in found if language in ("", "sh")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("escrowmq ")]


TYPED = [page.name for page in sorted(DOCS.glob("*.md")) if commands(page.name)]


@pytest.mark.parametrize("page", TYPED)
def test_the_commands_of_a_page_can_be_typed(page: str) -> None:
    """Each exists, and takes these options and arguments."""
    for words in commands(page):
        command, rest = typer.main.get_command(app), list(words)
        context = command.make_context("escrowmq", ["--help"], resilient_parsing=True)
        while subcommands := getattr(command, "commands", None):
            assert rest, words
            assert rest[0] in subcommands, words
            command = subcommands[rest.pop(0)]
        try:
            command.make_parser(context).parse_args(rest)
        except Exception as problem:
            pytest.fail(f"{shlex.join(words)}: {problem}")


def test_every_link_within_the_page_of_symptoms_leads_somewhere() -> None:
    text = (DOCS / "operations.md").read_text()
    heads = {
        re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-")
        for head in re.findall(r"^## (.*)$", text, re.MULTILINE)
    }
    assert heads == set(re.findall(r"\]\(#([^)]+)\)", text))
