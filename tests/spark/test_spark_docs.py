"""docs/spark.md is a notebook: its cells run one after the other in one session, and its tables name every option."""

import re
from pathlib import Path

import pytest

from escrowmq.spark.options import READING, WRITING

PAGE = (Path(__file__).parents[2] / "docs" / "spark.md").read_text()
CELLS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.spark
def test_the_notebook_runs(spark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    try:
        for number, cell in enumerate(CELLS):
            exec(compile(cell, f"docs/spark.md, cell {number}", "exec"), names)
    finally:
        if (broker := names.get("broker")) is not None and broker.returncode is None:
            broker.kill()
            broker.communicate()
    assert names["new"] is not None


@pytest.mark.parametrize(("title", "options"), [("Of reading:", READING), ("Of writing:", WRITING)])
def test_every_option_is_in_the_table_and_no_other(title, options):
    rows = PAGE.partition(title)[2].lstrip().partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == list(options)
