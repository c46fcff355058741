"""The programs in docs/barrier.md run."""

import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "barrier.md").read_text()


def test_the_programs_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    assert program.count("bind_tx") == 3
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(r"[0-9a-f-]{36} b'one book'\n", result.stdout)
