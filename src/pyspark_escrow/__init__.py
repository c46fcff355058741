"""Format "escrow" for every Spark session: Spark registers the ``DefaultSource`` of each package ``pyspark_*``.

Spark does so for the first Python source of a session, whichever it is. So importing this loads neither PyArrow nor
NumPy.
"""

from escrowmq.spark.source import EscrowSource as DefaultSource

__all__ = ["DefaultSource"]
