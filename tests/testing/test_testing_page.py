"""What docs/testing.md tells a reader to type works, and shows what the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
(REPORT,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
ACK = "    message.ack()\n"
FIRST = "def give_points(message: mq.Received, engine: sa.Engine) -> None:\n"


def run(folder: Path, shop: str) -> subprocess.CompletedProcess[str]:
    for name, text in (FILES | {"shop.py": shop}).items():
        (folder / name).write_text(text)
    words = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "escrowmq.testing.plugin"]
    alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(words, cwd=folder, env=alone, capture_output=True, text=True)


def test_the_programs_of_the_page_pass(tmp_path: Path) -> None:
    result = run(tmp_path, FILES["shop.py"])
    assert result.returncode == 0, result.stdout + result.stderr
    assert "4 passed" in result.stdout


def test_the_mistake_of_the_page_is_reported_as_it_says(tmp_path: Path) -> None:
    shop = FILES["shop.py"]
    assert shop.count(ACK) == shop.count(FIRST) == 1
    result = run(tmp_path, shop.replace(ACK, "").replace(FIRST, FIRST + ACK))
    shown = "\n".join(line.removeprefix("E").strip() for line in result.stdout.splitlines())
    assert "\n".join(line.strip() for line in REPORT.splitlines()) in shown, result.stdout
