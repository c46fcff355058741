"""docs/spark.md is a notebook: its cells run one after the other in one session, and its tables name every option. So
does what docs/start.md says about Spark.
"""

import re
from pathlib import Path

import pytest
from killing import Broker, content

import escrowmq as mq
from escrowmq.spark.options import READING, WRITING

HERE = Path(__file__).parents[2]
START = (HERE / "docs" / "start.md").read_text()
PAGE = (HERE / "docs" / "spark.md").read_text()
CELLS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.invariant("I42")
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


@pytest.mark.spark
def test_the_program_of_the_first_hour_runs_and_runs_again(spark, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"## In Spark.*?```python\n(.*?)```", START, re.DOTALL)
    broker = Broker(tmp_path / "data")
    try:
        program = program.replace("escrow://127.0.0.1:7700", broker.url)
        program = program.replace('"checkpoint"', repr(str(tmp_path / "checkpoint")))  # Java stands in another folder
        with mq.connect(broker.url) as bus:
            producer = bus.producer("shop")
            for number in range(2):
                producer.send("orders", b"one book", key=f"o-{number}", tag="paid")
                exec(compile(program, "docs/start.md", "exec"), {})
        assert content(broker.url, "loud-orders") == {(f"o-{number}", b"ONE BOOK"): 1 for number in range(2)}
        assert re.search(r"paid\|\s+2\|", capsys.readouterr().out)
    finally:
        broker.kill()


@pytest.mark.parametrize(("title", "options"), [("Of reading:", READING), ("Of writing:", WRITING)])
def test_every_option_is_in_the_table_and_no_other(title, options):
    rows = PAGE.partition(title)[2].lstrip().partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", rows, re.MULTILINE) == list(options)
