"""All errors of a manifest at once, each with its field and line: first of its JSON, then of what it names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from escrowmq.errors import Code, EscrowError, Misuse
from escrowmq.pipeline.audit import manifest as described
from escrowmq.pipeline.audit.manifest import NAME, Manifest, find_problems
from escrowmq.pipeline.coverage import read_coverage

Path_ = tuple[str | int, ...]
"""The keys and numbers that lead to a value of the JSON."""
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Problem:
    """An error in a manifest. ``line`` counts from 1; ``field`` is its path, as ``tables.orders.id``."""

    line: int
    field: str
    text: str

    def __str__(self) -> str:
        return f"line {self.line}, {self.field}: {self.text}" if self.field else f"line {self.line}: {self.text}"


def check(folder: Path) -> list[Problem]:
    """Return all errors of the manifest of a run folder: of its JSON or else its fields; if there are none, of the
    databases, files and the log that it names. Reads no rows. Raises Misuse(BAD_ARGUMENT) without a manifest."""
    path = folder / NAME
    if not path.is_file():
        raise Misuse(Code.BAD_ARGUMENT, f"{folder} is not a run folder: it has no {NAME}", described.HINT)
    text = path.read_text()
    try:
        raw = json.loads(text)
    except ValueError as problem:
        return [Problem(getattr(problem, "lineno", 1), "", f"it is not JSON: {problem}")]
    lines = _find_lines(text)
    found = find_problems(raw)
    if not found:
        found = list(_find_missing(Manifest.of(folder, raw)))
    return [Problem(_find_line(lines, at), ".".join(map(str, at)), what) for at, what in found]


def _find_missing(manifest: Manifest) -> Iterator[tuple[Path_, str]]:
    """Yield an error (path of the field, and text) for each table, column, file, topic or log that a valid manifest
    names and that cannot be read, and for a wrong ``unique``."""
    from escrowmq.pipeline.audit.parts.columns import find_column_problems
    from escrowmq.pipeline.audit.tables import check_columns, is_unique, make_read

    natives: dict[str, dict[str, str | None]] = {}
    for name, table in manifest.tables.items():
        used = [c for c in manifest.comparisons if f"table:{name}" in c.sides]
        columns = {column for comparison in used for column in comparison.named}
        found, problem = _try(partial(check_columns, manifest, name, columns))
        natives |= {f"table:{name}": found} if found else {}
        if problem:
            yield ("tables", name), problem
        elif table.unique and not is_unique(make_read(manifest, name)):
            text = "no index or primary key without nulls shows that ids are unique: remove it, or create the index"
            yield ("tables", name, "unique"), text
    for name in manifest.files:
        found, problem = _try(partial(_check_file, manifest, name))
        natives |= {f"file:{name}": found} if found else {}
        if problem:
            yield ("files", name), problem
    for number, comparison in enumerate(manifest.comparisons):
        if all(side in natives or not side.startswith(("table:", "file:")) for side in comparison.sides):
            for at, problem in find_column_problems(manifest, comparison, natives):
                yield ("comparisons", number, *at), problem
    _, problem = _try(partial(read_coverage, manifest.log_url, manifest.topics))
    if problem:
        yield ("topics" if "UNKNOWN_TOPIC" in problem else "log",), problem


def _check_file(manifest: Manifest, name: str) -> dict[str, str | None]:
    """Return the native kinds of a file's columns; empty if only Spark can read them."""
    import pyarrow.parquet as pq
    from pyspark.sql.pandas.types import from_arrow_type

    from escrowmq.pipeline.audit.parts.columns import find_native

    file = manifest.files[name]
    if "://" in file.path:  # a file system that only Spark knows
        return {}
    path = manifest.folder / file.path
    if not path.exists():
        raise Misuse(Code.BAD_ARGUMENT, f"{path} is missing")
    if not path.is_file():
        return {}
    schema = pq.read_schema(path)
    used = [c.named for c in manifest.comparisons if f"file:{name}" in c.sides]
    wanted = {file.id, *file.where, *(column for columns in used for column in columns)}
    if lacking := sorted(wanted - set(schema.names)):
        text = f"it has no column {', '.join(lacking)}"
        raise Misuse(Code.BAD_ARGUMENT, text, f"it has {', '.join(sorted(schema.names))}")
    return {field.name: find_native(from_arrow_type(field.type)) for field in schema if field.name in wanted}


def _try(what: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Call ``what``; return its result and "", or None and the text of its error."""
    try:
        return what(), ""
    except EscrowError as problem:
        return None, str(problem)
    except (OSError, ValueError) as problem:
        return None, f"{type(problem).__name__}: {problem}"


def _find_line(lines: Mapping[Path_, int], at: Path_) -> int:
    """Return the line of the value at path ``at``, or of the nearest value around it. ``lines``: of
    :func:`_find_lines`."""
    return next(lines[at[:size]] for size in range(len(at), -1, -1) if at[:size] in lines)


def _find_lines(text: str) -> dict[Path_, int]:
    """Return the line, from 1, of each value of valid JSON, by its path (keys and numbers)."""
    lines: dict[Path_, int] = {}
    decoder = json.JSONDecoder()

    def skip(at: int) -> int:
        while text[at] in " \t\r\n,:":
            at += 1
        return at

    def walk(at: int, path: Path_) -> int:
        at = skip(at)
        lines[path] = text.count("\n", 0, at) + 1
        if text[at] not in "{[":
            return decoder.raw_decode(text, at)[1]
        is_object, number, at = text[at] == "{", 0, skip(at + 1)
        while text[at] not in "}]":
            key: str | int = number
            if is_object:
                key, at = decoder.raw_decode(text, at)
            at = skip(walk(at, (*path, key)))
            number += 1
        return at + 1

    walk(0, ())
    return lines
