"""A sample of an audit: the ids whose hash is below a limit. All sides have the same sample; databases select it
themselves."""

from __future__ import annotations

import re
from decimal import Decimal

from pyspark.sql import Column

from escrowmq.errors import Code, Misuse
from escrowmq.pipeline.audit.rows import portable_hash
from escrowmq.pipeline.sql.id_windows import SAMPLED_OF


def parse_sample(text: str) -> int:
    """Convert a percentage (``1%``) to parts of SAMPLED_OF. Raises Misuse(BAD_ARGUMENT)."""
    found = re.fullmatch(r"([0-9]{1,3}(?:[.][0-9]{1,9})?)%", text.strip())
    parts = Decimal(found[1]) * SAMPLED_OF / 100 if found else Decimal(0)
    if not 0 < parts <= SAMPLED_OF or parts != int(parts):
        raise Misuse(Code.BAD_ARGUMENT, f"sample {text!r}", "a percentage from 0.0001% to 100%, such as 1%")
    return int(parts)


def show_sample(parts: int | None) -> str:
    """Format a sample (parts of SAMPLED_OF) as a percentage; "" for None, which is all ids."""
    return "" if parts is None else f"{Decimal(parts) * 100 / SAMPLED_OF:f}%"


def is_sampled(id: Column, parts: int) -> Column:
    """Return the condition that an id is in the sample of so many ``parts`` of SAMPLED_OF."""
    return portable_hash(id) % SAMPLED_OF < parts
