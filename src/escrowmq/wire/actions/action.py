"""Definition of an action: its name, the types of request and answer, and whether it only reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Generic, NotRequired, TypedDict, TypeVar

from escrowmq.wire.values import ConsumerGroup, PageLimit

Request = TypeVar("Request", bound=Mapping[str, object])
Answer = TypeVar("Answer", bound=Mapping[str, object])


class Nothing(TypedDict):
    """A request without fields."""


class OfGroup(TypedDict):
    """A request about a consumer group."""

    group: ConsumerGroup


class Paged(TypedDict):
    """A request for one page of a listing."""

    limit: NotRequired[PageLimit]


class Signed(TypedDict):
    """An operator action, which is recorded before it is applied."""

    by: NotRequired[Annotated[str, "operator, as given by the client, unverified"]]
    why: NotRequired[Annotated[str, "the reason, for the record"]]


class Results(TypedDict):
    """Result of each id or item of a request."""

    codes: Annotated[list[str], "one result per id or item, by name"]


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One call of an action: its name and its request. Only the type checker knows the type of its answer."""

    name: str
    request: Mapping[str, object]
    reads_only: bool = False
    """Whether it changes nothing, even if it gets no answer."""


@dataclass(frozen=True, slots=True)
class Action(Generic[Request, Answer]):
    """One action. Calling it creates a :class:`Call`: ``topics.CREATE({"name": "orders"})``."""

    name: str
    request: type[Request]
    answer: type[Answer]
    sentence: str
    """Description for the generated page."""
    reads_only: bool = False
    """Whether it only reads, so that a data folder without a running broker can answer it, too."""

    def __call__(self, request: Request) -> Call[Answer]:
        """Create a call with this request."""
        return Call(self.name, request, self.reads_only)
