"""Actions about the broker itself."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version

from escrowmq.broker.actions.answering import answers
from escrowmq.broker.reads.readable import Readable
from escrowmq.broker.writer.engine import Engine
from escrowmq.errors import Code, error
from escrowmq.settings import BrokerSettings
from escrowmq.wire import PROTOCOL_VERSION
from escrowmq.wire.actions import brokers
from escrowmq.wire.actions.action import Nothing

_VERSION = version("escrowmq")  # read once: it lies in a file, and there may be no descriptor left for it
SHOWN_PLACES = 3
"""Places of damage that ``health`` names."""


@answers(brokers.HELLO)
def _hello(engine: Readable, _: Nothing) -> brokers.Hello:
    return described(engine.settings, engine.log.shard, engine.log.epoch, engine.clock.now_us())


def described(of: BrokerSettings, shard: int, epoch: int, time_us: int) -> brokers.Hello:
    """Return the answer to ``hello``: protocol, version, shard, how often its log was opened (``epoch``), the broker's
    time (microseconds), and the limits among the settings ``of``."""
    settings = dataclasses.asdict(of)
    return {
        "protocol": PROTOCOL_VERSION,
        "version": _VERSION,
        "shard": shard,
        "epoch": epoch,
        "time_us": time_us,
        "limits": {name: settings[name] for name in settings if name.startswith("max_") or name == "half_retention"},
    }


@answers(brokers.HEALTH)
def _health(engine: Readable, _: Nothing) -> brokers.Health:
    failure = engine.shard.failure
    shard, places = engine.shard, engine.log.damages()
    reason = failure.message if failure else f"{shard.full_because}: messages are refused" if shard.full else ""
    if engine.status != "damaged":
        return {"status": engine.status, "reason": reason}
    more = f"; and {len(places) - SHOWN_PLACES:,} more frames" if len(places) > SHOWN_PLACES else ""
    return {"status": "damaged", "reason": "; ".join(map(str, places[:SHOWN_PLACES])) + more}


@answers(brokers.STATS)
def _stats(engine: Engine, _: Nothing) -> dict[str, float]:
    """Return the metrics of this broker, a number by name; ``serving/metrics.py`` has their meanings."""
    numbers: dict[str, float] = engine.look(lambda: engine.shard.ledger.stats(engine.clock.now_us())).result()
    requests, size = engine.waiting
    return {
        **numbers,
        "checks_unanswered": engine.listeners.unanswered,
        "checks_answered_unknown_total": engine.listeners.answered_unknown,
        "waiting_requests": requests,
        "waiting_bytes": size,
        "parked_receives": engine.receiving(),
        "rounds_total": engine.rounds,
        "log_bytes_total": engine.log.bytes_written,
        "log_stored_bytes": engine.log.stored_bytes(),
        "disk_free_bytes": engine.log.free_bytes(),
        "log_position": engine.log.next_position,
        "log_damaged_frames": len(engine.log.damages()),
        "leads": 1.0,
        "log_epoch": engine.log.epoch,
        "log_silent_seconds": 0.0,
        "take_overs_total": 1.0,
    }


@answers(brokers.STEP_DOWN)
def _step_down(engine: Engine, _: brokers.StepDown) -> brokers.SteppedDown:
    """Raise Rejected(BAD_REQUEST): a broker that has its log for itself cannot hand it over. A node of a replicated log
    answers this action itself (``replicas/door.py``)."""
    raise error(
        Code.BAD_REQUEST,
        "this broker has its log for itself: there is nobody to hand over to",
        "a node of a log on Kafka has others: serve --log",
    )
