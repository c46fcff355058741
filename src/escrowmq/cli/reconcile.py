"""``escrowmq reconcile``: which ids were announced and never committed, with Spark."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import Json, Master, Url, seconds
from escrowmq.cli.printing import console, moment, notice, print_facts, print_json, print_json_line, print_table
from escrowmq.errors import Code, error

if TYPE_CHECKING:
    from escrowmq.pipeline.reconcile import Report, Side


def reconcile(
    url: Url,
    half: Annotated[str, typer.Option("--half", help="The topic of the announced ids, or the view %half.")],
    commits: Annotated[str, typer.Option("--commits", help="The topic of what was committed.")],
    id: Annotated[str, typer.Option("--id", help="Where a message's id is: key, body, message_id.")] = "key",
    half_id: Annotated[
        str | None, typer.Option("--half-id", help="The same for --half, where it is another there.")
    ] = None,
    content: Annotated[bool, typer.Option("--content", help="Compare bodies, too.")] = False,
    grace: Annotated[
        str, typer.Option("--grace", metavar="TIME", help="So long after it was announced an id may be without commit.")
    ] = "10min",
    settled_before: Annotated[
        str | None,
        typer.Option("--settled-before", metavar="TIME", help="Instead of --grace: a time, 2026-01-31T12:00:00Z."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Findings to name; --out has all.")] = 100,
    out: Annotated[
        str | None, typer.Option("--out", metavar="DIR", help="Write all findings (Parquet) and report.json there.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Go on, and tell what is found as it is.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="DIR", help="With --stream: where it remembers how far it is.")
    ] = None,
    out_topic: Annotated[
        str | None,
        typer.Option("--out-topic", help="With --stream: the topic for findings, each once. Without it: printed."),
    ] = None,
    lateness: Annotated[
        str, typer.Option("--lateness", metavar="TIME", help="With --stream: how far topics may be apart in reading.")
    ] = "1min",
    once: Annotated[bool, typer.Option("--once", help="With --stream: end with what is there now.")] = False,
    master: Master = None,
    json: Json = False,
) -> None:
    """Compare the ids of two topics: announced and never committed, committed and never announced, with other content.

    Exit code 1 if there is a difference.
    """
    from escrowmq.pipeline.failures import unwrap_errors
    from escrowmq.pipeline.reconcile import read_side
    from escrowmq.pipeline.reconcile import reconcile as compare
    from escrowmq.pipeline.session import local_session

    if stream and checkpoint is None:
        raise error(Code.BAD_ARGUMENT, "--stream needs --checkpoint", "a folder; the same one goes on where it stopped")
    if misplaced := [
        name
        for name, given in (("--checkpoint", checkpoint), ("--out-topic", out_topic), ("--once", once))
        if given and not stream
    ]:
        raise error(Code.BAD_ARGUMENT, f"{misplaced[0]} is of --stream")
    checkpoint, out = _absolute(checkpoint), _absolute(out)
    grace_seconds, lateness_seconds = seconds(grace, "--grace") or 0.0, seconds(lateness, "--lateness") or 0.0
    before = _before(settled_before, grace_seconds)
    with local_session("escrowmq reconcile", master=master) as spark, unwrap_errors():
        sides = [
            read_side(spark, url, topic, kind, content=content, stream=stream)
            for topic, kind in ((half, half_id or id), (commits, id))
        ]
        if stream:
            assert checkpoint is not None
            return _stream(sides, grace_seconds, lateness_seconds, checkpoint, url, out_topic, once)
        report = compare(*sides, settled_before=before, out=out, most=limit)
    if json:
        print_json(report.to_json())
    else:
        _show(report)
    if not report.agrees:
        raise typer.Exit(Exit.FINDING)


def _absolute(folder: str | None) -> str | None:
    """A folder of this machine by its full name (Java may run elsewhere); ``hdfs://...`` and the like as they are."""
    return folder if folder is None or "://" in folder else str(Path(folder).absolute())


def _before(text: str | None, grace_seconds: float) -> datetime:
    if text is None:
        return datetime.now(UTC) - timedelta(seconds=grace_seconds)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise error(Code.BAD_ARGUMENT, f"--settled-before: {text!r}", "such as 2026-01-31T12:00:00Z") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _stream(
    sides: list[Side],
    grace_seconds: float,
    lateness_seconds: float,
    checkpoint: str,
    url: str,
    topic: str | None,
    once: bool,
) -> None:
    from escrowmq.pipeline.reconcile import start, stream_findings
    from escrowmq.pipeline.reconcile.streaming import as_rows

    def tell(found: Side, _batch: int) -> None:
        for row in as_rows(found).toLocalIterator():
            print_json_line(row.asDict())

    found = stream_findings(*sides, grace_seconds=grace_seconds, lateness_seconds=lateness_seconds)
    each = tell if topic is None else None
    query = start(found, checkpoint=checkpoint, url=url, topic=topic, each=each, once=once)
    notice("reconciling; Ctrl-C ends it" if not once else "reconciling what is there")
    try:
        query.awaitTermination()
    finally:
        query.stop()


def _show(report: Report) -> None:
    rows = [
        (one.kind, one.id, one.halves, one.commits, moment(one.first_seen_us), moment(one.last_seen_us))
        for one in report.named
    ]
    if rows:
        print_table(("kind", "id", ">half", ">commits", "first seen", "last seen"), rows, "")
    counts = {kind: getattr(report, kind) for kind in ("missing", "unexpected", "differing", "nameless")}
    rows_read = {"half rows": report.half_rows, "commit rows": report.commit_rows}
    print_facts({"ids": report.ids, **rows_read, **counts, "settled before": report.settled_before})
    if report.agrees:
        console().print("[green]both sides agree[/green]")
