"""Write the folders and requests of the version that is installed; for a version that nobody has yet.

``python tests/upgrade/version_writer.py VERSION`` writes into ``golden/VERSION``: ``start`` (a new folder),
``requests.jsonl`` (what its client asks of the broker on it, one call per line, with the answers), ``crashed`` and
``closed`` (the folder as a crash and as an orderly end leave it), ``crashed.json`` and ``closed.json`` (what the
version itself lists of them), and ``settings.json`` (the broker's settings).
"""

import base64
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

import escrowmq as mq
from escrowmq.client.bus import Bus
from escrowmq.connecting import links
from escrowmq.schemas import SETTLING
from escrowmq.wire import BatchStream, Exchange, ParcelsByExchange

SETTINGS = {
    "retention": 3.0e8,
    "half_retention": 1.0e8,
    "retry_backoff": 0.01,
    "transaction_timeout": 1.0e6,
    "lease_seconds": 1.0e6,
    "compression": "none",
    "segment_bytes": 65536,
    "snapshot_frames": 20,
}
NOTHING = pa.RecordBatch.from_pylist([], schema=pa.schema([]))


def text_of(batch: pa.RecordBatch) -> str:
    """A batch as one line of text."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue().to_pybytes()).decode()


class Recording(ParcelsByExchange):
    """A link that writes down what goes over it."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.lines: list[dict[str, Any]] = []
        self.address, self.close, self.watch = link.address, link.close, link.watch

    def exchange(self, kind: Exchange, batch: pa.RecordBatch, options: dict[str, Any]) -> Any:
        future = self._link.exchange(kind, batch, options)
        line = {"exchange": str(kind), "options": dict(options), "batch": text_of(batch)}
        self.lines.append({**line, "answer": text_of(future.result())})
        return future

    def action(self, name: str, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        line: dict[str, Any] = {"action": name, "request": json.loads(json.dumps(request))}
        self.lines.append(line)
        try:
            answer: dict[str, Any] = self._link.action(name, request, timeout)
        except mq.EscrowError as problem:
            line["error"] = problem.code.name
            raise
        line["answer"] = json.loads(json.dumps(answer))
        return answer

    def read(self, request: dict[str, Any]) -> BatchStream:
        table = self._link.read(request).read_all()
        batch = pa.RecordBatch.from_struct_array(table.to_struct_array().combine_chunks())
        self.lines.append({"read": dict(request), "answer": text_of(batch)})
        return self._link.read(request)


def use(bus: mq.Bus, link: Recording) -> None:
    """Every kind of message, decision, delivery and listing, in one order."""
    bus.admin.create_topic("orders", 4)
    bus.admin.create_topic("points", 2)
    plain = bus.producer("plain", instance="p1")
    for n in range(8):
        tag = "paid" if n % 2 else "free"
        plain.send(
            "orders", b"plain-%d" % n, key=f"k-{n % 5}", tag=tag, properties={"n": str(n)}, message_id=f"plain-{n}"
        )
    plain.send("orders", b"late", delay=2.0e6, message_id="late")
    shop = bus.producer("shop", instance="s1", checker=lambda check: mq.UNKNOWN)
    for n in range(6):
        transaction = shop.transaction()
        transaction.send("orders", b"half-%d" % n, key=f"h-{n}", message_id=f"half-{n}")
        transaction.send("points", b"points-%d" % n, message_id=f"points-{n}")
        (transaction.commit, transaction.rollback, transaction.leave_undecided)[n % 3]()
    query = bus.producer("query", instance="q", checker=lambda check: mq.UNKNOWN)
    receipt = query.prepare("points", b"batch-7", message_id="batch-7")
    query.commit_batch("query-1", 7, [receipt.transaction_id])
    consume(link)
    try:
        bus.admin.create_topic("orders", 4)
    except mq.Rejected:
        pass
    listed(bus)


def consume(link: Recording) -> None:
    """Deliveries to a plain group and to one that holds what is in doubt."""
    link.action("groups.subscribe", {"group": "cart", "topics": ["orders"], "max_attempts": 1}, 10)
    receive = {"group": "cart", "member": 1, "max_messages": 5, "wait_ms": 0}
    for act in (0, 0, 1, 2):  # ACK, ACK, NACK (then a dead letter), EXTEND
        leased = link.exchange(Exchange.RECEIVE, NOTHING, receive).result()
        if leased.num_rows:
            rows = [
                {
                    "lease": lease,
                    "start": offset,
                    "count": 1,
                    "act": act,
                    "delay_us": 0 if act < 2 else 10**12,
                    "cause": "bad" if act == 1 else None,
                }
                for lease, offset in zip(leased["lease"].to_pylist(), leased["offset"].to_pylist(), strict=True)
            ]
            link.exchange(Exchange.SETTLE, pa.RecordBatch.from_pylist(rows, schema=SETTLING), {"group": "cart"})
    link.action("groups.subscribe", {"group": "held", "topics": ["points"], "in_doubt": "hold"}, 10)
    joined = link.action(
        "groups.join", {"group": "held", "instance": "one", "process": 5, "resume": False, "keep": []}, 10
    )
    link.exchange(Exchange.RECEIVE, NOTHING, {"group": "held", "max_messages": 2, "wait_ms": 0, **joined})


def listed(bus: mq.Bus) -> dict[str, Any]:
    """What a folder holds, as its broker lists it."""
    admin = bus.admin
    found: dict[str, Any] = {
        "topics": admin.topics(),
        "groups": admin.groups(),
        "members": admin.members("held"),
        "producers": admin.producers(),
        "writers": admin.writers(),
        "transactions": admin.transactions(),
        "dead_letters": admin.dead_letters("cart"),
        "offsets": admin.offsets("orders"),
    }
    found = {name: [{**row, "broker": ""} for row in rows] for name, rows in found.items()}
    found["shown"] = [admin.transaction(row["id"])["messages"][0]["topic"] for row in found["transactions"]]
    found["lookup"] = sorted([m["topic"], m["state"], m["body"].decode()] for m in admin.lookup(key="h-2"))
    for view in ("%half", "%op", "%acks"):
        found[view] = admin.read(view).read_all().num_rows
    for topic in ("orders", "points"):
        found[f"bodies of {topic}"] = sorted(body.decode() for body in admin.read(topic).read_all()["body"].to_pylist())
    result: dict[str, Any] = json.loads(json.dumps(found))
    return result


def write(out: Path, work: Path) -> None:
    """All files of one version."""
    live, without_lock = work / "live", shutil.ignore_patterns("lock")
    with mq.connect(f"file:{live}", **SETTINGS) as bus:
        bus.admin.hello()
    shutil.copytree(live, out / "start", ignore=without_lock)
    link = Recording(links(f"file:{live}", dict(SETTINGS))[0])
    with Bus([link]) as bus:  # type: ignore[list-item]
        use(bus, link)
        shutil.copytree(live, out / "crashed", ignore=without_lock)
    shutil.copytree(live, out / "closed", ignore=without_lock)
    for end in ("crashed", "closed"):
        with mq.connect(f"file:{out / end}", read_only=True) as bus:
            described = json.dumps(listed(bus), indent=1, sort_keys=True)
        (out / f"{end}.json").write_text(described + "\n")
    (out / "settings.json").write_text(json.dumps(SETTINGS, indent=1) + "\n")
    lines = [{**line, "answer": line.get("answer")} for line in link.lines]
    (out / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write(Path(__file__).parent / "golden" / sys.argv[1], Path(folder))
