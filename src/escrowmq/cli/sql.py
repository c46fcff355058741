"""``escrowmq sql``: a quick look at topics and system views with SQL, without Java."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from typing import Any

from typer import Argument

from escrowmq.cli.options import DEFAULT_URL, JsonLines, Limit, Url, check_reachable
from escrowmq.cli.printing import notice, print_json_line, print_table

SHOWN = 1000
"""Default number of rows of a table on the terminal."""


def sql(
    select: str = Argument(..., help="One SELECT of DuckDB."),
    url: Url = DEFAULT_URL,
    limit: Limit = SHOWN,
    json: JsonLines = False,
) -> None:
    """Run a SELECT over topics, system views ("%half") and what groups get ("group:cart/orders").

    Names that are not words stand in double quotes. Times are UTC. Nothing is changed, and no file is read.
    """
    from escrowmq.sql import stream

    check_reachable(url)
    with stream(url, select) as found:
        rows = _rows(found)
        shown = itertools.islice(rows, limit)
        if json:
            for row in shown:
                print_json_line(row)
        else:
            print_table(found.schema.names, (list(row.values()) for row in shown), "no rows")
        if next(rows, None) is not None:
            notice(f"the first {limit:,} rows; --limit shows more")


def _rows(batches: Any) -> Iterator[dict[str, Any]]:
    """Yield rows with values for JSON: times as ISO 8601, bytes as text, and as hexadecimal digits those of ids and
    those that are not UTF-8."""
    for batch in batches:
        for row in batch.to_pylist(maps_as_pydicts="lossy"):
            yield {name: _plain(value, name.endswith("_id")) for name, value in row.items()}


def _plain(value: Any, is_id: bool) -> Any:
    if isinstance(value, bytes):
        try:
            return value.hex() if is_id else value.decode()
        except UnicodeDecodeError:
            return value.hex()
    if isinstance(value, list):
        return [_plain(one, is_id) for one in value]
    if isinstance(value, dict):
        return {str(name): _plain(one, str(name).endswith("_id")) for name, one in value.items()}
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, datetime):
        return value.isoformat() + ("Z" if value.tzinfo is None else "")
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
