"""Orders clear carts with a broker that never asks back: a share of the confirms is lost, and two sets of ids repair
it.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

from compensated_run import Run, killing
from compensated_staff import ROLES
from compensated_tables import CART, SHOP

from escrowmq import EscrowError
from escrowmq_lab.databases import databases
from escrowmq_lab.servers import escrow

DEATHS = (*ROLES, "broker")
"""Who is killed, one after the other, while orders come."""


def say(text: str) -> None:
    print(text, flush=True)


def report(run: Run, killed: list[str], tidied: int) -> list[str]:
    """Tell what happened; what is wrong."""
    made = [effect.made_by for effect in run.effects()]
    say(f"{len(made):,} orders were placed; {run.lost:,} ends of transactions were lost on the way")
    say(f"{made.count('message'):,} carts were cleared by their message, {made.count('scheduler'):,} by a scheduler")
    if tidied:
        say(f"{tidied:,} refused orders whose rollback was lost were rolled back by the operator")
    if killed:
        say(f"killed: {', '.join(killed)}")
    problems = run.wrong()
    for problem in problems[:20]:
        say(f"WRONG: {problem}")
    say("verdict: each order once" if not problems else f"verdict: {len(problems)} PROBLEMS")
    return problems


def main(arguments: argparse.Namespace) -> int:
    """Run it; the exit code: 0 if all is well, 1 if not, 2 if it could not be run."""
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="compensated-")))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            urls = stack.enter_context(databases([SHOP, CART], folder, arguments.database_url, keep=arguments.keep))
            broker = stack.enter_context(escrow.serving(folder))
            sets = arguments.sets or f"sqlite:///{folder / 'sets.db'}"
            run = stack.enter_context(contextlib.closing(Run(urls, sets, folder, broker, arguments.drop / 100)))
            killed = run.work(arguments.orders, [killing(name) for name in DEATHS] if arguments.kill else [])
            return 1 if report(run, killed, run.tidy()) else 0
        except EscrowError as problem:
            print(problem, file=sys.stderr)
            return 2
        except (RuntimeError, TimeoutError) as problem:  # a process that did not do its part: its log says why
            kept = Path(tempfile.mkdtemp(prefix="compensated-logs-")) if arguments.folder is None else folder
            if kept != folder:
                for log in folder.glob("*.log"):
                    shutil.copy(log, kept)
            print(f"{problem} (in {kept})", file=sys.stderr)
            return 2


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def percentage(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 100:
        raise argparse.ArgumentTypeError("0 to 100")
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orders", type=positive, default=200, metavar="N", help="default: 200")
    parser.add_argument("--drop", type=percentage, default=10, metavar="PERCENT", help="of the confirms; default: 10")
    parser.add_argument("--sets", metavar="URL", help="redis://… or a database; without it a SQLite file")
    parser.add_argument("--database-url", metavar="URL", help="a PostgreSQL or MariaDB server; without it SQLite files")
    parser.add_argument("--kill", action="store_true", help="kill every process once while orders come")
    parser.add_argument("--folder", type=Path, help="where files live (default: a folder that is removed afterwards)")
    parser.add_argument("--keep", action="store_true", help="leave the databases on the server")
    sys.exit(main(parser.parse_args()))
