"""The bytes of the protocol as text: see tests/wire/scripts, and tests/support/frame_script.py for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

import frame_script
import golden

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_frames_are_the_bytes_that_the_script_says(script: Path) -> None:
    golden.run(script, frame_script.interpret)
