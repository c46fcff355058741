"""``crash_everywhere``: kills programs between every two of their steps, and compares by id what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from escrowmq.errors import Code, Misuse
from escrowmq.testing.crashing.process import Step
from escrowmq.testing.crashing.running import Program, Trial
from escrowmq.testing.crashing.world import World

Ids = Callable[[World], Iterable[object]]
"""A function that returns ids, each as often as it is there."""

_SHOWN = 40  # steps of a run that a report shows, at most
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
    crashes: int = 1,
) -> Survived:
    """Kill your programs before each of their steps, each time in a new run, and verify that both sides agree by id.

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

    ``crashes``: crashes of one run, at most. With 2, also the steps after a restart and those of checkers are
    interrupted: about as many runs as the square of the number of steps.

    Returns the steps. Raises AssertionError that names the steps between which a crash did harm, and the ids; an
    exception of a program in the run without a crash; Misuse(BAD_ARGUMENT) for fewer than two sides, or if the run
    without a crash leaves nothing to compare.
    """
    __tracebackhide__ = True  # pytest shows the caller's line instead
    given = {"committed": committed, "sent": sent, "effects": effects}
    sides = {name: _ids(name, source) for name, source in given.items() if source is not None}
    if len(sides) < 2 or not programs:
        hint = "programs, and at least two of committed=, sent= and effects="
        raise Misuse(Code.BAD_ARGUMENT, "there is nothing to compare", hint)
    search = _Search(programs, setup, wait, sides)
    steps = search.run_undisturbed()
    search.explore((), len(steps), crashes)
    if search.failures:
        raise AssertionError(_report(search.failures, search.runs))
    return Survived(steps, search.runs)


class _Search:
    """All runs of one call of :func:`crash_everywhere`."""

    def __init__(
        self,
        programs: tuple[Program, ...],
        setup: Callable[[World], object] | None,
        wait: float,
        sides: Mapping[str, Ids],
    ) -> None:
        self._given = programs, setup, wait
        self._sides = sides
        self.runs = 0
        self.failures: list[_Failure] = []

    def run_undisturbed(self) -> list[Step]:
        """Return the steps of a run without a crash."""
        with Trial(*self._given) as trial:
            trial.run()
            if trial.problem is not None:
                raise trial.problem[1]
            if wrong := self._wrong(trial):
                raise AssertionError("\n  ".join(["both sides disagree, even without a crash:", *wrong]))
            if not any(any(True for _ in trial.ask(ids)) for ids in self._sides.values()):
                text = "the programs left no ids, so a crash cannot do harm"
                raise Misuse(Code.BAD_ARGUMENT, text, "do they do any work? Do the queries find it?")
            return trial.timeline.steps

    def explore(self, before: tuple[int, ...], least: int, more: int) -> None:
        """Run with the kills ``before`` and ``more`` further ones, at every step after them; at least up to step
        ``least``."""
        number = before[-1] if before else 1
        while True:
            kills = (*before, number)
            with Trial(*self._given, kills) as trial:
                trial.run()
                complete = trial.timeline.is_complete
                if complete:
                    self.runs += 1
                    if wrong := self._wrong(trial):
                        self.failures.append(_Failure(trial.timeline.describe(), wrong, trial.timeline.lines()))
            if complete and more > 1:
                self.explore(kills, 0, more - 1)
            if not complete and number > least:
                return
            number += 1

    def _wrong(self, trial: Trial) -> list[str]:
        """Return what is wrong after a run."""
        if trial.problem is not None:
            name, problem = trial.problem
            return [f"started again, {name} raised {problem!r}"]
        counts = {name: Counter(map(str, trial.ask(ids))) for name, ids in self._sides.items()}
        every = dict.fromkeys(identity for side in counts.values() for identity in side)
        return [
            f"{identity}: " + ", ".join(f"{name} {_times(side[identity])}" for name, side in counts.items())
            for identity in every
            if len({side[identity] for side in counts.values()}) > 1
        ]


def _ids(name: str, source: Ids | str) -> Ids:
    if callable(source):
        return source
    if name == "sent":
        return lambda world: [m.message_id.hex() if m.key is None else m.key for m in world.bus().sent(source)]

    def query(world: World) -> Iterable[object]:
        engine = world.engine()
        from escrowmq.testing.crashing.databases import rows_of

        return rows_of(engine, source)

    return query


def _times(count: int) -> str:
    return _TIMES.get(count, f"{count} times")


def _report(failures: list[_Failure], runs: int) -> str:
    first = failures[0]
    lines = [f"{len(failures)} of {runs} crashes did harm. {first.crash}:"]
    lines += [f"  {wrong}" for wrong in first.wrong]
    lines += ["the steps of that run:", *first.steps[:_SHOWN]]
    lines += [f"     and {len(first.steps) - _SHOWN} more"] if len(first.steps) > _SHOWN else []
    if len(failures) > 1:
        lines.append("and also:")
    lines += [f"  {failure.crash}: {'; '.join(failure.wrong)}" for failure in failures[1 : 1 + _ALSO]]
    lines += [f"  and {len(failures) - 1 - _ALSO} more"] if len(failures) > 1 + _ALSO else []
    return "\n".join(lines)
