"""Virtual environments as pip would make them: Python, this project, and what some of its extras name, but nothing
else.

They are put together from the packages that are installed here, so that nothing is downloaded: each package of the
extra's closure, as the installed metadata tells it, is linked into the new environment.
"""

from __future__ import annotations

import os
import re
import sys
import venv
from collections import Counter
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = "escrowmq"


def extras() -> list[str]:
    """The extras of this project that a user installs."""
    return sorted(set(distribution(PROJECT).metadata.get_all("Provides-Extra", [])) - {"dev", "jre"})


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


def make(folder: Path, *extras: str) -> Path:
    """Make an environment with these extras. Returns its Python."""
    venv.create(folder, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    packages = closure(*extras)
    own = packages.pop(PROJECT)
    owners = Counter(top for one in packages.values() for top in _tops(one))
    for one in packages.values():
        for file in one.files or ():
            top = file.parts[0]
            if top in ("..", "__pycache__"):
                continue
            path = Path(top) if owners[top] == 1 else Path(*file.parts)  # several packages share a namespace
            link = site / path
            if not link.is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(Path(str(one.locate_file(path))))
    source = Path(__file__).parents[2] / "src"
    (site / "project.pth").write_text(f"{source}\n")
    (site / "own.dist-info").mkdir()
    metadata = site / f"{PROJECT}-{own.version}.dist-info"
    (site / "own.dist-info").rename(metadata)
    (metadata / "METADATA").write_text(own.read_text("METADATA") or "")
    (metadata / "entry_points.txt").write_text(own.read_text("entry_points.txt") or "")
    return folder / "bin" / Path(os.path.basename(sys.executable))


def _tops(one: Distribution) -> set[str]:
    return {file.parts[0] for file in one.files or ()}
