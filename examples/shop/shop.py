"""Orders and stock in databases that know nothing of each other: no piece is sold twice, none is lost, whatever
crashes.
"""

import argparse
import contextlib
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import shop_account
import shop_databases
from placing import MINUTE_US
from shop_baskets import shelves
from shop_databases import Databases
from shop_steps import PLACES, START_US, STEPS, Run, late_orders, pay_what_is_unpaid, still_frozen
from shop_tables import Order

from escrowmq import EscrowError
from escrowmq_lab.databases import databases as made


def say(text: str = "") -> None:
    print(text, flush=True)


def tell(title: str, counts: Counter) -> None:
    """A title and its counts, one a line."""
    say(title)
    for what, count in counts.items():
        if count:
            say(f"  {count:>6,}  {what}")


def story(run: Run, databases: Databases, crash: bool) -> list[str]:
    """Everything from the first basket to the last parcel; what is wrong at the end, or was on the way."""

    def step(name: str):  # run it; before that, kill it at each of its places
        kill(name)
        return STEPS[name](run, databases)

    def kill(name: str) -> None:
        if crash:
            print(f"({name}: killed at", end="", flush=True)
            for place in PLACES[name]:
                print(f" {place}" if run.killed_at(name, place) else f" [never came to {place}]", end="", flush=True)
            say(")")

    def wrong(now_us: int) -> list[str]:
        return shop_account.order_problems(databases, now_us)

    wanted = run.baskets()
    shop_databases.create(databases, shelves(wanted))
    say(f"{len(wanted):,} baskets, {len(databases.shards)} order databases, 1 product database")

    tell("at the tills:", step("tills"))
    problems = wrong(START_US)
    say(f"  {still_frozen(databases):>6,}  freezes that nothing has released yet")

    tell("10 minutes later, sweep 2 (two at once) looks for frozen stock without an order:", step("sweep 2"))
    placed, refused = late_orders(run, databases)
    say(
        f"  {refused:>6,}  orders came after that, all refused" if not placed else f"  {placed} LATE ORDERS WERE PLACED"
    )
    problems += wrong(START_US) + [f"{placed} orders were placed after their stock was given back"] * bool(placed)

    kill("sweep 1")
    title = "15 minutes after the orders, sweep 1 (two at once); some pay at this very moment:"
    with last_moment_payments(databases):
        tell(title, STEPS["sweep 1"](run, databases))
    tell("sweep 1 again, for what was paid meanwhile:", STEPS["sweep 1"](run, databases))
    paid, refused = pay_what_is_unpaid(databases, (Order.UNPAID, Order.TIMED_OUT))
    say(f"  {refused:>6,}  payments came after that, all refused" if not paid else f"  {paid} LATE PAYMENTS WERE TAKEN")
    problems += [f"{paid} orders were paid after their stock was given back"] * bool(paid)

    say(f"every change of an order went to the warehouse: {step('delivery'):,} messages")
    return problems + shop_account.verdict(databases, START_US + 15 * MINUTE_US)


@contextlib.contextmanager
def last_moment_payments(databases: Databases) -> Iterator[None]:
    """Unpaid orders are paid while the sweep is at them; each is either paid or refused."""
    told: list[tuple[int, int]] = []
    paying = threading.Thread(target=lambda: told.append(pay_what_is_unpaid(databases, every=2)))
    paying.start()
    yield
    paying.join()
    if not told:
        raise RuntimeError("the payments failed")
    say(f"  {told[0][0]:>6,}  paid at the last moment, {told[0][1]:,} refused")


def account(databases: Databases) -> None:
    """The last page: what every product, every order and every cent came to."""
    sums = shop_account.sums(databases)
    say()
    say(f"pieces:  {sums.initial:,} at first = {sums.stock:,} in stock + {sums.frozen:,} frozen + {sums.sold:,} sold")
    say(f"orders:  {sums.orders:,} = {sums.paid:,} paid + {sums.timed_out:,} timed out + {sums.unpaid:,} unpaid")
    say(f"parcels: {sums.parcels:,}, one for every paid order")


def main(arguments: argparse.Namespace) -> int:
    """Run it; the exit code: 0 if all is well, 1 if not, 2 if it could not be run."""
    logging.basicConfig(level=logging.WARNING, format="  %(message)s")
    with contextlib.ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shop-")))
        names = shop_databases.names(arguments.shards)
        try:
            urls = stack.enter_context(made(names, folder, arguments.database_url, keep=arguments.keep))
            databases = stack.enter_context(shop_databases.opened(urls))
            run = Run(urls, folder, arguments.orders, arguments.data)
            problems = story(run, databases, arguments.crash)
            account(databases)
        except EscrowError as problem:
            print(problem, file=sys.stderr)
            return 2
    for problem in problems[:20]:
        say(f"WRONG: {problem}")
    say("verdict: every piece and every order accounted for" if not problems else f"verdict: {len(problems)} PROBLEMS")
    return 1 if problems else 0


def at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database-url", metavar="URL", help="a PostgreSQL or MariaDB server; without it SQLite files")
    parser.add_argument("--orders", type=at_least_one, default=100, metavar="N", help="baskets (default: 100)")
    parser.add_argument("--shards", type=at_least_one, default=3, metavar="N", help="order databases (default: 3)")
    parser.add_argument("--crash", action="store_true", help="kill every step at every place in it first")
    parser.add_argument("--data", type=Path, metavar="FILE", help="real invoice lines, .parquet or .csv")
    parser.add_argument("--folder", type=Path, help="where files live (default: a folder that is removed afterwards)")
    parser.add_argument("--keep", action="store_true", help="leave the databases on the server")
    sys.exit(main(parser.parse_args()))
