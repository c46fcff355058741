"""The demo's terminal output: progress while it runs, then the result of the audit."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from escrowmq.pipeline.audit import Verdict

_MOST_FINDINGS = 20
_ROWS = {"shop": "orders processed", "cart": "carts cleared", "points": "points credited"}


class Screen:
    """Progress bars while processes run, then a spinner, then the verdict. Without a terminal: plain lines."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._checks = 0
        self._orders = 1
        self._tenths = 0

    @contextlib.contextmanager
    def running(self, orders: int, brokers: str, folder: Path) -> Iterator[None]:
        """Show progress bars for ``orders`` orders; ``brokers`` describes the brokers."""
        self._orders = max(orders, 1)
        self.say(f"[bold]{orders:,} orders[/] · {brokers}, shop, cart and points as processes of their own · {folder}")
        columns = [TextColumn("{task.description:<22}"), BarColumn(bar_width=None), MofNCompleteColumn()]
        with Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True) as progress:
            self._progress = progress
            self._tasks = {name: progress.add_task(text, total=orders) for name, text in _ROWS.items()}
            self._tasks["checks"] = progress.add_task("check-backs", total=None)
            try:
                yield
            finally:
                self._progress = None

    def update(self, name: str, number: int) -> None:
        """Update a bar; without bars, print a line for every tenth of the orders."""
        if self._progress is not None:
            self._progress.update(self._tasks[name], completed=number)
        if name == "shop" and not self._console.is_terminal and number * 10 // self._orders > self._tenths:
            self._tenths = number * 10 // self._orders
            self.say(f"{number:,} orders processed, {self._checks} check-backs")

    def count_check(self) -> None:
        """Count one check-back."""
        self._checks += 1
        self.update("checks", self._checks)

    def say(self, text: str) -> None:
        """Print a line above the bars (rich markup)."""
        self._console.print(text)

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show a spinner; without a terminal, print a line."""
        if not self._console.is_terminal:
            self.say(text)
        with self._console.status(text):
            yield

    @contextlib.contextmanager
    def auditing(self) -> Iterator[Callable[[str], None]]:
        """Show a spinner with the progress of the audit."""
        columns = [SpinnerColumn(), TextColumn("audit: {task.description}"), TimeElapsedColumn()]
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("")
            yield lambda text: progress.update(task, description=text)

    def show(self, verdict: Verdict, folder: Path) -> None:
        """Print the verdict, its findings, and the paths of the reports."""
        show_verdict(self._console, verdict)
        self._console.print(f"report   {folder / 'report.html'}\nverdict  {folder / 'verdict.json'}", soft_wrap=True)
        self._console.print(f"again    escrowmq audit {shlex.quote(str(folder))}", soft_wrap=True)


def show_verdict(console: Console, verdict: Verdict) -> None:
    """Print the verdict as tables."""
    from escrowmq.pipeline.coverage import describe_beginnings

    figures = Table.grid(padding=(0, 3))
    for _ in range(3):
        figures.add_column(justify="right", style="bold")
        figures.add_column()
    left = ("ids", "transactions", "committed", "rolled_back", "consumed")
    middle = ("lost", "repeated", "altered", "leaked", "orphaned")
    for names in zip_longest(left, middle, ("kills", "checks")):
        figures.add_row(*chain(*(_cells(verdict, name, judged=name in middle) for name in names)))
    color, words = ("green", "all sides agree") if verdict.agrees else ("red", "the sides disagree")
    console.print(Panel(figures, title=f"[bold {color}]{words}[/]", border_style=color, expand=False, padding=(1, 3)))
    if verdict.beginnings:
        begin = escape(describe_beginnings(verdict.beginnings))
        console.print(f"the log does not begin at its first message: {begin}", soft_wrap=True)
    if verdict.sample:
        console.print(f"[yellow]a sample:[/] {verdict.sample} of the ids; no others were compared", soft_wrap=True)
    if verdict.incomplete:
        console.print(f"[yellow]the log may be incomplete:[/] {escape(verdict.incomplete)}", soft_wrap=True)
    for one in verdict.differing:
        console.print(f"{escape(one.between)}: {escape(str(one))}", soft_wrap=True)
    if findings := verdict.findings[:_MOST_FINDINGS]:
        for finding in findings:  # lines: a table of 80 columns would cut the ids
            rows = f"{finding.expected} expected, {finding.found} found"
            why = f"; {finding.reason}" if finding.reason else ""
            text = escape(f"{finding.id}  {finding.between}: {rows}{why}")
            console.print(f"[red]{finding.kind:<8}[/]  {text}", soft_wrap=True)
        if verdict.findings_in_all > _MOST_FINDINGS:
            console.print(f"… of {verdict.findings_in_all:,} findings; more are in verdict.json")


def _cells(verdict: Verdict, name: str | None, *, judged: bool = False) -> list[str]:
    if name is None:
        return ["", ""]
    value: int = getattr(verdict, name)
    color = ("red" if value else "green") if judged else "default"
    return [f"[{color}]{value:,}[/]", name.replace("_", " ")]
