"""The HTML that the pages share: the document with its style, figures, sections, tables with aligned numbers."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from importlib.metadata import version

from escrowmq import __version__


def document(title: str, body: str, *, command: str = "", made: str = "", style: str = "") -> str:
    """Return a whole HTML page. ``body`` is HTML, ``style`` is more CSS. The foot shows the ``command`` that creates
    the page again, when it was ``made``, and versions."""
    versions = f"EscrowMQ {__version__}, Spark {version('pyspark')}, Python {platform.python_version()}"
    foot = " · ".join([*([f"<code>{escape(command)}</code>"] if command else []), *filter(None, [made, versions])])
    css = resources.files("escrowmq.pipeline.pages").joinpath("page.css").read_text(encoding="utf-8") + style
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head><body><main>{body}"
        f"<p class=note>{foot}</p></main></body></html>\n"
    )


def figure(name: str, value: int, mood: str = "") -> str:
    """Return the HTML of a number with its name. ``mood``, a class for its style, is good, bad or empty."""
    return f'<div class="figure {mood}"><b>{value:,}</b><span>{escape(name.replace("_", " "))}</span></div>'


def figures(*every: str) -> str:
    """Return HTML that shows several results of :func:`figure` side by side."""
    return f'<div class="figures">{"".join(every)}</div>'


def section(title: str, note: str, content: str) -> str:
    """Return the HTML of a part of a page: a title, a note, and ``content``, which is HTML."""
    return f'<section><h2>{escape(title)}</h2><p class="note">{escape(note)}</p>{content}</section>'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the HTML of a table. Cells are HTML. A head that begins with # aligns its column as numbers."""
    klass = [' class="number"' if head.startswith("#") else "" for head in heads]
    top = "".join(f"<th{k}>{escape(head.lstrip('#'))}</th>" for head, k in zip(heads, klass, strict=True))
    lines = [[c if c.startswith("<td") else f"<td{k}>{c}</td>" for c, k in zip(r, klass, strict=True)] for r in rows]
    body = "".join(f"<tr>{''.join(line)}</tr>" for line in lines)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
