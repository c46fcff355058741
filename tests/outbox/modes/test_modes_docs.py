"""The blocks of docs/modes.md run, one after the other, in one program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "modes.md"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    finally:
        for name in ("bus", "shop", "cart"):
            if name in names:
                names[name].close() if name == "bus" else names[name].dispose()
