"""Orders: invoice lines from a file (or generated), one row per order. All in Arrow columns. The rest of the demo works
on orders (schema ``ORDERS``); their columns are only text and integers, so that two databases and a JSON message can be
compared exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from escrowmq.errors import Code, Misuse

LINES = pa.schema(
    {
        **dict.fromkeys(("InvoiceNo", "StockCode", "Description"), pa.utf8()),
        "Quantity": pa.int64(),
        "InvoiceDate": pa.utf8(),
        "UnitPrice": pa.float64(),
        **dict.fromkeys(("CustomerID", "Country"), pa.utf8()),
    }
)
"""Invoice lines, as in the UCI data set "Online Retail"."""

ORDERS = pa.schema(
    {
        "order_id": pa.utf8(),
        "cancelled": pa.bool_(),  # its local transaction rejects it
        **dict.fromkeys(("customer_id", "country", "placed_at"), pa.utf8()),  # customer null: unknown
        **dict.fromkeys(("units", "amount_cents", "points"), pa.int64()),  # a point for each whole unit of money
        "lines": pa.utf8(),  # STOCK*QUANTITY@CENTS;...
    }
)


def read_orders(path: Path, limit: int | None = None) -> pa.Table:
    """Read the orders of a .parquet or .csv file of invoice lines, in the order of their first lines (schema ORDERS).
    Raises Misuse(BAD_ARGUMENT) with the defect of the file: missing, unreadable, columns missing, empty."""
    return to_orders(_read_lines(path), limit)


def generate_orders(count: int, seed: int) -> pa.Table:
    """Generate ``count`` orders, about every seventh a cancellation; the same for the same seed (schema ORDERS)."""
    random = np.random.default_rng(seed)
    sizes = np.minimum(1 + random.geometric(0.08, count), 60)
    cancelled = random.random(count) < 0.15
    order = np.repeat(np.arange(count), sizes)
    rows = len(order)
    stock = random.integers(10_000, 14_000, rows)
    sign = np.where(cancelled[order], -1, 1)
    customer = random.integers(12_000, 16_000, count)
    minutes = np.sort(random.integers(0, 60 * 24 * 365, count))
    dates = np.datetime64("2024-01-01T08:00") + minutes.astype("timedelta64[m]")
    countries = np.array(["United Kingdom", "Germany", "France", "Eire", "Spain", "Norway"])
    country = countries[np.minimum(random.geometric(0.6, count) - 1, len(countries) - 1)]
    names = np.array([f"{'C' if c else ''}{700_000 + n}" for n, c in enumerate(cancelled)])
    columns = {
        "InvoiceNo": names[order],
        "StockCode": stock.astype(str),
        "Description": np.full(rows, "an article"),
        "Quantity": sign * np.minimum(random.geometric(0.12, rows), 144),
        "InvoiceDate": np.datetime_as_string(dates)[order],
        "UnitPrice": np.round(np.exp(random.normal(0.6, 0.8, rows)), 2),
        "CustomerID": customer.astype(str)[order],
        "Country": country[order],
    }
    return to_orders(pa.table([pa.array(columns[f.name], f.type) for f in LINES], schema=LINES))


def to_orders(lines: pa.Table, limit: int | None = None) -> pa.Table:
    """Convert lines (schema LINES) to orders (schema ORDERS)."""
    price = lines["UnitPrice"].combine_chunks()
    quantity = lines["Quantity"].combine_chunks()
    cents = pc.cast(pc.round(pc.multiply(price, 100.0)), pa.int64())
    amount = pc.cast(pc.round(pc.multiply(pc.multiply(price, 100.0), pc.cast(quantity, pa.float64()))), pa.int64())
    texts = [pc.cast(column, pa.utf8()) for column in (quantity, cents)]
    article = pc.binary_join_element_wise(lines["StockCode"].combine_chunks(), texts[0], "*")
    table = pa.table(
        {
            "order_id": lines["InvoiceNo"],
            "customer_id": lines["CustomerID"],
            "country": lines["Country"],
            "placed_at": lines["InvoiceDate"],
            "units": quantity,
            "amount_cents": amount,
            "lines": pc.binary_join_element_wise(article, texts[1], "@"),
        }
    )
    firsts = [(name, "first") for name in ("customer_id", "country", "placed_at")]
    grouped = table.group_by("order_id", use_threads=False).aggregate(
        [*firsts, ("units", "sum"), ("amount_cents", "sum"), ("lines", "list")]
    )
    grouped = grouped.slice(0, limit) if limit is not None else grouped
    amounts = grouped["amount_cents_sum"].combine_chunks()
    columns = {
        **{name: grouped[f"{name}_first"] for name, _ in firsts},
        "order_id": grouped["order_id"],
        "cancelled": pc.starts_with(grouped["order_id"], "C"),
        "units": grouped["units_sum"],
        "amount_cents": amounts,
        "points": pa.array(np.maximum(amounts.to_numpy(zero_copy_only=False) // 100, 0), pa.int64()),
        "lines": pc.binary_join(grouped["lines_list"].combine_chunks(), ";"),
    }
    return pa.table([columns[f.name] for f in ORDERS], schema=ORDERS)


def _read_lines(path: Path) -> pa.Table:
    """Read the file's lines in schema LINES."""
    if not path.is_file():
        raise Misuse(Code.BAD_ARGUMENT, f"no orders file {path}")
    reader = {".parquet": pq.read_table, ".csv": _read_csv}.get(path.suffix.lower())
    if reader is None:
        raise Misuse(Code.BAD_ARGUMENT, f"{path.name}: orders come as .parquet or .csv")
    try:
        table = reader(path)
    except (pa.ArrowInvalid, OSError) as problem:
        raise Misuse(Code.BAD_ARGUMENT, f"cannot read {path}: {problem}") from problem
    if missing := [name for name in LINES.names if name not in table.column_names]:
        text = f"{path.name} lacks the columns: {', '.join(missing)}"
        raise Misuse(Code.BAD_ARGUMENT, text, f"orders files have {', '.join(LINES.names)}")
    if table.num_rows == 0:
        raise Misuse(Code.BAD_ARGUMENT, f"{path.name} has no rows")
    return pa.table([_cast(path, table[f.name], f) for f in LINES], schema=LINES)


