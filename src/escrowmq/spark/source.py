"""Format "escrow" for Spark: the data source, and its readers and writers.

Spark finds it by package ``pyspark_escrow``, which must load quickly: the methods import what they need. Reads:
planning.py computes the offsets, brokers.py fetches them, columns.py converts them to Spark's columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import datasource

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from escrowmq.spark.options import ReadOptions


def register(spark: SparkSession) -> None:
    """Register format "escrow" with a session, where Spark's Python does not find package ``pyspark_escrow`` itself.
    Nothing else in the session changes."""
    spark.dataSource.register(EscrowSource)


class EscrowSource(datasource.DataSource):
    """``spark.read.format("escrow")``, ``readStream``, ``write``, ``writeStream``; options in options.py."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "escrow"

    def schema(self) -> str:
        """Return all columns of the source, or those in option ``columns``."""
        from escrowmq.spark.columns import choose, spark_schema
        from escrowmq.spark.options import read_options

        options = read_options(self.options, streaming=None)
        return spark_schema(choose(options.first_source, options.columns))

    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        """Return a batch read."""
        from escrowmq.spark.options import read_options
        from escrowmq.spark.reading import EscrowReader

        options = read_options(self.options)
        return EscrowReader(options, arrow_schema(options, schema))

    def streamReader(self, schema: StructType) -> datasource.DataSourceStreamReader:
        """Return a streaming read."""
        from escrowmq.spark.options import read_options
        from escrowmq.spark.streaming import EscrowStreamReader

        options = read_options(self.options, streaming=True)
        return EscrowStreamReader(options, arrow_schema(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> datasource.DataSourceWriter:
        """Return a batch write."""
        from escrowmq.spark.writing import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> datasource.DataSourceStreamWriter:
        """Return a streaming write, exactly once."""
        from escrowmq.spark.writing import stream_writer

        return stream_writer(self.options, schema, overwrite)


def arrow_schema(options: ReadOptions, schema: StructType) -> pa.Schema:
    """Convert Spark's schema to Arrow. Raises Misuse(BAD_SETTING) for an unknown column or a wrong type."""
    from pyspark.sql.pandas.types import to_arrow_schema

    from escrowmq.errors import Code, Misuse
    from escrowmq.spark.columns import choose

    for column in choose(options.first_source, schema.names):
        if (asked := schema[column.name].dataType.simpleString()) != column.spark:
            hint = "cast it after reading"
            raise Misuse(Code.BAD_SETTING, f"column {column.name!r} is {column.spark}, not {asked}", hint)
    return to_arrow_schema(schema, timezone="UTC")
