"""What a session keeps for later ones, and when it does not."""

from __future__ import annotations

import errno
import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from escrowmq.errors import Misuse
from escrowmq.pipeline import audit, classes
from escrowmq.pipeline.classes import SparkFolder, open_spark_folder
from escrowmq.pipeline.java import find_java

PROGRAM = """
import sys
from escrowmq.pipeline.session import local_session

with local_session("kept", rows=1000, keeps_classes=len(sys.argv) > 1) as spark:
    total = spark.range(10).groupBy().sum("id").collect()[0][0]
    given = spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()
    print(total, *(any(name in one for one in given) for name in ("SharedArchiveFile", "ArchiveClassesAtExit")))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "the user's cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(found))
    return found


def opened(tmp_path: Path) -> SparkFolder:
    folder = open_spark_folder(find_java(), tmp_path / "otherwise")
    assert folder is not None
    return folder


def options_of(folder: SparkFolder, *, keeps: bool = True) -> str:
    with folder.share_classes(keeps=keeps) as options:
        return options


def test_its_home_has_what_starts_spark_and_no_archive_of_python(cache: Path, tmp_path: Path) -> None:
    folder = opened(tmp_path)
    assert folder.folder.parent == cache / "escrowmq"
    assert {one.name for one in folder.home.iterdir()} == {"bin", "jars"}
    assert (folder.home / "bin" / "spark-submit").is_file()
    assert list(folder.conf.iterdir()) == []
    assert opened(tmp_path) == folder, "another time too"


@pytest.mark.parametrize("found", [None, "a folder without jars"])
def test_a_pyspark_that_is_no_package_is_left_alone(
    found: str | None, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = find_java()
    spec = None if found is None else SimpleNamespace(submodule_search_locations=[os.fspath(tmp_path / found)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert open_spark_folder(java, tmp_path) is None
    assert not cache.exists()


@pytest.mark.parametrize("cause", ["a file is there", "no home"])
def test_without_a_cache_nothing_is_kept(
    cause: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cause == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        cache.write_text("")
    folder = opened(tmp_path)
    assert folder.folder.parent == tmp_path / "otherwise"
    assert (folder.home / "jars").is_dir()
    assert options_of(folder, keeps=False) == ""
    with pytest.raises(Misuse, match="XDG_CACHE_HOME"):
        options_of(folder)


def write_at(options: str, content: bytes) -> None:
    match = re.match('"-XX:ArchiveClassesAtExit=([^"]+)" ', options)
    assert match is not None
    Path(match[1]).write_bytes(content)


def test_what_was_written_last_is_used(cache: Path, tmp_path: Path) -> None:
    folder = opened(tmp_path)
    assert options_of(folder, keeps=False) == ""
    for content in (b"classes", b"other classes"):
        with folder.share_classes(keeps=True) as options:
            write_at(options, content)
        archive = folder.find_archive()
        assert archive is not None
        assert archive.read_bytes() == content
        assert {one.name for one in folder.folder.iterdir()} == {"home", "conf", archive.name}
        assert f'"-XX:SharedArchiveFile={archive}"' in options_of(folder, keeps=False)


def test_a_cache_that_cannot_be_written_any_more_is_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)

    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(classes.tempfile, "TemporaryDirectory", refuse)  # type: ignore[attr-defined]
    with pytest.raises(Misuse, match="cannot be written"):
        options_of(folder)


@pytest.mark.parametrize("cause", ["Java crashes with it", "there is none"])
def test_what_java_cannot_use_is_not_kept(
    cause: str, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = opened(tmp_path)
    monkeypatch.setattr(classes, "run_java", lambda program, *options: "")
    with folder.share_classes(keeps=True) as options:
        if cause != "there is none":
            write_at(options, b"half of it")
    assert "were not kept" in caplog.text
    assert {one.name for one in folder.folder.iterdir()} == {"home", "conf"}


def make_folder(folder: Path, java: object) -> None:
    assert open_spark_folder(java, folder) is not None  # type: ignore[arg-type]


def test_several_processes_may_make_the_folder_at_once(cache: Path, tmp_path: Path) -> None:
    spawned = multiprocessing.get_context("spawn")
    every = [spawned.Process(target=make_folder, args=(tmp_path, find_java())) for _ in range(4)]
    for one in every:
        one.start()
    for one in every:
        one.join()
    assert [one.exitcode for one in every] == [0] * 4
    assert {one.name for one in opened(tmp_path).home.iterdir()} == {"bin", "jars"}


@pytest.mark.verify
def test_sessions_use_it_and_a_damaged_one_does_no_harm(cache: Path, tmp_path: Path) -> None:
    def run(*keeps: str) -> str:
        done = subprocess.run([sys.executable, "-c", PROGRAM, *keeps], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert run() == "45 False False\n"
    assert run("keep") == "45 False True\n"
    assert run() == "45 True False\n"
    archive = opened(tmp_path).find_archive()
    assert archive is not None
    assert archive.stat().st_size > 1 << 20
    archive.chmod(0o644)
    archive.write_bytes(archive.read_bytes()[:4096])
    assert run() == "45 False False\n"


@pytest.mark.parametrize("options", [{"master": "spark://127.0.0.1:7077"}, {"spark": object()}])
def test_only_a_session_of_its_own_on_this_machine_keeps_them(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="on this machine"):
        audit.run(tmp_path, keeps_classes=True, **options)
