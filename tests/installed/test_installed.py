"""What a user has who installed this with pip: no extra, or one. Every command works, or names the command that
installs what it lacks.

The environments are real ones, put together from what is installed here (``environments.py``).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import environments
import pytest
import typer

from escrowmq.cli.main import app

HERE = Path(__file__).parent
URL = ["--url", "file:data"]
DATABASE = ["--database-url", "sqlite:///shop.db"]
DEV = ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--console", "127.0.0.1:0"]
NOT_THERE = "folder-that-is-not-there"

NEEDS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("send", "orders", "paid", *URL): (),
    ("prepare", "orders", "paid", "--id", "o-1", *URL): (),
    ("commit", "o-1", *URL): (),
    ("tail", "orders", *URL): (),
    ("status", *URL): (),
    ("find", "o-1", *URL): (),
    ("plan", "list"): (),
    ("topics", "list", *URL): (),
    ("transactions", "list", *URL): (),
    ("groups", "list", *URL): (),
    ("writers", "list", *URL): (),
    ("acts", "list", *URL): (),
    ("dead-letters", "list", "cart", *URL): (),
    ("lookup", "o-1", *URL): (),
    ("backup", "data", "--to", "copy"): (),
    ("log", "dump", "data"): (),
    ("sql", "from orders", *URL): ("sql",),
    ("serve", "-d", "served", "-l", "127.0.0.1:0"): ("serve",),
    ("outbox", "migrate", *DATABASE): ("outbox",),
    ("outbox", "list", *DATABASE): ("outbox",),
    ("inbox", "list", "cart", *DATABASE): ("outbox",),
    ("stuck", "list", *DATABASE): ("outbox",),
    ("compensate", "list", *DATABASE): ("outbox",),
    ("status", *URL, *DATABASE): ("outbox",),
    ("find", "o-1", *URL, *DATABASE): ("outbox",),
    ("audit", NOT_THERE): ("spark",),
    ("report", "--url", f"file:{NOT_THERE}", "--out", "page"): ("spark",),
    ("demo", "--orders", NOT_THERE): ("serve", "spark"),
    ("dev", "-d", "tried", *DEV): ("serve", "console", "http"),
    ("gateway", *URL, "--listen", "127.0.0.1:0"): ("http",),
    ("console", *URL, "--listen", "127.0.0.1:0"): ("console",),
}
"""Commands, and the extras that each needs besides ``cli``, in the order in which they are missed."""


def has(extras: tuple[str, ...], wanted: str) -> bool:
    """Whether these extras bring all packages of another one."""
    return environments.closure(wanted).keys() <= environments.closure(*extras).keys()


def chosen() -> list[tuple[str, ...]]:
    """Return no extra, and each one: beside ``cli`` where it is one for programs."""
    return [(), *((one,) if has((one,), "cli") else ("cli", one) for one in environments.extras())]


@cache
def names() -> list[str]:
    """All commands and groups of commands."""
    return sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]  # it is a group


def run(folder: Path, wheel: Path, extras: tuple[str, ...], commands: list[list[str]]) -> list[dict[str, Any]]:
    python = environments.make(folder / "env", wheel, *extras)
    (folder / "work").mkdir()
    done = subprocess.run(
        [python, HERE / "runner.py", folder / "work"],
        input=json.dumps(commands), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"words"')]


@pytest.mark.parametrize("extras", chosen(), ids=lambda extras: ",".join(extras) or "none")
def test_every_command_works_or_names_what_to_install(tmp_path: Path, wheel: Path, extras: tuple[str, ...]) -> None:
    commands = [list(words) for words in NEEDS]
    helps = [[name, "--help"] for name in names()]
    found = run(tmp_path, wheel, extras, [*commands, *helps])
    assert [one["words"] for one in found] == [*commands, *helps]
    assert {" ".join(one["words"]): one["trace"] for one in found if one["trace"]} == {}
    wrong = {}
    for one in found:
        missed = [extra for extra in ("cli", *NEEDS.get(tuple(one["words"]), ())) if not has(extras, extra)]
        told = " ".join(one["told"].split())
        if missed:
            right = f'python -m pip install "escrowmq[{missed[0]}]"' in told and one["code"] == 2
        else:
            right = "MISSING_PACKAGE" not in told and (one["code"] == 0 or "--help" not in one["words"])
        if not right:
            wrong[" ".join(one["words"])] = told
    assert wrong == {}
    if not has(extras, "cli"):  # the commands above were run in one process
        program = [tmp_path / "env" / "bin" / "python", "-m", "escrowmq", "status"]
        alone = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert (alone.returncode, alone.stdout, "Traceback" in alone.stderr) == (2, "", False)
        assert 'python -m pip install "escrowmq[cli]"' in " ".join(alone.stderr.split())


def test_a_program_needs_no_extra(tmp_path: Path, wheel: Path) -> None:
    """Without one, an application uses an embedded broker and what a client needs; the command line's packages are not
    there."""
    python = environments.make(tmp_path / "env", wheel)
    absent = {"typer", "rich", "prometheus_client", "fastapi", "sqlalchemy", "pyspark"}
    program = """
