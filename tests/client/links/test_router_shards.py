"""Which broker holds a shard, while not all of them have answered."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

import escrowmq as mq
from escrowmq.client.links.presence import AWAY_SECONDS
from escrowmq.client.links.router import Router
from escrowmq.errors import error


class Told:
    """A link to a broker that is asked who it is: it answers with its shard, or refuses the connection."""

    def __init__(self, address: str, shard: int | None) -> None:
        self.address = address
        self.shard = shard

    def action(self, name: str, request: Mapping[str, object], timeout: float) -> dict[str, object]:
        if self.shard is None:
            raise error(mq.Code.DISCONNECTED, "connection refused")
        return {"shard": self.shard}


@pytest.mark.invariant("I4")
def test_a_shard_of_a_broker_that_has_not_answered_yet_is_at_no_wrong_one() -> None:
    """A broker that refuses for a moment is not away yet; what it holds must not be called out of reach for ever."""
    east, west = Told("east:1", 7), Told("west:1", None)
    router = Router([east, west])  # type: ignore[list-item]
    try:
        with pytest.raises(mq.Overloaded) as caught:
            router.of_shard(9, AWAY_SECONDS / 4)
        assert caught.value.code is mq.Code.BROKER_AWAY
        assert "west:1" in caught.value.message
        back = threading.Event()
        router.presence.when_back(1, back.set)
        west.shard = 9
        back.wait()
        assert router.of_shard(9, 60.0) == 1
        with pytest.raises(mq.Rejected) as refused:
            router.of_shard(8, 60.0)
        assert refused.value.code is mq.Code.WRONG_SHARD
    finally:
        router.close()
