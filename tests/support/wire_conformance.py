"""Compares JSON values with the types of the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin, is_typeddict

from escrowmq.wire.values import Value, fields_of, value_of

Seen = set[tuple[str, str]]
"""Names of TypedDicts with those of fields that had a value."""


def problems(value: Any, wanted: Value, where: str, seen: Seen) -> Iterator[str]:
    """What is wrong with ``value``; nothing if it has the type. Adds to ``seen`` the fields that have a value."""
    kind = wanted.kind
    if value is None:
        if not wanted.null:
            yield f"{where} is null"
    elif wanted.choices:
        if value not in wanted.choices:
            yield f"{where} is {value!r}"
    elif is_typeddict(kind):
        yield from _object(value, kind, where, seen)
    elif kind is Any:
        return
    elif get_origin(kind) is dict:
        for name, one in value.items():
            yield from problems(one, value_of(get_args(kind)[1]), f"{where}[{name!r}]", seen)
    elif get_origin(kind) in (list, tuple):
        items = wanted.items if get_origin(kind) is tuple else wanted.items * len(value)
        for number, (one, of) in enumerate(zip(value, items, strict=True)):
            yield from problems(one, of, f"{where}[{number}]", seen)
    elif type(value) not in {float: (int, float)}.get(kind, get_args(kind) or (kind,)):
        yield f"{where} is a {type(value).__name__}: {value!r}"


def _object(value: Any, shape: Any, where: str, seen: Seen) -> Iterator[str]:
    known = {field.name: field for field in fields_of(shape)}
    for name in sorted(set(value) - set(known)):
        yield f"{where} has {name!r}, which {shape.__name__} does not name"
    for name, field in known.items():
        if name in value:
            if value[name] is not None and value[name] != []:
                seen.add((f"{shape.__module__}.{shape.__name__}", name))
            yield from problems(value[name], field.value, f"{where}.{name}", seen)
        elif field.required:
            yield f"{where} lacks {name!r}"


def check(value: Any, shape: Any, what: str, seen: Seen | None = None) -> None:
    """Raise AssertionError unless ``value`` has the type ``shape``."""
    wrong = list(problems(value, value_of(shape), what, set() if seen is None else seen))
    assert not wrong, "; ".join(wrong)
