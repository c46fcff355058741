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
SHELVES_ARE_FULL = 0.97
"""Of what the baskets ask for, this much is in stock: some are refused."""


def baskets(count: int, data: Path | None = None, seed: int = 7) -> list[tuple[int, Basket, Fate]]:
    """``count`` numbered baskets (fewer if the file has fewer), each with its fate."""
    table = read_orders(data, count * 2) if data else generate_orders(count * 2, seed)
    found = [basket for basket in map(_basket, _rows(table)) if basket.lines]
    return list(zip(range(len(found)), found, islice(cycle(FATES), count), strict=False))


def shelves(wanted: list[tuple[int, Basket, Fate]], full: float = SHELVES_ARE_FULL) -> dict[str, int]:
    """What is in stock at first, by product: a part of what is wanted, and never less than the largest wish."""
    asked: Counter[str] = Counter()
    largest: dict[str, int] = {}
    for _, basket, _ in wanted:
        asked.update(basket.lines)
        for product, pieces in basket.lines.items():
            largest[product] = max(pieces, largest.get(product, 0))
    return {product: max(int(pieces * full), largest[product]) for product, pieces in asked.items()}


def _rows(table: pa.Table) -> list[dict]:
    return [order for order in table.to_pylist() if not order["cancelled"]]


def _basket(order: dict) -> Basket:
    pieces: Counter[str] = Counter()
    for line in order["lines"].split(";"):  # STOCK*QUANTITY@CENTS
        product, _, rest = line.rpartition("*")
        if product.strip() and (quantity := int(rest.partition("@")[0])) > 0:
            pieces[product.strip()] += quantity
    return Basket(order["customer_id"] or "guest", dict(pieces), max(order["amount_cents"], 0))
