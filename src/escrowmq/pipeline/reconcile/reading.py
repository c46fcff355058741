"""Reads a topic as one side of a comparison, with only the columns that it needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from escrowmq.errors import Code, Misuse
from escrowmq.settings import nearest
from escrowmq.spark.options import absolute
from escrowmq.spark.source import register

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Side = DataFrame
"""``id`` string, ``at`` timestamp, perhaps ``digest``: one row per sighting."""
IDS = ("key", "body", "message_id")
"""Where a message's id is. ``message_id`` and bodies that are not UTF-8 become lower-case hex."""
HALF_VIEW = "%half"


def read_side(
    spark: SparkSession,
    url: str,
    topic: str,
    id: str = "key",
    *,
    content: bool = False,
    digest: Callable[[str], Column] = f.xxhash64,
    stream: bool = False,
    whole: bool = False,
) -> DataFrame:
    """Read a topic as one side: ``id``, ``at`` (when the broker stored it), with ``content`` also ``digest`` of the
    body, as the function ``digest`` computes it; ``stream``: as a streaming frame. With ``whole``, using it raises
    Misuse(FOLDER_IN_USE) if a folder may lack the newest acknowledged messages. Messages of the view ``%half`` that
    were rolled back or expired are left out, because no commit is expected. Raises Misuse(BAD_ARGUMENT) for an unknown
    kind of id, and on use the errors of the source: Rejected(UNKNOWN_TOPIC), Unknown, ..."""
    if id not in IDS:
        hint = nearest(id, list(IDS)) or f"one of {', '.join(IDS)}"
        raise Misuse(Code.BAD_ARGUMENT, f"no id {id!r} in a message", hint)
    register(spark)
    url = absolute(url)
    wanted = {id, "stored"} | ({"body"} if content else set()) | ({"state"} if topic == HALF_VIEW else set())
    reader = spark.readStream if stream else spark.read
    options = {"topic": topic, "columns": ",".join(sorted(wanted)), "incomplete": "refuse" if whole else "warn"}
    rows = reader.format("escrow").options(**options).load(url)
    if topic == HALF_VIEW:
        rows = rows.where(~f.col("state").isin("rolled_back", "expired"))
    digests = [digest("body").alias("digest")] if content else []
    text, in_hex = f.col(id).cast("string"), f.lower(f.hex(id))
    ids = {"key": text, "body": f.when(f.is_valid_utf8(text), text).otherwise(in_hex), "message_id": in_hex}
    return rows.select(ids[id].alias("id"), f.col("stored").alias("at"), *digests)
