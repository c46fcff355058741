"""Actions on a broker itself: identity, health, metrics."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing, Signed


class Hello(TypedDict):
    """Identity and limits of a broker."""

    protocol: Annotated[int, "version of this protocol"]
    version: Annotated[str, "of the program"]
    shard: Annotated[int, "number of its shard, part of every transaction id"]
    epoch: Annotated[int, "how often its log was opened"]
    time_us: NotRequired[Annotated[int, "broker time now, microseconds since 1970; absent in 0.1.0"]]
    limits: Annotated[dict[str, float], "every setting whose name begins with `max_`, by name"]
    role: NotRequired[
        Annotated[str, "`leader` or `standby`, if several brokers follow the log; absent: it has its own log"]
    ]
    leader: NotRequired[Annotated[str, "URL of the leader; absent: unknown, or the broker has its own log"]]
    replicas: NotRequired[Annotated[list[str], "URLs of the brokers of this shard, itself included"]]
    rights: NotRequired[
        Annotated[str, "first 12 hexadecimal digits of the SHA-256 of its rights file; absent: it has none"]
    ]
    again_ms: NotRequired[
        Annotated[
            int,
            "of a busy standby: minimum delay (ms) before the next query for the leader; absent: none",
        ]
    ]


class Health(TypedDict):
    """Health of a broker."""

    status: Annotated[
        str,
        "`ok`, `damaged` (parts of the log; the rest works), `full` (the disk: messages are rejected), `standby` "
        "(another broker leads), `stopping`, `stopped`; `incomplete` (a data folder opened read-only; it may lack "
        "the last acknowledged records)",
    ]
    reason: Annotated[
        str,
        "empty if ok; of `damaged` the places, of `standby` the leader and the progress, of "
        "`incomplete` the possibly missing part and why",
    ]
    missing: NotRequired[
        Annotated[str, "of a data folder opened read-only: the possibly missing part, and why; absent: none"]
    ]


class StepDown(Signed):
    """Request to a leader to hand over."""

    epoch: Annotated[
        int, "from `hello`; rejected if the log was opened again since, so that a repeated call hands over once"
    ]


class SteppedDown(TypedDict):
    """Result of stepping down. Without ``leader`` no broker took over in time: this one claims its log again."""

    epoch: Annotated[int, "number of log openings at the hand-over; a new leader has opened it once more"]
    seconds: Annotated[float, "duration until the answer"]
    leader: NotRequired[Annotated[str, "URL of the new leader"]]


HELLO = Action("hello", Nothing, Hello, "Identity and limits of this broker.", reads_only=True)
HEALTH = Action("health", Nothing, Health, "Health of the broker; answered even if it does not work.", reads_only=True)
STATS = Action("stats", Nothing, dict[str, float], "One number per metric, by name.")
STEP_DOWN = Action(
    "step_down",
    StepDown,
    SteppedDown,
    "Hand the shard to another broker: open requests are answered, the log is released, another one takes over.",
)
