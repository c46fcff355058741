"""Orders from files, and made-up ones."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from escrowmq.demo.orders import LINES, ORDERS, generate_orders, read_orders
from escrowmq.errors import Misuse

WHEN = datetime.datetime(2010, 12, 1, 8, 26)


def lines(*rows: tuple[str, str, int, float, int | None]) -> pa.Table:
    """Invoice lines in the types of the data set: number, stock code, quantity, price, customer."""
    numbers, stock, quantities, prices, customers = zip(*rows, strict=True)
    return pa.table(
        {
            "InvoiceNo": pa.array(numbers, pa.utf8()),
            "StockCode": pa.array(stock, pa.utf8()),
            "Description": pa.array([None] * len(rows), pa.utf8()),
            "Quantity": pa.array(quantities, pa.int32()),
            "InvoiceDate": pa.array([WHEN] * len(rows), pa.timestamp("s")),
            "UnitPrice": pa.array(prices, pa.float64()),
            "CustomerID": pa.array(customers, pa.int32()),
            "Country": pa.array(["Eire"] * len(rows), pa.utf8()),
        }
    )


SAMPLE = lines(
    ("536365", "85123A", 6, 2.55, 17850),
    ("C536379", "D", -1, 27.5, 14527),
    ("536365", "71053", 6, 3.39, 17850),
    ("536366", "22633", 3, 0.001, None),
)


def write(folder: Path, kind: str, table: pa.Table) -> Path:
    path = folder / f"orders.{kind}"
    if kind == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_lines_become_orders_in_the_order_of_their_first_lines(tmp_path: Path, kind: str) -> None:
    orders = read_orders(write(tmp_path, kind, SAMPLE))
    assert orders.schema == ORDERS
    first, second, third = orders.to_pylist()
    assert first["order_id"] == "536365"
    assert first["lines"] == "85123A*6@255;71053*6@339"
    assert (first["units"], first["amount_cents"], first["points"]) == (12, 6 * 255 + 6 * 339, 35)
    assert (first["customer_id"], first["country"], first["cancelled"]) == ("17850", "Eire", False)
    assert first["placed_at"].replace(" ", "T") == "2010-12-01T08:26:00"
    assert (second["order_id"], second["cancelled"], second["amount_cents"], second["points"]) == (
        "C536379",
        True,
        -2750,
        0,
    )
    assert (third["customer_id"], third["amount_cents"]) == (None, 0)


def test_a_csv_as_spreadsheets_write_it(tmp_path: Path) -> None:
    path = tmp_path / "orders.csv"
    header = ",".join(LINES.names)
    path.write_bytes(f"{header}\n536365,22752,CAF\xc9 SET,2,12/1/2010 8:26,7.65,17850.0,EIRE\n".encode("latin-1"))
    (order,) = read_orders(path).to_pylist()
    assert (order["customer_id"], order["amount_cents"], order["placed_at"]) == ("17850", 1530, "12/1/2010 8:26")


def test_only_the_first_orders(tmp_path: Path) -> None:
    orders = read_orders(write(tmp_path, "parquet", SAMPLE), limit=2)
    assert orders["order_id"].to_pylist() == ["536365", "C536379"]
    assert orders["lines"][0].as_py().count(";") == 1


def test_missing_columns_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "csv", SAMPLE.drop_columns(["UnitPrice", "Country"]))
    with pytest.raises(Misuse, match="lacks the columns: UnitPrice, Country"):
        read_orders(path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.csv", None, "no orders file"),
        ("orders.xlsx", b"PK", r"\.parquet or \.csv"),
        ("orders.parquet", b"this is not parquet", "cannot read"),
        ("empty.csv", (",".join(LINES.names) + "\n").encode(), "no rows"),
        ("nothing.csv", b"", "cannot read"),
        (
            "words.csv",
            (",".join(LINES.names) + "\n1,2,x,many,now,1.5,7,EIRE\n").encode(),
            "column Quantity is not int64",
        ),
        ("holes.csv", (",".join(LINES.names) + "\n,2,x,1,now,1.5,7,EIRE\n").encode(), "column InvoiceNo has 1 empty"),
        ("binary.csv", bytes(range(256)) * 40, "cannot read|lacks"),
    ],
)
def test_bad_files_are_clear_errors(tmp_path: Path, name: str, content: bytes | None, says: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Misuse, match=says):
        read_orders(path)


def test_generated_orders_are_the_same_for_the_same_seed() -> None:
    orders = generate_orders(500, seed=7)
    assert orders.equals(generate_orders(500, seed=7))
    assert not orders.equals(generate_orders(500, seed=8))
    assert orders.num_rows == 500
    assert len(set(orders["order_id"].to_pylist())) == 500
    cancelled = [order for order in orders.to_pylist() if order["cancelled"]]
    assert 40 < len(cancelled) < 120
    assert all(order["order_id"].startswith("C") and order["units"] < 0 for order in cancelled)
