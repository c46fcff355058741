"""Baskets and shelves: made up, or taken from a file of invoice lines."""

from collections import Counter
from itertools import cycle, islice
from pathlib import Path

import pyarrow as pa
from shop_tables import Basket
from till import Fate

from escrowmq.demo.orders import generate_orders, read_orders

FATES = (
    *[Fate.PAYS, Fate.FORGETS, Fate.PAYS, Fate.LOSES_ANSWER, Fate.PAYS, Fate.NEVER_ARRIVES, Fate.PAYS, Fate.FORGETS],
    *[Fate.WALKS_AWAY, Fate.PAYS, Fate.COMES_LATE, Fate.PAYS, Fate.FORGETS, Fate.PAYS, Fate.PAYS, Fate.PAYS],
)
SHORT = 200
"""One product in so many is short: those who want the last pieces are refused."""


def baskets(count: int, data: Path | None = None, seed: int = 7) -> list[tuple[int, Basket, Fate]]:
    """``count`` numbered baskets (fewer if the file has fewer), each with its fate."""
    table = read_orders(data, count * 2) if data else generate_orders(count * 2, seed)
    found = [basket for basket in map(_basket, _rows(table)) if basket.lines]
    return list(zip(range(len(found)), found, islice(cycle(FATES), count), strict=False))


def shelves(wanted: list[tuple[int, Basket, Fate]], short: int = SHORT) -> dict[str, int]:
    """What is in stock at first, by product: all that is wanted, but of one product in ``short`` only half."""
    asked: Counter[str] = Counter()
    for _, basket, _ in wanted:
        asked.update(basket.lines)
    return {name: pieces if n % short else pieces // 2 for n, (name, pieces) in enumerate(asked.items(), start=1)}


def _rows(table: pa.Table) -> list[dict]:
    return [order for order in table.to_pylist() if not order["cancelled"]]


def _basket(order: dict) -> Basket:
    pieces: Counter[str] = Counter()
    for line in order["lines"].split(";"):  # STOCK*QUANTITY@CENTS
        product, _, rest = line.rpartition("*")
        if product.strip() and (quantity := int(rest.partition("@")[0])) > 0:
            pieces[product.strip()] += quantity
    return Basket(order["customer_id"] or "guest", dict(pieces), max(order["amount_cents"], 0))
