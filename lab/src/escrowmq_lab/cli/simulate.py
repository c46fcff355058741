"""``escrowmq-lab simulate``: brokers and clients in virtual time, under faults drawn from seeds; docs/simulation.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import Json
from escrowmq.cli.printing import notice, print_facts, print_json

if TYPE_CHECKING:
    from escrowmq_lab.simulation.plan import Scale
    from escrowmq_lab.simulation.run import Result
    from escrowmq_lab.simulation.swarm import Summary

SHOWN = 20
"""Maximum number of printed failed seeds."""


def simulate(
    seeds: Annotated[int | None, typer.Option(min=1, help="How many; 2,000 unless --minutes says how long.")] = None,
    first: Annotated[int, typer.Option("--from", min=0, help="The first seed.")] = 0,
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Begin no run after this time: overnight, 600.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Only this one, and make it smaller if it fails.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="With --seed: print everything that happens.")] = False,
    long: Annotated[bool, typer.Option("--long", help="Longer runs: more operations, more faults.")] = False,
    carrying: Annotated[
        bool, typer.Option("--carrying", help="Runs about connections: reads, answers in parts, TLS.")
    ] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes; as many as there are cores.")] = None,
    json: Json = False,
) -> None:
    """Run brokers and clients in virtual time under faults, and check that every promise holds.

    Each seed draws a workload, settings, a network and faults, and always gives the same run. Exit code 1 when a
    promise was broken; the seed is printed, and --seed N --trace shows the run.
    """
    from escrowmq_lab.simulation.plan import CARRYING, LONG, Scale
    from escrowmq_lab.simulation.swarm import simulate_many

    scale = CARRYING if carrying else LONG if long else Scale()
    if seed is not None:
        _run_one(seed, trace, scale, json)
        return
    if seeds is None and minutes is None:
        seeds = 2000
    with Console(stderr=True).status("simulate") as status:

        def on_progress(summary: Summary) -> None:
            status.update(f"{summary.runs} runs, {len(summary.failed)} failed")

        summary = simulate_many(seeds, first, jobs=jobs, scale=scale, minutes=minutes, on_progress=on_progress)
    facts = {
        "runs": summary.runs,
        "failed": len(summary.failed),
        "virtual_seconds": round(summary.seconds),
        "seconds": round(summary.took, 1),
        **{name: summary.counts[key] for name, key in _COUNTED.items()},
    }
    if json:
        print_json({**facts, "failures": [_to_json(result) for result in summary.failed]})
    else:
        print_facts(facts)
        more = " --carrying" if carrying else " --long" if long else ""
        for result in summary.failed[:SHOWN]:
            notice(f"seed {result.seed}: {result.violations[0]}")
            notice(f"replay it: escrowmq-lab simulate --seed {result.seed} --trace{more}")
    if not summary.ok:
        raise typer.Exit(Exit.FINDING)


_COUNTED = {
    "messages_committed": "committed",
    "messages_delivered": "receive ok",
    "transactions_committed": "transactions committed",
    "transactions_rolled_back": "transactions rolled_back",
    "transactions_parked": "transactions parked",
    "effects": "effect ok",
    "operator_acts": "operate ok",
    "broker_crashes": "crashes",
    "clients_killed": "kill ok",
}


def _run_one(seed: int, trace: bool, scale: Scale, json: bool) -> None:
    """Run one seed; if it fails, find what can be left out."""
    from escrowmq_lab.simulation.plan import draw
    from escrowmq_lab.simulation.run import Run
    from escrowmq_lab.simulation.shrink import shrink

    plan = draw(seed, scale)
    result = Run(plan, keep=trace).result()
    if trace:
        for line in result.trace:
            print(line)
    shown = _to_json(result)
    if not result.ok:
        left_out = shrink(plan, result, lambda line: notice(line))
        smaller = plan.without(left_out)
        shown["needed"] = smaller.names()
        if trace:
            print("the same with what is needed:")
            for line in Run(smaller, keep=True).result().trace:
                print(line)
    if json:
        print_json({**shown, "plan": plan.describe()})
    else:
        print_facts({**plan.describe(), **shown})
    if not result.ok:
        raise typer.Exit(Exit.FINDING)


def _to_json(result: Result) -> dict[str, object]:
    return {
        "seed": result.seed,
        "digest": result.digest,
        "turns": result.steps,
        "virtual_seconds": round(result.seconds, 3),
        "violations": [str(violation) for violation in result.violations[:5]],
    }
