"""An action: a name, the types of its request and answer, and whether it only reads."""

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
    """An operator's act: it is recorded before it is done."""

    by: NotRequired[Annotated[str, "who acts, as the client names them: nobody has verified it"]]
    why: NotRequired[Annotated[str, "the reason, for whoever reads the record later"]]


class Results(TypedDict):
    """The result for each id or item of a request."""

    codes: Annotated[list[str], "one result per id or item, by name"]


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    """One call of an action: its name and its request. The type of its answer is known to the type checker only."""

    name: str
    request: Mapping[str, object]
    reads_only: bool = False
    """Whether it changes nothing, answered or not."""


@dataclass(frozen=True, slots=True)
class Action(Generic[Request, Answer]):
    """One action. Calling it makes a :class:`Call`: ``topics.CREATE({"name": "orders"})``."""

    name: str
    request: type[Request]
    answer: type[Answer]
    sentence: str
    """What it does, for the generated page."""
    reads_only: bool = False
    """Whether it only looks at what is stored, so that a data folder without a running broker answers it, too."""

    def __call__(self, request: Request) -> Call[Answer]:
        """One call with this request."""
        return Call(self.name, request, self.reads_only)
