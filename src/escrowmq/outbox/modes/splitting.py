"""Splits one topic into several, so that consumer-side de-duplication can run several consumers."""

from __future__ import annotations

import dataclasses
import itertools

import xxhash

from escrowmq.errors import Code, Misuse
from escrowmq.message.names import check_name
from escrowmq.model import Message


class SplitTopic:
    """The parts of a topic: ``split_topic("t", 4)`` has t-queue-1 to t-queue-4. A key has one part for ever; messages
    without one go by turns. Raises BAD_TOPIC_NAME, Misuse(BAD_ARGUMENT)."""

    def __init__(self, name: str, parts: int) -> None:
        if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
            raise Misuse(Code.BAD_ARGUMENT, f"a topic in {parts!r} parts", "at least 1")
        self.names = tuple(f"{name}-queue-{number}" for number in range(1, parts + 1))
        check_name(self.names[-1], Code.BAD_TOPIC_NAME)
        self._turns = itertools.count()

    def of(self, key: str | None) -> str:
        """Return the name of the part for a key: by XXH64 of its UTF-8 bytes, modulo the number of parts. None: the
        next part in turn."""
        raw = None if key is None else key.encode("utf-8", "surrogatepass")
        return self.names[(next(self._turns) if raw is None else xxhash.xxh64_intdigest(raw)) % len(self.names)]

    def route(self, message: Message) -> Message:
        """Return a copy of the message whose topic is its part."""
        return dataclasses.replace(message, topic=self.of(message.key))


split_topic = SplitTopic
