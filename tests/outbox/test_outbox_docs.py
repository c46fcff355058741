"""docs/outbox.md: every program and command of it runs, in the order in which it is read."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import alembic.command
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from typer.testing import CliRunner

from escrowmq.cli.main import app
from escrowmq.outbox import check_schema, include_object, metadata
from escrowmq.outbox.tables import LANES, trans_lane

PAGE = (Path(__file__).parent.parent.parent / "docs" / "outbox.md").read_text()
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", PAGE, re.DOTALL)
PROGRAMS = {match[1]: text for kind, text in BLOCKS if kind == "python" and (match := re.match(r"# (\S+)\n", text))}
UUID = r"[0-9a-f]{8}-[0-9a-f-]{27}"
SAID = {
    "shop.py": "",
    "cart.py": f"cleared {UUID}\n",
    "cart_in_batches.py": "effects: 1\n",
    "purge.py": "purged: 0\n",
    "shop_async.py": "",
    "callbacks.py": "done: 1\n",
}


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs as they are, each in its own process; commands as they are typed."""
    monkeypatch.chdir(tmp_path)
    ran = []
    for kind, text in BLOCKS:
        if kind == "python":
            name = re.match(r"# (\S+)\n", text)[1]  # type: ignore[index]
            if name in SAID:
                result = run([sys.executable, "-W", "error", "-c", text])
                assert re.fullmatch(SAID[name], result.stdout), (name, result)
                ran.append(name)
        else:
            for line in text.splitlines():
                if line.startswith("export "):
                    monkeypatch.setenv(*line.removeprefix("export ").split("=", 1))
                elif "relay" in line:
                    run([sys.executable, "-m", *shlex.split(line)])
                else:
                    assert CliRunner().invoke(app, shlex.split(line)[1:]).exit_code == 0, line
    assert ran == list(SAID)
    with sa.create_engine("sqlite:///cart.db").connect() as connection:
        first, last = connection.scalars(sa.text("SELECT order_id FROM cleared ORDER BY order_id = 'o-3'"))
        assert (re.fullmatch(UUID, first) is not None, last) == (True, "o-3")
    with sa.create_engine("sqlite:///shop.db").connect() as connection:
        assert not connection.scalar(sa.text("SELECT COUNT(*) FROM trans_lane WHERE owner IS NOT NULL"))


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 0, (words, result.stderr)
    return result


ENVIRONMENT = """
from alembic import context
{given}
with context.config.attributes["engine"].connect() as connection:
    context.configure(connection=connection, target_metadata=target_metadata, include_object=include_object)
    with context.begin_transaction():
        context.run_migrations()
"""


def test_alembic_takes_the_tables_over(engine: sa.Engine, tmp_path: Path) -> None:
    """The two files of the page make the tables; afterwards autogenerate finds nothing to change."""
    (tmp_path / "versions").mkdir()
    (tmp_path / "env.py").write_text(ENVIRONMENT.format(given=PROGRAMS["env.py"]))
    (tmp_path / "versions" / "0001_outbox.py").write_text(PROGRAMS["versions/0001_outbox.py"])
    config = Config()
    config.set_main_option("script_location", str(tmp_path))
    config.set_main_option("path_separator", "os")
    config.attributes["engine"] = engine
    alembic.command.upgrade(config, "head")
    with engine.connect() as connection:
        check_schema(connection)
        assert connection.scalar(sa.select(sa.func.count()).select_from(trans_lane)) == LANES
        context = MigrationContext.configure(connection, opts={"include_object": include_object})
        assert compare_metadata(context, metadata) == []
