"""What a user gets from an index: the wheel without the test machinery, and the source distribution with the papers."""

from __future__ import annotations

import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import environments
import pytest
import readme_renderer.markdown
from packaging.metadata import Metadata


@pytest.fixture
def metadata(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return archive.read(name)


def test_the_wheel_has_the_product_and_none_of_the_laboratory(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "escrowmq/log/FORMAT.md" in names
    assert "escrowmq/py.typed" in names
    assert "pyspark_escrow/__init__.py" in names
    assert any(name.startswith("escrowmq/console/templates/") for name in names)
    assert any(name.startswith("escrowmq/pipeline/pages/") and name.endswith(".css") for name in names)
    unwanted = ("chaos", "simulation", "servers", "pom.xml", "escrowmq_lab", "tests/")
    assert [name for name in names if any(word in name for word in unwanted)] == []
    (points,) = [name for name in names if name.endswith("entry_points.txt")]
    assert b"escrowmq = escrowmq.__main__:main" in zipfile.ZipFile(wheel).read(points)


def test_the_source_distribution_has_docs_examples_and_papers(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    papers = {"README", "GUARANTEES", "ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY"}
    docs = {"LICENSE", "docs/start.md", "docs/reference/settings.md", "examples/cart/README.md"}
    assert {f"{paper}.md" for paper in papers} | docs <= names
    assert [name for name in names if name.endswith(".pyc")] == []


def test_an_index_accepts_the_metadata_and_renders_the_readme(metadata: bytes) -> None:
    read = Metadata.from_email(metadata, validate=True)
    assert (read.license_expression, read.license_files) == ("Apache-2.0", ["LICENSE"])
    assert read.description_content_type == "text/markdown"
    assert read.description == (environments.ROOT / "README.md").read_text()
    page = readme_renderer.markdown.render(read.description)
    assert page is not None
    assert page.count("<table>") == read.description.count("\n| ---")
    assert page.count("<pre") == read.description.count("\n```") / 2
    assert "Typing :: Typed" in read.classifiers


def test_classifiers_are_those_of_the_index_and_of_the_oldest_python(metadata: bytes) -> None:
    import trove_classifiers

    given = BytesParser(_class=Message).parsebytes(metadata).get_all("Classifier", [])
    assert set(given) <= trove_classifiers.classifiers
    assert not trove_classifiers.deprecated_classifiers.keys() & set(given)
    versions = [one.rpartition(" ")[2] for one in given if one.startswith("Programming Language :: Python :: 3.")]
    project = tomllib.loads((environments.ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={versions[0]}"


def test_the_licence_is_in_both(wheel: Path, sdist: Path) -> None:
    licence = (environments.ROOT / "LICENSE").read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
        assert archive.read(name) == licence
    with tarfile.open(sdist) as packed:
        (member,) = [one for one in packed.getmembers() if one.name.count("/") == 1 and one.name.endswith("/LICENSE")]
        found = packed.extractfile(member)
        assert found is not None
        assert found.read() == licence
