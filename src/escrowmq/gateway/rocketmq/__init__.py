"""RocketMQ 5 clients, unmodified: the gRPC service ``apache.rocketmq.v2`` in front of a broker.

Like the HTTP gateway it is a client of the broker. It needs ``escrowmq[rocketmq]`` and raises Misuse(MISSING_PACKAGE)
without it. docs/rocketmq.md has the mapping.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from escrowmq.platform.extras import from_extra

if TYPE_CHECKING:
    from escrowmq.gateway.rocketmq.copying import RocketmqTopic, copy_topic
    from escrowmq.gateway.rocketmq.server import RocketmqOptions, beside, serve

_PACKAGES = ("grpc", "google", "rocketmq")

__all__ = ["RocketmqOptions", "RocketmqTopic", "beside", "copy_topic", "serve"]

__getattr__ = from_extra(
    __name__,
    dict.fromkeys(__all__, "server") | dict.fromkeys(("RocketmqTopic", "copy_topic"), "copying"),
    needs=dict.fromkeys(_PACKAGES, "rocketmq"),
    who="the RocketMQ gateway",
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
