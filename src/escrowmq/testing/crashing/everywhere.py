"""``crash_everywhere``: kills programs between every two of their steps, and compares by id what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from escrowmq.errors import Code, Misuse
from escrowmq.testing.crashing.process import Step
from escrowmq.testing.crashing.running import ROUNDS, Program, Trial
from escrowmq.testing.crashing.world import World

Ids = Callable[[World], Iterable[object]]
"""A function that returns ids, each as often as it is there."""

_CONTEXT = 6  # steps before the crash that a report shows
_ALSO = 10  # further crashes that a report names
_TIMES = {0: "never", 1: "once", 2: "twice"}


@dataclass(frozen=True, slots=True)
class Survived:
    """What a program survived."""

    steps: list[Step]
    """Its steps, in a run without a crash."""
    crashes: int
    """How many crashes it survived, each in a run of its own."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """What was wrong after one crash."""

    crash: str
    wrong: list[str]
    steps: list[str]


def crash_everywhere(
    *programs: Program,
    setup: Callable[[World], object] | None = None,
    committed: Ids | str | None = None,
    sent: Ids | str | None = None,
    effects: Ids | str | None = None,
    wait: float = 120.0,
) -> Survived:
    """Kill your programs before each of their steps, one crash in each run, and verify that both sides agree by id.

    ``programs`` are your processes: functions (or coroutine functions) of a :class:`World`, which do all pending work
    and return. A run starts them one after another. The one that is killed loses its connections, its open database
    transactions and everything in memory, and is started again. Then broker time moves by ``wait`` seconds, while all
    processes are there to answer check-backs, and all of them are started again, until no transaction is undecided and
    no message waits. Every run begins with a new broker, an empty folder, and ``setup(world)``.

    The sides are ids; at the end each id must be on all given sides, and equally often:

    - ``committed``: of what the producer's database has committed; a function of the world, or a query of
      ``world.engine()``;
    - ``sent``: of messages that consumers may see; a function, or a topic, whose messages are named by their keys
      (without a key by the message id);
    - ``effects``: of what the consumers' databases have; as ``committed``.

    Returns the steps. Raises AssertionError that names the steps between which a crash did harm, and the ids; an
    exception of a program in the run without a crash; Misuse(BAD_ARGUMENT) for fewer than two sides, or if the run
    without a crash leaves nothing to compare.
    """
    given = {"committed": committed, "sent": sent, "effects": effects}
    sides = {name: _ids(name, source) for name, source in given.items() if source is not None}
    if len(sides) < 2 or not programs:
        hint = "programs, and at least two of committed=, sent= and effects="
        raise Misuse(Code.BAD_ARGUMENT, "there is nothing to compare", hint)
    steps = _run_undisturbed(programs, setup, wait, sides)
    failures: list[_Failure] = []
    number = 1
    while True:
        with Trial(programs, setup, wait, number) as trial:
            trial.run()
            if trial.timeline.killed is None and number > len(steps):
                break
            if trial.timeline.killed is not None and (wrong := _wrong(trial, sides)):
                failures.append(_Failure(trial.timeline.describe_kill(), wrong, _story(trial)))
        number += 1
    if failures:
        raise AssertionError(_report(failures, number - 1))
    return Survived(steps, number - 1)


def _ids(name: str, source: Ids | str) -> Ids:
    if callable(source):
        return source
    if name == "sent":
        return lambda world: [m.message_id.hex() if m.key is None else m.key for m in world.bus().sent(source)]

    def query(world: World) -> Iterable[object]:
        from escrowmq.testing.crashing.databases import rows_of

        return rows_of(world.engine(), source)

    return query


def _run_undisturbed(
    programs: tuple[Program, ...], setup: Callable[[World], object] | None, wait: float, sides: Mapping[str, Ids]
) -> list[Step]:
    """Return the steps of a run without a crash."""
    with Trial(programs, setup, wait, None) as trial:
        trial.run()
        if trial.problem is not None:
            raise trial.problem[1]
        if wrong := _wrong(trial, sides):
            raise AssertionError("\n  ".join(["both sides disagree, even without a crash:", *wrong]))
        if not any(any(True for _ in trial.ask(ids)) for ids in sides.values()):
            text = "the programs left no ids, so a crash cannot do harm"
            raise Misuse(Code.BAD_ARGUMENT, text, "do they do any work? Do the queries find it?")
        return trial.timeline.steps


def _wrong(trial: Trial, sides: Mapping[str, Ids]) -> list[str]:
    """Return what is wrong after a run."""
    if trial.problem is not None:
        name, problem = trial.problem
        return [f"started again, {name} raised {problem!r}"]
    counts = {name: Counter(map(str, trial.ask(ids))) for name, ids in sides.items()}
    every = dict.fromkeys(identity for side in counts.values() for identity in side)
    return [
        f"{identity}: " + ", ".join(f"{name} {_times(side[identity])}" for name, side in counts.items())
        for identity in every
        if len({side[identity] for side in counts.values()}) > 1
    ]


def _times(count: int) -> str:
    return _TIMES.get(count, f"{count} times")


def _story(trial: Trial) -> list[str]:
    """Return the steps around the crash, as lines."""
    timeline = trial.timeline
    lines = [f"{number:4} {step}" for number, step in enumerate(timeline.steps, 1)]
    at = timeline.killed_after
    return [*lines[max(at - _CONTEXT, 0) : at], f"   X {timeline.killed}, not reached", *lines[at:]]


def _report(failures: list[_Failure], crashes: int) -> str:
    first = failures[0]
    lines = [f"{len(failures)} of {crashes} crashes did harm. {first.crash}:"]
    lines += [f"  {wrong}" for wrong in first.wrong]
    lines += ["the steps of that run:", *first.steps]
    if len(failures) > 1:
        lines.append("and also:")
        for failure in failures[1 : 1 + _ALSO]:
            lines.append(f"  {failure.crash}: {'; '.join(failure.wrong)}")
    if len(failures) > 1 + _ALSO:
        lines.append(f"  and {len(failures) - 1 - _ALSO} more")
    return "\n".join(lines)
