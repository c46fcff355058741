"""What a user gets from an index: the wheel without the test machinery, and the source distribution with the papers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("src", "docs", "examples", "deploy", "lab")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution of this tree."""
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    tree.mkdir()
    for file in ROOT.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, tree)
    for part in PARTS:
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for kind in ("sdist", "wheel"):
        program = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program], cwd=tree, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_has_the_product_and_none_of_the_laboratory(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "escrowmq/log/FORMAT.md" in names
    assert "escrowmq/py.typed" in names
    assert any(name.startswith("escrowmq/console/templates/") for name in names)
    assert any(name.startswith("escrowmq/pipeline/pages/") and name.endswith(".css") for name in names)
    unwanted = ("chaos", "simulation", "servers", "pom.xml", "escrowmq_lab", "tests/")
    assert [name for name in names if any(word in name for word in unwanted)] == []
    (points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert b"escrowmq = escrowmq.__main__:main" in zipfile.ZipFile(wheel).read(points)


def test_the_source_distribution_has_docs_examples_and_papers(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    papers = {"README", "GUARANTEES", "ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY"}
    docs = {"LICENSE", "docs/start.md", "docs/reference/settings.md", "examples/cart/README.md"}
    assert {f"{paper}.md" for paper in papers} | docs <= names
    assert [name for name in names if name.endswith(".pyc")] == []