def _read_csv(path: Path) -> pa.Table:
    """Read a CSV file; text columns stay text (an invoice number may contain a letter). UTF-8, else Latin-1."""
    texts = {f.name: pa.utf8() for f in LINES if pa.types.is_string(f.type)}
    convert = pa.csv.ConvertOptions(column_types=texts, strings_can_be_null=True, null_values=[""])
    try:
        return pa.csv.read_csv(path, convert_options=convert)
    except pa.ArrowInvalid as problem:
        if "UTF8" not in str(problem):
            raise
        return pa.csv.read_csv(path, pa.csv.ReadOptions(encoding="latin-1"), convert_options=convert)


def _cast(path: Path, column: pa.ChunkedArray, field: pa.Field) -> pa.Array:
    """Cast a column. Names and numbers are required, other missing texts become empty, unknown customers stay null."""
    try:
        if pa.types.is_timestamp(column.type):
            column = pc.strftime(pc.cast(column, pa.timestamp("s"), safe=False), "%Y-%m-%dT%H:%M:%S")
        elif pa.types.is_floating(column.type) and pa.types.is_string(field.type):
            column = pc.cast(column, pa.int64())  # 17850.0 is customer 17850
        array = pc.cast(column, field.type).combine_chunks()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as problem:
        raise Misuse(Code.BAD_ARGUMENT, f"{path.name}: column {field.name} is not {field.type}: {problem}") from problem
    if field.name == "CustomerID":
        return pc.replace_substring_regex(array, r"\.0$", "")
    if array.null_count and field.name in ("InvoiceNo", "Quantity", "UnitPrice"):
        raise Misuse(Code.BAD_ARGUMENT, f"{path.name}: column {field.name} has {array.null_count} empty values")
    return pc.fill_null(array, "") if pa.types.is_string(field.type) else array