import importlib.util, sys
import escrowmq
with escrowmq.connect("file:data") as bus:
    with bus.producer("shop", unasked=True) as producer, producer.transaction() as txn:
        txn.send("orders", b"paid")
    with bus.consumer("cart", "orders") as consumer:
        message = next(iter(consumer))
        print(message.body.decode())
        message.ack()
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name)])
"""
    done = subprocess.run(
        [python, "-c", program, *sorted(absent)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "paid\n\n", "")


def test_a_django_site_needs_one_extra(tmp_path: Path, wheel: Path) -> None:
    """Its tables, its outbox, its tasks, its worker with a relay and a broker: without the command line's packages."""
    python = environments.make(tmp_path / "env", wheel, "django")
    site = shutil.copytree(HERE.parents[1] / "examples" / "django", tmp_path / "site")
    for words in (["migrate", "--run-syncdb", "--verbosity", "0"], ["check"], ["order", "o-1"]):
        done = subprocess.run([python, "manage.py", *words], cwd=site, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    worker = [python, "manage.py", "escrowmq_work", "--relay"]
    with subprocess.Popen(worker, cwd=site, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "a mail for o-1\n"
        running.terminate()
        _, errors = running.communicate()
    assert running.returncode == 0, errors


def test_every_package_of_an_extra_is_known_to_the_errors() -> None:
    """Else a command that lacks it ends with a traceback."""
    from escrowmq.platform.extras import EXTRAS

    plain = environments.closure().keys()
    by_package = {"opentelemetry-api": "opentelemetry", "rocketmq-python-client": "rocketmq"}
    for extra in environments.extras():
        own = [
            text for text in distribution("escrowmq").requires or () if f'extra == "{extra}"' in text.replace("'", '"')
        ]
        for text in own:
            package = text.partition(";")[0].strip().split("[")[0].split(">")[0].split("<")[0].split("=")[0].strip()
            if package != "escrowmq" and package not in plain and package != "opentelemetry-instrumentation":
                assert by_package.get(package, package).replace("-", "_").lower() in EXTRAS, package


def test_celery_has_its_broker_with_the_extra_alone(tmp_path: Path, wheel: Path) -> None:
    """And without it, the import names it. The transport needs no other extra, and no command line."""
    plain = environments.make(tmp_path / "plain", wheel)
    own = environments.make(tmp_path / "own", wheel, "celery")
    missing = subprocess.run(
        [plain, "-c", "import escrowmq.celery"], capture_output=True, text=True, timeout=120, check=False
    )
    assert missing.returncode == 1
    assert 'python -m pip install "escrowmq[celery]"' in missing.stderr
    program = """
import escrowmq.celery, importlib.util, sqlalchemy, celery, kombu
from escrowmq import outbox
app = celery.Celery("shop", broker_url="escrow://127.0.0.1:1", set_as_current=True)
@app.task(name="ship", ignore_result=True)
def ship(order): pass
engine = sqlalchemy.create_engine("sqlite://")
outbox.migrate(engine)
with engine.begin() as connection, escrowmq.celery.atomic(connection):
    ship.delay(17)
with engine.connect() as connection:
    print(connection.scalar(sqlalchemy.text("SELECT topic FROM trans_message")))
print(kombu.Connection("escrow://127.0.0.1:1").transport.driver_name, importlib.util.find_spec("rich"))
"""
    done = subprocess.run([own, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "celery\nescrowmq None\n", "")
