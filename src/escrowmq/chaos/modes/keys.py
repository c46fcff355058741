"""Order within a key: the keys that producers share out, and what a consumer notices of their order."""

from __future__ import annotations

from collections.abc import Iterable

from escrowmq.chaos.modes.seam import Contradiction

KEYS = 8
"""Of one process and mode."""


def key_of(identity: str) -> str:
    """The key of an id, one of a few. A process counts its ids, so that those of a key have an order."""
    _, node, process, number, _ = identity.split(".")
    return f"{node}.{process}.{int(number) % KEYS}"


class KeyOrder:
    """What one consumer of an ordered feed has seen. Not thread-safe."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[int, str]] = {}

    def see(self, identities: Iterable[str]) -> None:
        """These were handed out here for the first time, in this order. Raises Contradiction where one comes behind a later one of its
        key."""
        for identity in identities:
            if identity.count(".") != 4:
                continue  # garbage, which the check will find
            number, key = int(identity.split(".")[3]), key_of(identity)
            latest, before = self._latest.get(key, (-1, ""))
            if number <= latest:
                raise Contradiction(f"{identity} was handed out after {before}, which is later in its key")
            self._latest[key] = number, identity
