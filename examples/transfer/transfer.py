"""A thousand from an account of bank A to an account of bank B: two databases, one message, and no money lost or
made."""

import argparse
import contextlib
import math
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa
import transfer_auditor
from bank_tables import accounts_a, accounts_b, bank_a, bank_b
from transfer_auditor import Auditor, Reading
from transfer_staff import DEATHS, Death, Staff

from escrowmq import EscrowError, outbox
from escrowmq_lab.databases import databases, open_engine

PAYERS, PAYEES, AMOUNT = 5, 3, 1000
NAMES = ["transfer_bank_a", "transfer_bank_b"]


def say(text: str) -> None:
    print(text, flush=True)


def open_banks(a: sa.Engine, b: sa.Engine, transfers: int) -> int:
    """Make the tables and the accounts; how much money there is. The payers have enough for all but the last few."""
    bank_a.create_all(a)
    bank_b.create_all(b)
    outbox.migrate(a)
    outbox.migrate(b)
    each = max(math.ceil(transfers / PAYERS) - 1, 1) * AMOUNT + AMOUNT // 2
    with a.begin() as connection:
        connection.execute(sa.insert(accounts_a), [{"user_id": f"A{n}", "amount": each} for n in range(PAYERS)])
    with b.begin() as connection:
        connection.execute(sa.insert(accounts_b), [{"user_id": f"B{n}", "amount": 0} for n in range(PAYEES)])
    return each * PAYERS


def run(urls: list[str], folder: Path, transfers: int, way: str, deaths: list[Death]) -> list[str]:
    """Make the transfers, kill whom ``deaths`` names, tell about it; what was ever wrong."""
    with contextlib.ExitStack() as stack:
        a, b = map(open_engine, urls)
        stack.callback(a.dispose)
        stack.callback(b.dispose)
        by_outbox = way == "outbox"
        total = open_banks(a, b, transfers)
        say(f"{total:,} in bank A, nothing in bank B; {transfers:,} transfers of {AMOUNT:,}, some more than A has")
        with Auditor(a, b, total, by_outbox) as auditor:
            config = {"bank_a": urls[0], "bank_b": urls[1], "way": way, "folder": str(folder)}
            with Staff(config, folder, deaths) as staff:
                work(staff, transfers, lambda: settled(auditor.read(), a, by_outbox))
        reading = auditor.read()
        say(f"{len(staff.killed)} killed; the banks were read {auditor.readings:,} times meanwhile")
        refused = transfers - reading.debited
        say(
            f"debited: {reading.debited:,} transfers ({refused:,} refused), credited: {reading.credited:,}, the same "
            "ones"
        )
        say(f"{reading.in_a:,} in A + {reading.in_flight:,} in flight + {reading.in_b:,} in B = {reading.total:,}")
        if by_outbox:
            say(f"messages that bank B has not confirmed: {transfer_auditor.not_done(a)}")
    return [*auditor.problems, *reading.problems, *(f"nobody came to {death.place}" for death in staff.left)]


def work(staff: Staff, transfers: int, settled: Callable[[], bool]) -> None:
    """All transfers, a share at a time, so that there is something on its way until everybody has died who is to
    die."""
    share = max(transfers // (len(staff.left) + 1), 1)
    ends = range(share, transfers, share) if staff.left else ()
    for end in [*ends, transfers]:
        told = len(staff.killed)
        staff.transfer(end if staff.left else transfers)
        staff.work(settled)
        for death in staff.killed[told:]:
            say(f"  killed {death.dies:<7} at {death.place}")


def settled(reading: Reading, a: sa.Engine, by_outbox: bool) -> bool:
    """Whether nothing is on its way any more."""
    return not reading.in_flight and not (by_outbox and transfer_auditor.not_done(a))


def main(arguments: argparse.Namespace) -> int:
    """Run it; the exit code: 0 if all is well, 1 if not, 2 if it could not be run."""
    deaths = DEATHS[arguments.way] if arguments.kill else []
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="transfer-")))
        try:
            urls = stack.enter_context(databases(NAMES, folder, arguments.database_url, keep=arguments.keep))
            problems = run(urls, folder, max(arguments.transfers, len(deaths) + 1), arguments.way, deaths)
        except EscrowError as problem:
            print(problem, file=sys.stderr)
            return 2
        except (RuntimeError, TimeoutError) as problem:  # a process that did not do its part: its log says why
            kept = Path(tempfile.mkdtemp(prefix="transfer-logs-")) if arguments.folder is None else folder
            if kept != folder:
                for log in folder.glob("*.log"):
                    shutil.copy(log, kept)
            print(f"{problem} (in {kept})", file=sys.stderr)
            return 2
    for problem in problems[:20]:
        say(f"WRONG: {problem}")
    say("verdict: no money lost, none made" if not problems else f"verdict: {len(problems)} PROBLEMS")
    return 1 if problems else 0


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database-url", metavar="URL", help="a PostgreSQL or MariaDB server; without it SQLite files")
    parser.add_argument("--transfers", type=at_least_one, default=100, metavar="N", help="default: 100")
    parser.add_argument(
        "--way", choices=sorted(DEATHS), default="outbox", help="message table, or half message and barrier"
    )
    parser.add_argument("--kill", action="store_true", help="kill a process between every two steps")
    parser.add_argument("--folder", type=Path, help="where files live (default: a folder that is removed afterwards)")
    parser.add_argument("--keep", action="store_true", help="leave the databases on the server")
    sys.exit(main(parser.parse_args()))
