"""Build the site of the documentation into build/site, as HTML and as Markdown; fail on a broken link or anchor."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CONFIG = Path(__file__).parent / "zensical.toml"
TOPLEVEL = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "GUARANTEES.md", "SECURITY.md"]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)((?:#[^)\s]*)?)\)")


def find_pages(root: Path) -> list[Path]:
    """Find the Markdown files that are pages, at the same places in the site as in the repository."""
    found = [root / name for name in TOPLEVEL]
    for pattern in ("docs/**/*.md", "examples/**/README.md", "lab/*.md", "src/**/FORMAT.md", "tests/**/README.md"):
        found += sorted(root.glob(pattern))
    return found


def read_page(page: Path, root: Path, pages: Path) -> str:
    """Read a page. Its links to folders lead to their README if there is one, those to programs to a copy as text."""

    def resolve(match: re.Match[str]) -> str:
        label, link, anchor = match.groups()
        target = (page.parent / link).resolve()
        if "://" in link or link.startswith("mailto:") or target.suffix in {".md", ".svg", ".png"}:
            return match[0]
        if (target / "README.md").exists():
            return f"[{label}]({link.rstrip('/')}/README.md{anchor})"
        if target.is_dir():
            return label
        if not target.is_file():
            raise SystemExit(f"{page.relative_to(root)} links to {link}, which does not exist")
        copy = pages / target.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, f"{copy}.txt")
        return f"[{label}]({link}.txt)"

    return LINK.sub(resolve, page.read_text())


def adapt(text: str) -> str:
    """Rewrite what Python-Markdown reads in another way than a code host does.

    A list needs an empty line before it, and a pipe within code needs no backslash in a table.
    """
    blocks = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    for at in range(0, len(blocks), 2):  # the others are code
        spaced = re.sub(r"^(?![-*|>#\s]|\d+\.)(.+)\n(?=- )", r"\1\n\n", blocks[at], flags=re.MULTILINE)
        blocks[at] = re.sub(r"`[^`\n]+`", lambda code: code[0].replace(r"\|", "|"), spaced)
    return "".join(blocks)


def walk(nav: list[dict[str, Any]], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield (titles of the sections, title, path) of each page in a navigation."""
    for entry in nav:
        for title, content in entry.items():
            if isinstance(content, str):
                yield above, title, content
            else:
                yield from walk(content, (*above, title))


def summarize(text: str) -> str:
    """Return the first paragraph below the title of a page, without its links."""
    for paragraph in text.split("\n\n"):
        if not paragraph.lstrip().startswith(("#", "!", "<", "```", "|")):
            return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return ""


def write_for_machines(config: dict[str, Any], texts: dict[str, str], site: Path) -> None:
    """Write each page as Markdown beside its HTML, and llms.txt, the list of all pages."""
    for path, text in texts.items():
        (site / path).write_text(text)
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}"]
    section: tuple[str, ...] | None = None
    for above, title, path in walk(config["nav"]):
        if above != section:
            section = above
            lines += ["", f"## {': '.join(above)}", ""] if above else [""]
        lines.append(f"- [{title}]({path}): {summarize(texts[path])}")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def build(folder: Path, root: Path = ROOT) -> Path:
    """Build the site of a repository in a folder. Returns the folder of its HTML.

    Raises SystemExit if a link or an anchor is broken, or if a page of docs/ is not in the navigation.
    """
    config = tomllib.loads(CONFIG.read_text())["project"]
    pages, site = folder / config["docs_dir"], folder / config["site_dir"]
    for old in (pages, site):
        shutil.rmtree(old, ignore_errors=True)
    texts = {page.relative_to(root).as_posix(): read_page(page, root, pages) for page in find_pages(root)}
    for path, text in texts.items():
        (pages / path).parent.mkdir(parents=True, exist_ok=True)
        (pages / path).write_text(adapt(text))
    for picture in [*root.glob("docs/*.svg"), *root.glob("docs/pictures/*")]:
        copy = pages / picture.relative_to(root)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(picture, copy)
    missing = {f"docs/{page.name}" for page in root.glob("docs/*.md")} - {path for _, _, path in walk(config["nav"])}
    if missing:
        raise SystemExit(f"not in the navigation of {CONFIG.name}: {', '.join(sorted(missing))}")
    copied = shutil.copy(CONFIG, folder)  # it names folders beside itself
    ran = subprocess.run([sys.executable, "-m", "zensical", "build", "--clean", "--strict", "-f", str(copied)])
    if ran.returncode:
        raise SystemExit(ran.returncode)
    write_for_machines(config, texts, site)
    return site


if __name__ == "__main__":
    build(ROOT / "build")
