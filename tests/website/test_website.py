"""The site: each page is in it, as HTML and as Markdown, nothing is loaded from elsewhere, and broken links fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = (
    "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); import build;"
    " build.build(Path(sys.argv[2]), Path(sys.argv[3]))"
)


def run_build(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    words = [sys.executable, "-c", BUILD, str(ROOT / "website"), str(folder), str(root)]
    return subprocess.run(words, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "build"
    ran = run_build(folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / "site"


def test_the_diagrams_are_those_that_the_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "website" / "diagrams.py"), str(tmp_path)], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"idea.svg", "barrier.svg", "outbox.svg", "modes.svg", "compensation.svg"} == set(drawn)
    assert drawn == {name: (ROOT / "docs" / "pictures" / name).read_text() for name in drawn}


class Loaded(HTMLParser):
    """The addresses that a browser loads for a page, and those of its links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        address = found.get("src") or found.get("href")
        if address and tag in {"script", "img", "link", "iframe", "source"}:
            self.loaded.append(address)
        elif address and tag == "a":
            self.links.append(address)


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        assert not [address for address in Loaded(page.read_text()).loaded if "//" in address], page


def test_links_to_programs_lead_to_their_text(site: Path) -> None:
    page = site / "examples" / "cart" / "index.html"
    programs = [link for link in Loaded(page.read_text()).links if link.endswith(".py.txt")]
    assert programs
    for link in programs:
        assert "import" in (page.parent / link).resolve().read_text()


def test_each_page_is_there_as_markdown_and_in_the_list(site: Path) -> None:
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+)\): .", (site / "llms.txt").read_text(), re.MULTILINE)
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= set(listed)
    assert {"README.md", "GUARANTEES.md", "CHANGELOG.md", "src/escrowmq/log/FORMAT.md"} <= set(listed)
    for path in listed:
        page = site / path
        assert page.read_text().startswith("# "), path
        html = page.with_name("index.html") if page.name == "README.md" else page.with_suffix("") / "index.html"
        assert html.exists(), path


def test_what_code_hosts_and_the_site_read_differently_is_adapted(site: Path) -> None:
    page = (site / "docs" / "failover" / "index.html").read_text()
    assert "escrow://a:7700|b:7700" in page
    assert "a:7700\\|b" not in page
    assert "a:7700\\|b" in (site / "docs" / "failover.md").read_text()
    promises = (site / "GUARANTEES" / "index.html").read_text()
    assert not re.search(r"<p>[^<]*\n- ", promises)
    items = re.findall(r"^- ", (ROOT / "GUARANTEES.md").read_text(), re.MULTILINE)
    assert promises.count("<li>") == len(items) > 0


def test_the_navigation_is_by_task() -> None:
    nav = tomllib.loads((ROOT / "website" / "zensical.toml").read_text())["project"]["nav"]
    sections = [title for entry in nav for title in entry]
    assert sections == ["EscrowMQ", "Start", "Choose", "How-to", "Understand", "Reference"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("See [the missing section](barrier.md#no-such-section).", "anchor"),
        ("See [the missing page](no-such-page.md).", "no-such-page"),
        ("See [the missing program](../examples/cart/no_such_program.py).", "no_such_program"),
    ],
)
def test_a_broken_link_fails(line: str, problem: str, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "build", "__pycache__", "node_modules")
    shutil.copytree(ROOT, root, ignore=ignored)
    page = root / "docs" / "topics.md"
    page.write_text(f"{page.read_text()}\n{line}\n")
    ran = run_build(tmp_path / "build", root)
    assert ran.returncode != 0
    assert problem in re.sub(r"\x1b\[[0-9;]*m", "", ran.stdout + ran.stderr)


def test_a_page_that_is_not_in_the_navigation_fails(tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(".*", "build", "__pycache__", "node_modules"))
    (root / "docs" / "forgotten.md").write_text("# Forgotten\n\nFor nobody.\n")
    ran = run_build(tmp_path / "build", root)
    assert ran.returncode != 0
    assert "docs/forgotten.md" in ran.stderr


def list_pages() -> list[str]:
    """Every page of the navigation, and of the folders that may only have pages for users."""
    nav = tomllib.loads((ROOT / "website" / "zensical.toml").read_text())["project"]["nav"]
    pages = set(re.findall(r"'([^']+\.md)'", str(nav)))
    for pattern in ("docs/*.md", "examples/**/README.md"):
        pages |= {page.relative_to(ROOT).as_posix() for page in ROOT.glob(pattern)}
    return sorted(pages)


@pytest.mark.parametrize("page", list_pages())
def test_a_page_first_says_whom_it_is_for(page: str) -> None:
    title, opening, *_ = re.sub(r"<!--.*?-->\n\n", "", (ROOT / page).read_text()).split("\n\n")
    assert title.startswith("# ")
    assert opening.startswith("For ")
    assert re.search(r"\b[Aa]t\s(its|the)\send\b|\bAfter ten minutes\b", opening), opening
