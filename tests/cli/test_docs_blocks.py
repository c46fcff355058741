"""The first program of every page of docs/ runs in an empty folder, and runs again there: a reader tries it twice."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FIRST = {
    page.name: match[1]
    for page in sorted(DOCS.glob("*.md"))
    if (match := re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
}
READING = {"audit.md", "reconcile.md", "report.md", "sweeps.md"}
"""Pages whose programs begin with what is there already: tests/pipeline/test_jobs_docs.py has it."""
GIVEN = {"relay-targets.md": "from escrowmq.outbox import inbox\n"}
"""What a page takes for granted: its block goes on from another page."""


def test_every_page_with_programs_is_known() -> None:
    assert set(FIRST) >= READING | set(GIVEN)
    assert set(FIRST) - READING >= {"barrier.md", "modes.md", "outbox.md", "spark.md"}


@pytest.mark.parametrize("page", sorted(set(FIRST) - READING))
def test_the_first_program_of_a_page_runs_twice(page: str, tmp_path: Path) -> None:
    program = GIVEN.get(page, "") + FIRST[page]
    for turn in ("first", "second"):
        words = [sys.executable, "-W", "error", "-W", "ignore::ResourceWarning", "-c", program]
        result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert (result.returncode, result.stderr) == (0, ""), (page, turn)


@pytest.mark.parametrize("page", sorted(page.name for page in DOCS.glob("*.md")))
def test_no_command_hides_a_variable_from_the_shell(page: str) -> None:
    """Within single quotes the shell puts nothing for $NAME: the command would send the name itself."""
    for block in re.findall(r"```sh\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
        assert not re.search(r"'[^'\n]*\$[A-Z][^'\n]*'", block), block
