"""A Spark session that outlives a test which was broken off.

A test that reaches its limit is broken off wherever it is, often while it waits for an answer of Java. The answer comes
later, on the same connection, and would be taken for that of the next question, and so on for all tests that follow in
that process.
"""

from __future__ import annotations

import contextlib
from typing import Any

from py4j.clientserver import ClientServerConnection
from pyspark import SparkContext


def keep_sessions() -> None:
    """From now on in this process: who is broken off while it waits for Java leaves its connection, and the next
    question makes a new one. What Spark is doing is cancelled, as nobody waits for it. Once more does nothing."""
    if ClientServerConnection.send_command is not _send_command:
        ClientServerConnection.send_command = _send_command


_plain = ClientServerConnection.send_command


def _send_command(connection: ClientServerConnection, command: str) -> Any:
    try:
        return _plain(connection, command)
    except Exception:  # of Java, or of a connection that is closed by its owner
        raise
    except BaseException:
        connection.close()
        if (context := SparkContext._active_spark_context) is not None:
            with contextlib.suppress(Exception):
                context.cancelAllJobs()
        raise
