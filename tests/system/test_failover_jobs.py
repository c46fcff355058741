"""The jobs of operators go on while the leader of their shard is struck: see failover_jobs.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from failover_jobs import Jobs
from failover_shard import Shard, one_node
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from test_failover_clients import Roles

from escrowmq import tracing
from escrowmq.client.links import presence
from escrowmq_lab.servers.seam import Absent


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A take-over may last as long as the machine wants: the overview names nobody as missing meanwhile."""
    monkeypatch.setattr(presence, "TAKE_OVER_SECONDS", 240.0)


@contextmanager
def traced() -> Iterator[InMemorySpanExporter]:
    """All that this process sends and receives has spans."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.instrument(provider)
    try:
        yield exporter
    finally:
        tracing.uninstrument()


def test_jobs_go_on_when_the_leader_is_cut_off(tmp_path: Path) -> None:
    """Over two brokers in this process and a Kafka in memory."""
    roles = Roles(tmp_path / "brokers")
    try:
        Jobs(roles.list, tmp_path / "jobs").run(roles.cut_off)
    finally:
        roles.close()


@pytest.mark.long
@pytest.mark.timeout(0)
def test_jobs_go_on_when_the_leader_is_killed(tmp_path: Path) -> None:
    """Over two processes and a real Kafka; the killed one comes back as a standby. What the jobs do is traced."""
    try:
        with ExitStack() as stack:
            place = stack.enter_context(one_node(tmp_path / "kafka"))
            shard = Shard(tmp_path / "brokers", place, "ab", stack, proxied=False)

            def strike() -> None:
                leader = shard.settle()
                leader.kill()
                leader.start()

            spans = stack.enter_context(traced())
            Jobs(shard.url, tmp_path / "jobs").run(strike)
            assert spans.get_finished_spans()
    except Absent as problem:
        pytest.skip(str(problem))
