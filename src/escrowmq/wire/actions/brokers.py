"""Actions on a broker itself: who it is, whether it works, its numbers."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from escrowmq.wire.actions.action import Action, Nothing, Signed


class Hello(TypedDict):
    """A broker's identity and limits."""

    protocol: Annotated[int, "version of this protocol"]
    version: Annotated[str, "of the program"]
    shard: Annotated[int, "number of its shard, part of every transaction id"]
    epoch: Annotated[int, "how often its log was opened"]
    time_us: NotRequired[Annotated[int, "broker time now, microseconds since 1970; not told by 0.1.0"]]
    limits: Annotated[dict[str, float], "every setting whose name begins with `max_`, by name"]
    role: NotRequired[
        Annotated[
            str, "`leader`, or `standby`: of a log that several brokers follow; absent: it has its log for itself"
        ]
    ]
    leader: NotRequired[Annotated[str, "URL of the broker that leads; absent: it is not known, or the log is its own"]]
    replicas: NotRequired[Annotated[list[str], "URLs of the brokers of this shard, itself included"]]
    again_ms: NotRequired[
        Annotated[
            int,
            "of a standby that many ask: it need not be asked who leads again before so many milliseconds; absent: it "
            "may",
        ]
    ]


class Health(TypedDict):
    """Whether a broker works."""

    status: Annotated[
        str,
        "`ok`, `damaged` (the log, in places: the rest goes on), `full` (the disk: messages are refused), `standby` "
        "(it follows, another leads), `stopping`, `stopped`; `incomplete` (a data folder that is only read, and may "
        "lack "
        "what was acknowledged last)",
    ]
    reason: Annotated[
        str,
        "empty when it is ok; of `damaged` the places, of `standby` who leads and how far it has followed, of "
        "`incomplete` what may be missing and why",
    ]
    missing: NotRequired[
        Annotated[str, "of a data folder that is only read: what it may lack, and why; absent: nothing"]
    ]


class StepDown(Signed):
    """A leader that is to hand over."""

    epoch: Annotated[
        int, "as `hello` said it; refused if the log was opened again since, so that a call made twice hands over once"
    ]


class SteppedDown(TypedDict):
    """The result. Without ``leader`` no broker took over in time: this one claims its log again by itself."""

    epoch: Annotated[
        int, "how often the log was opened when it stepped down: by another one since, if there is a leader"
    ]
    seconds: Annotated[float, "from stepping down to the answer"]
    leader: NotRequired[Annotated[str, "URL of the broker that leads now"]]


HELLO = Action("hello", Nothing, Hello, "Who this broker is and what its limits are.", reads_only=True)
HEALTH = Action("health", Nothing, Health, "Whether the broker works; answered even when it does not.", reads_only=True)
STATS = Action("stats", Nothing, dict[str, float], "One number per metric, by name.")
STEP_DOWN = Action(
    "step_down",
    StepDown,
    SteppedDown,
    "Let another broker of the shard lead: requests under way are answered, the log is released, another one takes "
    "over.",
)
