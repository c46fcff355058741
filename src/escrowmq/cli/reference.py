"""The generated pages of ``docs/``: ``python -m escrowmq.cli.reference docs`` writes them, a test compares them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_origin

from escrowmq import schemas, settings, wire
from escrowmq.cli.failures import Exit
from escrowmq.cli.flags import lines
from escrowmq.errors import Code, EscrowError
from escrowmq.wire import frames
from escrowmq.wire.actions.table import ACTIONS
from escrowmq.wire.values import LARGEST_NUMBER, Bounds, Value, fields_of

_MADE = "<!-- Made by `make docs`; edit the code it is made from, not this page. -->\n\n"


_SETTINGS = """\
For operators. At the end you know each setting of a broker, its range, and why it exists.

Every setting can be given, later ones winning, in a TOML file (`escrowmq serve --config FILE`, table `[broker]`), as an
environment variable (`ESCROWMQ_CHECK_INTERVAL=10s`) and as a flag (`--check-interval 10s`). An embedded broker reads
the environment too. Durations are numbers of seconds or texts such as `500ms`, `8min`, `72h`, `7d`; sizes are bytes or
texts such as `4MiB`; switches are `on` or `off`. An unknown name or a value out of range stops the start with
`BAD_SETTING`.

"""
_ERRORS = """\
For programmers and operators. At the end you know what a code means, and what to do about it.

Each row and each call has one code as its result. The same names appear in exceptions, in results of the command line,
in logs and, as the number, on the wire. The class of the exception says what the caller can do next.

## Results that are no error

"""
_COMMANDS = """\
For everybody at a terminal. At the end you know each command, its options and exit codes.

Every command that lists has `--json` with stable keys (times end in `_us`: microseconds since 1970). Commands that use
a broker take `--url` or `ESCROWMQ_URL`: `escrow://HOST:PORT[,HOST:PORT...]` (the brokers of one shard with `|` between
them, in quotes: `'escrow://a|b'`), or `file:FOLDER` for a data folder that no other process has open. Results go to
standard output, everything else to standard error.

## Exit codes

"""
_BROKER_METRICS = """\
For operators. At the end you know what each metric counts, and which to watch.

`escrowmq serve --metrics HOST:PORT` serves these at `/metrics` in Prometheus' format. `bus.admin.stats()` returns the
same numbers. Watch the first four: how much is undecided, for how long, whether producers answer, and what needs an
operator.

"""
_RELAY_METRICS = """\
## A relay and its table

`escrowmq outbox relay --metrics HOST:PORT` serves these; those of the relay have the label `target`. The rows are
counted at most every five seconds, and are absent while the database is away. Watch `escrowmq_outbox_waiting` and
`escrowmq_relay_lag_seconds`. In your own program:
`escrowmq.outbox.relay.metrics.collector(target, lambda: relay.statistics, relay.backlog)`.

"""
_COMPENSATION_METRICS = """\
## A compensation's scheduler

`escrowmq compensate run NAME --metrics HOST:PORT` serves these ([docs/compensation.md](../compensation.md)), with the
label `compensation`: its name. Watch `suspended`, `cases` and `idle`. In your own program:
`compensation.statistics.collector(name, lambda: scheduler.statistics)`.

"""
_SWEEP_METRICS = """\
## Sweeps on a schedule

`escrowmq sweep --every TIME --metrics HOST:PORT` serves these ([docs/sweeps.md](../sweeps.md)). Watch `waiting` and
`broken_off`.

"""
_AUDIT_METRICS = """\
## Repeated audits

