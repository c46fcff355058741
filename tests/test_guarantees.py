"""GUARANTEES.md: every invariant is there, says when it does not hold, and has tests that are marked with it."""

import re

from invariants import PAGE, ROOT, marked, page, sections

TEXT = (ROOT / "GUARANTEES.md").read_text()
SECTIONS = dict(re.findall(r"^### (I\d+)\b(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL))
NUMBERS = [f"I{number}" for number in range(1, 49)]


def test_every_invariant_has_its_section_in_order() -> None:
    assert list(SECTIONS) == list(sections()) == NUMBERS


def test_every_section_says_where_it_stands() -> None:
    for number, section in SECTIONS.items():
        says_where_it_stands(number, section)


def says_where_it_stands(number: str, section: str) -> None:
    status = re.search(r"^\*\*(Held|Held in part|Not yet built)\.\*\*", section, re.MULTILINE)
    assert status, f"{number} has no status"
    if status[1] == "Not yet built":
        assert number not in marked()
    else:
        assert marked().get(number), f"{number} is said to be held, and no test is marked with it"
        assert "Not when:" in section, f"{number} does not say when it does not hold"


def test_marks_are_of_invariants_that_are_there() -> None:
    assert marked().keys() <= set(NUMBERS)


def test_the_page_of_tests_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


def test_tests_of_the_conformance_suite_exist() -> None:
    paths = {(name, path) for tests in marked().values() for name, path in tests if not path.startswith("tests/")}
    assert not [name for name, path in paths if f"def {name}(" not in (ROOT / path).read_text()]


def test_it_is_read_in_one_sitting() -> None:
    assert len(TEXT.encode()) <= 30 * 1024
