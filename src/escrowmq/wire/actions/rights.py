"""Actions on access rights."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing, Signed
from escrowmq.wire.values import TimeUs

Rule = Annotated[str, "a rule of the rights file, such as `consume cart` or `send orders*`"]


class WhoAmI(TypedDict):
    """The caller, as this broker knows it."""

    principal: Annotated[str | None, "null: this broker has no rights file, and everybody may do everything"]
    authenticated_by: NotRequired[Annotated[str, "`token NAME` or `certificate NAME`"]]
    expires_us: NotRequired[Annotated[TimeUs, "when the token expires; absent: never"]]
    rules: list[Rule]
    rights: NotRequired[Annotated[str, "first 12 hexadecimal digits of the SHA-256 of the rights file"]]


class Denial(TypedDict):
    """Denied calls of one principal that lacked the same right."""

    principal: str
    needs: Rule
    count: int
    first_us: TimeUs
    last_us: TimeUs


class Denials(TypedDict):
    """Denied calls, most recent last; of the last 1,000 since the broker started."""

    denials: list[Denial]
    unauthenticated: Annotated[int, "greetings without a valid token or certificate since the broker started"]


class Reload(Signed):
    """Request to read the file again."""


class Reloaded(TypedDict):
    """Result of reading the rights file again."""

    rights: Annotated[str, "first 12 hexadecimal digits of the SHA-256 of the rights file"]
    changed: bool


WHOAMI = Action("rights.whoami", Nothing, WhoAmI, "The caller's principal and its rules.", reads_only=True)
DENIALS = Action(
    "rights.denials", Nothing, Denials, "Denied calls, and the rules that would permit them.", reads_only=True
)
RELOAD = Action("rights.reload", Reload, Reloaded, "Read the rights file again; an invalid file changes nothing.")
