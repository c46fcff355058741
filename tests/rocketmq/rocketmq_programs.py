"""Builds the programs of clients/ and returns their commands. Each is built once per test process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "clients"


def _build_python() -> list[str]:
    return [sys.executable, str(FOLDER / "python" / "client.py")]


_BUILDERS: dict[str, Callable[[], list[str]]] = {"python": _build_python}
LANGUAGES = tuple(_BUILDERS)


@cache
def command_of(language: str) -> list[str]:
    """Return the command of a language's program. Skips the test without its tool chain; fails where CI is set."""
    try:
        return _BUILDERS[language]()
    except FileNotFoundError as problem:
        text = f"the {language} client needs a tool chain: {problem}"
        if os.environ.get("CI"):
            pytest.fail(text)
        pytest.skip(text)