`escrowmq audit FOLDER --watch TIME --metrics HOST:PORT` serves these ([docs/audit.md](../audit.md#repeated-audits)).
Watch `wrong_ids` and the age of `completed_seconds`.

"""


def settings_page() -> str:
    """Render ``docs/reference/settings.md``: every setting of a broker."""
    rows = [
        (f"`{line.name}`", f"`{line.default_text}`", _format_range(line.unit, line.least, line.choices), line.reason)
        for line in lines()
    ]
    heads = ("setting", "default", "values", "what it bounds or decides, and why")
    return f"# Settings of a broker\n\n{_MADE}{_SETTINGS}{_table(heads, rows)}"


def errors_page() -> str:
    """Render ``docs/reference/errors.md``: every code, by the caller's options."""
    fine = [(f"`{c.name}`", str(int(c)), c.sentence) for c in sorted(Code) if c.branch is None]
    parts = [f"# Results and errors\n\n{_MADE}{_ERRORS}{_table(('code', 'number', 'meaning'), fine)}"]
    for branch in EscrowError.__subclasses__():  # in the order of errors.py
        rows = [(f"`{c.name}`", str(int(c)), c.sentence, c.hint) for c in Code if c.branch is branch]
        doc = (branch.__doc__ or "").replace("``", "`")
        status = next(status for status in Exit if status.branch is branch)
        table = _table(("code", "number", "what happened", "what to do"), rows)
        parts.append(f"## `{branch.__name__}`\n\n{doc} Exit code of the command line: {status:d}.\n\n{table}")
    return "\n".join(parts)


def command_line_page() -> str:
    """Render ``docs/reference/command-line.md``: every command with its options, and the exit codes."""
    import typer.main

    from escrowmq.cli.main import app

    codes = _table(("code", "meaning"), [(f"{c:d}", c.meaning) for c in Exit])
    parts = [f"# The command line\n\n{_MADE}{_COMMANDS}{codes}"]
    for name, command in _commands(typer.main.get_command(app), "escrowmq"):
        if not command.hidden:
            parts.append(f"## `{name}`\n\n{_first_paragraph(command)}" + _parameters(command))
    return "\n".join(parts)


def metrics_page() -> str:
    """Render ``metrics.md``: every metric of a broker, a relay and its table, and a compensation."""
    from escrowmq.broker.serving.metrics import COUNTER, LABELLED, METRICS
    from escrowmq.compensation.statistics import METRICS as COMPENSATION
    from escrowmq.compensation.statistics import metric_name
    from escrowmq.outbox.relay.metrics import BACKLOG
    from escrowmq.outbox.relay.metrics import METRICS as RELAY
    from escrowmq.pipeline.audit.watching import METRICS as AUDITS
    from escrowmq.pipeline.sweeps.schedule import METRICS as SWEEPS

    def name(text: str, kind: str) -> str:
        return f"`{text}{'_total' if kind == COUNTER else ''}`"

    rows = [(name(f"escrowmq_{one.name}", one.kind), one.kind, one.meaning) for one in METRICS]
    labelled = [
        (name(f"escrowmq_{one.name}", one.kind), ", ".join(one.labels), one.kind, one.meaning) for one in LABELLED
    ]
    repaired = [(name(metric_name(number), kind), kind, text) for number, (kind, text) in COMPENSATION.items()]
    swept = [(name(f"escrowmq_sweep_{number}", kind), kind, text) for number, (kind, text) in SWEEPS.items()]
    audited = [(name(f"escrowmq_audit_{number}", kind), kind, text) for number, (kind, text) in AUDITS.items()]
    relayed = [(name(f"escrowmq_relay_{number}", kind), kind, text) for number, (kind, text) in RELAY.items()]
    relayed += [(f"`escrowmq_outbox_{number}`", "gauge", text) for number, text in BACKLOG.items()]
    heads = ("metric", "kind", "meaning")
    of_each = "## Of each topic and group\n\nOnly at `/metrics`.\n\n"
    parts = [
        "# Metrics\n\n" + _MADE + _BROKER_METRICS + _table(heads, rows),
        of_each + _table(("metric", "labels", "kind", "meaning"), labelled),
        _RELAY_METRICS + _table(heads, relayed),
        _COMPENSATION_METRICS + _table(heads, repaired),
        _SWEEP_METRICS + _table(heads, swept),
        _AUDIT_METRICS + _table(heads, audited),
    ]
    return "\n".join(parts)


def protocol_page() -> str:
    """Render ``docs/reference/protocol.md``: every call of a broker, and its encoding."""
    parts = [
        "# The protocol\n\n"
        + _MADE
        + "For authors of clients. At the end you know each request of the protocol, its fields and its answer.\n\n"
        + "What a client can ask of a broker. `?` marks fields that may be left out of a request, and those that are "
        "not in every\n"
        "answer. A null in a request is the same as no field; names that a broker does not know are passed over.\n\n"
        + (frames.__doc__ or "").replace("``", "`")
        + "\n## Exchanges\n\n"
    ]
    for kind in wire.Exchange:
        columns = [("request", _columns(wire.REQUEST[kind])), ("answer", _columns(wire.ANSWER[kind]))]
        parts.append(f"### `{kind}`\n\n" + _table(("", "columns"), columns) + _fields("option", wire.OPTIONS[kind]))
    checks = [("answer", _columns(schemas.CHECKS))]
    parts.append("### Checks\n\nWhat a watch is sent.\n\n" + _table(("", "columns"), checks))
    parts.append(f"## Reads\n\n{_format_doc(wire.ReadRequest)}" + _fields("request", wire.ReadRequest))
    parts.append("## Actions\n")
    for action in ACTIONS.values():
        also = " A data folder without a broker answers it, too." if action.reads_only else ""
        fields = _fields("request", action.request) + _fields("answer", action.answer)
        parts.append(f"### `{action.name}`\n\n{action.sentence}{also}\n{fields}")
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


PAGES: dict[str, Callable[[], str]] = {
    "settings.md": settings_page,
    "errors.md": errors_page,
    "command-line.md": command_line_page,
    "metrics.md": metrics_page,
    "protocol.md": protocol_page,
}
"""Page name and the function that renders it."""


def write(folder: Path) -> None:
    """Write every page into ``folder``."""
    for name, make in PAGES.items():
        (folder / name).write_text(make())


def _format_range(unit: str, least: float, choices: tuple[str, ...]) -> str:
    if choices:
        return " or ".join(f"`{choice}`" for choice in choices)
    if unit == settings.FLAG:
        return "switch"
    return f"{unit}, at least {least:g}" if least else unit


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Render a Markdown table."""
    made = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |\n" for row in made)


def _format_doc(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "").replace("``", "`") + "\n"


def _columns(schema: Any) -> str:
    return ", ".join(f"`{column.name}` {column.type}" for column in schema) or "none"


def _fields(heading: str, shape: Any) -> str:
    """Render a table of the fields of an object, with those of nested objects."""
    rows = list(_field_rows(shape, ""))
    return "\n" + _table((heading, "type", "meaning"), rows) if rows else ""


def _field_rows(shape: Any, inside: str) -> Iterator[tuple[str, str, str]]:
    for field in fields_of(shape):
        value, name = field.value, inside + field.name
        entry = value.items[0] if value.items else value
        yield f"`{name}`{'' if field.required else ' ?'}", _describe_type(value), value.meaning
        yield from _field_rows(entry.kind, f"{name}{'[]' if value.items else ''}.")


def _describe_type(value: Value) -> str:
    """Describe the type of a value in words, with the bounds of a number."""
    least, most = value.bounds.least, value.bounds.most
    if value.choices:
        *others, last = (f"`{choice}`" for choice in value.choices)
        shown = f"{', '.join(others)} or {last}" if others else last
    elif get_origin(value.kind) is tuple:
        shown = f"list of {len(value.items)}"
    elif value.items:
        shown = f"list of {_describe_type(value.items[0])}s".replace("list of 2s", "pairs")
    else:
        shown = _KINDS.get(value.kind, "object")
    if value.kind is int and value.bounds != Bounds():
        shown += f", {least:,} or more" if most == LARGEST_NUMBER else f", {least:,} to {most:,}"
    return shown + (" or null" if value.null else "")


_KINDS = {int: "integer", float: "number", str: "text", bool: "true or false"}


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Iterate over all commands below ``command``, in the order of definition."""
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for child in children:
        yield from _commands(children[child], f"{name} {child}")


def _first_paragraph(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split()) + "\n"


def _parameters(command: Any) -> str:
    """Render a table of arguments and options; the flags of settings are on their own page."""
    named = {line.name for line in lines()}
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or (command.name == "serve" and parameter.name in named):
            continue
        argument = parameter.param_type_name == "argument"
        names = [parameter.name.upper()] if argument else [*parameter.opts, *parameter.secondary_opts]
        meaning = " ".join((parameter.help or "").replace("\\[", "[").split())
        rows.append((", ".join(f"`{name}`" for name in names), meaning))
    text = "\n" + _table(("argument or option", "meaning"), rows) if rows else ""
    return text + ("\nEvery line of [settings.md](settings.md) is a flag too.\n" if command.name == "serve" else "")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
