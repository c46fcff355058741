"""GUARANTEES.md: every invariant is there, and every test that it names exists."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "GUARANTEES.md").read_text()
SECTIONS = dict(re.findall(r"^### (I\d+)\b(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL))
NAMED = re.findall(r"\[`([A-Za-z_][\w.]*)`\]\(([^)]+\.py)\)", TEXT)


@cache
def defined(path: Path) -> frozenset[str]:
    """Names of the test functions, test classes and state machines that a file defines."""
    tree = ast.parse(path.read_text())
    return frozenset(
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ) | frozenset(
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    )


def test_every_invariant_has_its_section_in_order() -> None:
    assert list(SECTIONS) == [f"I{number}" for number in range(1, 49)]


def test_every_section_says_where_it_stands() -> None:
    for number, section in SECTIONS.items():
        says_where_it_stands(number, section)


def says_where_it_stands(number: str, section: str) -> None:
    status = re.search(r"^\*\*(Held|Held in part|Not yet built)\.\*\*", section, re.MULTILINE)
    assert status, f"{number} has no status"
    tests = re.findall(r"\[`\w+`\]\(tests/", section)
    if status[1] == "Not yet built":
        assert not tests
    else:
        assert tests, f"{number} is said to be held, and no test is named"
        assert "Not when:" in section, f"{number} does not say when it does not hold"


def test_every_named_test_exists() -> None:
    assert NAMED
    assert not {path for _, path in NAMED if not (ROOT / path).is_file()}
    assert not [(name, path) for name, path in sorted(set(NAMED)) if name not in defined(ROOT / path)]
