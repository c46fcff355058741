"""Demo, audit and bench: what they are told, what they print, their exit codes. The jobs themselves have their own
tests.
"""

import dataclasses
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cli_runs import Run

from escrowmq.cli.failures import Exit
from escrowmq.demo.director import DemoOptions
from escrowmq.pipeline.audit.verdict import Finding, Side, Verdict

CLEAN = Verdict(
    ids=3,
    transactions=3,
    committed=2,
    rolled_back=1,
    consumed=2,
    lost=0,
    repeated=0,
    altered=0,
    leaked=0,
    orphaned=0,
    kills=1,
    checks=1,
    consumers={"cart": 2},
    comparisons=(Side("orders", "log", 2, 2, 2, 0),),
    findings=(),
    findings_in_all=0,
)
LOST = dataclasses.replace(
    CLEAN,
    lost=1,
    comparisons=(Side("orders", "log", 2, 2, 1, 1),),
    findings=(Finding("lost", "o-17\0", "orders → log", 1, 0),),
    findings_in_all=1,
)
UNDECIDED = dataclasses.replace(CLEAN, orphaned=1)


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, dict[str, Any]]]:
    """Calls of the audit, which answers with LOST for a folder of that name and with CLEAN otherwise."""
    calls: list[tuple[Path, dict[str, Any]]] = []

    def run(folder: Path, **options: Any) -> Verdict:
        options.pop("progress")("comparing")
        calls.append((folder, options))
        return LOST if folder.name == "lost" else CLEAN

    monkeypatch.setattr("escrowmq.pipeline.audit.run", run)
    return calls


def test_a_clean_audit_exits_with_0(run: Run, audited: list[Any]) -> None:
    ran = run("audit", "demo-run", "--no-page", "--json")
    assert (ran.code, ran.json["verdict"], ran.json["ids"]) == (0, "agree", 3)
    options = {"windows": None, "sample": None, "state": None, "keeps_classes": False, "page": False}
    assert audited == [(Path("demo-run"), options)]


def test_classes_are_kept_by_one_audit(run: Run, audited: list[Any]) -> None:
    assert run("audit", "demo-run", "--keep-classes").code == 0
    assert audited[-1][1]["keeps_classes"]
    ran = run("audit", "demo-run", "--keep-classes", "--watch", "1s")
    assert ran.code == Exit.USAGE
    assert "--keep-classes with --watch" in ran.err
    assert len(audited) == 1


def test_a_finding_is_named_and_exits_with_1(run: Run, audited: list[Any]) -> None:
    ran = run("audit", "lost")
    assert ran.code == Exit.FINDING
    assert "o-17" in ran.out
    assert "lost" in ran.out
    assert run("audit", "lost", "--json").json["findings"][0]["id"] == "o-17\0"


def test_a_junit_file_has_a_case_per_comparison(run: Run, audited: list[Any], tmp_path: Path) -> None:
    for name, failures in (("demo-run", []), ("lost", ["lost o-17\ufffd: expected 1, found 0"])):
        assert run("audit", name, "--junit", str(tmp_path / "junit.xml"), "--rows").code == len(failures)
        suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
        assert [case.get("name") for case in suite] == ["orders → log", "still in escrow"]
        assert [failure.text for failure in suite.iter("failure")] == failures
        assert suite.get("failures") == str(len(failures))
    assert audited[-1][1]["windows"] == 0


def test_init_and_check_need_no_spark(run: Run, tmp_path: Path) -> None:
    assert run("audit", str(tmp_path), "--init").code == Exit.USAGE
    (tmp_path / "manifest.json").write_text('{"log": 5}')
    ran = run("audit", str(tmp_path), "--check", "--json")
    assert ran.code == Exit.FINDING
    assert sorted(problem["field"] for problem in ran.json["problems"]) == ["", "", "", "log"]


def test_a_folder_that_is_no_run_is_misuse(run: Run, tmp_path: Path) -> None:
    ran = run("audit", str(tmp_path))
    assert (ran.code, ran.out) == (Exit.USAGE, "")
    assert "hint: " in ran.err


@pytest.mark.parametrize(("verdict", "code"), [(CLEAN, 0), (None, 0), (LOST, 1), (UNDECIDED, 1)])
def test_the_demo_is_told_everything_and_exits_by_its_verdict(
    run: Run, monkeypatch: pytest.MonkeyPatch, verdict: Verdict | None, code: int
) -> None:
    told: list[DemoOptions] = []
    monkeypatch.setattr("escrowmq.demo.run", lambda options: told.append(options) or verdict)
    words = {
        "orders": "x.csv",
        "folder": "there",
        "count": "7",
        "limit": "5",
        "seed": "3",
        "shop-kills": "2",
        "broker-kills": "0",
        "service-kills": "9",
        "threads": "4",
        "log": "kafka",
    }
    ran = run("demo", *[part for name, value in words.items() for part in (f"--{name}", value)], "--no-audit")
    assert ran.code == code
    made = {name.replace("_", "-"): str(value) for name, value in dataclasses.asdict(told[0]).items()}
    assert made == {**words, "audit": "False"}


def test_the_demo_needs_no_options(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[DemoOptions] = []
    monkeypatch.setattr("escrowmq.demo.run", lambda options: told.append(options))
    run("demo")
    assert told == [DemoOptions()]
