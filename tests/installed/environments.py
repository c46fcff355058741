"""Virtual environments as pip makes them: Python, this project's wheel, and what some of its extras name, but nothing
else.

They are put together from the packages that are installed here, so that nothing is downloaded: each package of the
extra's closure, as the installed metadata tells it, is linked into the new environment. Where ``PACKAGES_PYTHON`` names
a Python (``make packages``), pip installs the wheel and its extras with it, at the newest versions that it finds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = "escrowmq"
ROOT = Path(__file__).parents[2]
PARTS = ("src", "docs", "examples", "deploy", "lab")
PYTHON = os.environ.get("PACKAGES_PYTHON")


@contextmanager
def distributions() -> Iterator[tuple[Path, Path]]:
    """The source distribution of this tree, and the wheel that is built from it, as installers build it."""
    with tempfile.TemporaryDirectory(prefix="escrowmq-built-") as made:
        folder = Path(made)
        tree = folder / "tree"
        tree.mkdir()
        for file in ROOT.iterdir():
            if file.is_file() and not file.name.startswith("."):
                shutil.copy(file, tree)
        for part in PARTS:
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        _build("sdist", tree, folder)
        (sdist,) = folder.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (unpacked,) = (folder / "unpacked").iterdir()
        _build("wheel", unpacked, folder)
        (wheel,) = folder.glob("*.whl")
        yield sdist, wheel


def _build(kind: str, tree: Path, into: Path) -> None:
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r})"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def extras() -> list[str]:
    """The extras of this project that a user installs."""
    return sorted(set(distribution(PROJECT).metadata.get_all("Provides-Extra", [])) - {"dev", "jre"})


@cache
def closure(*extras: str) -> dict[str, Distribution]:
    """Return what is installed with this project and these extras, by name."""
    found: dict[str, Distribution] = {}
    done: set[tuple[str, str]] = set()
    todo = [(PROJECT, ""), *((PROJECT, extra) for extra in extras)]
    while todo:
        name, chosen = todo.pop()
        if (name, chosen) in done:
            continue
        done.add((name, chosen))
        try:
            one = distribution(name)
        except PackageNotFoundError:  # of another platform or version of Python
            continue
        found[name] = one
        for text in one.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": chosen}):
                key = re.sub(r"[-_.]+", "-", needed.name).lower()
                todo += [(key, ""), *((key, one) for one in needed.extras)]
    return found


def make(folder: Path, wheel: Path, *extras: str) -> Path:
    """Make an environment with the wheel and these extras. Returns its Python."""
    if PYTHON is not None:
        return _install(PYTHON, folder, wheel, extras)
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    packages = [one for name, one in closure(*extras).items() if name != PROJECT]
    owners = Counter(top for one in packages for top in _tops(one))
    for one in packages:
        for file in one.files or ():
            top = file.parts[0]
            if top in ("..", "__pycache__"):
                continue
            path = Path(top) if owners[top] == 1 else Path(*file.parts)  # several packages share a namespace
            link = site / path
            if not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(str(one.locate_file(path))))
    for part in _unpack(wheel).iterdir():
        (site / part.name).symlink_to(part)
    return folder / "bin" / Path(os.path.basename(sys.executable))


@cache
def _unpack(wheel: Path) -> Path:
    """Return the folder with the content of the wheel: all environments link to it, so it is compiled once."""
    folder = wheel.with_suffix("")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def _install(python: str, folder: Path, wheel: Path, extras: tuple[str, ...]) -> Path:
    made = folder / "bin" / "python"
    wanted = f"{wheel}[{','.join(extras)}]" if extras else str(wheel)
    for command in ([python, "-m", "venv", folder], [made, "-m", "pip", "install", "--quiet", wanted]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return made


def _tops(one: Distribution) -> set[str]:
    return {file.parts[0] for file in one.files or ()}
