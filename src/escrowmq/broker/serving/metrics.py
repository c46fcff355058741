"""Metrics in Prometheus' format: one table with the meaning of each, from the numbers of the ``stats`` action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from escrowmq.broker.reads.standing import Standing

COUNTER = "counter"
GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric. ``source`` is the name of its number in the ``stats`` action; exported as ``escrowmq_<name>``."""

    name: str
    kind: str
    meaning: str
    source: str


METRICS: tuple[MetricSpec, ...] = (
    # The four that operators miss.
    MetricSpec("half_messages_open", GAUGE, "undecided transactions that will be asked about", "open_half_messages"),
    MetricSpec("half_message_oldest_seconds", GAUGE, "age of the oldest undecided one", "oldest_half_age_seconds"),
    MetricSpec(
        "checks_unanswered", GAUGE, "questions to producers that are asked and not answered", "checks_unanswered"
    ),
    MetricSpec("transactions_parked", GAUGE, "undecided after the last question: waiting for a person", "parked"),
    # What went through.
    MetricSpec("messages", COUNTER, "plain messages stored", "messages_total"),
    MetricSpec("half_messages", COUNTER, "half messages stored", "half_messages_total"),
    MetricSpec("transactions_committed", COUNTER, "transactions committed", "committed_total"),
    MetricSpec("transactions_rolled_back", COUNTER, "transactions rolled back", "rolled_back_total"),
    MetricSpec("transactions_expired", COUNTER, "transactions that left undecided by retention", "expired_total"),
    MetricSpec("checks_asked", COUNTER, "questions to producers", "checks_asked_total"),
    MetricSpec(
        "checks_answered_unknown",
        COUNTER,
        "questions answered UNKNOWN since the start: the checker does not know, raised, or gave no outcome",
        "checks_answered_unknown_total",
    ),
    MetricSpec("transactions_parked_ever", COUNTER, "transactions that were parked, once or more", "parked_total"),
    MetricSpec("messages_delivered", COUNTER, "messages leased to consumers, repeats counted", "delivered_total"),
    MetricSpec("messages_acknowledged", COUNTER, "messages acknowledged by consumers", "acked_messages_total"),
    # What it holds.
    MetricSpec("delayed_messages", GAUGE, "messages whose time has not come", "delayed_waiting"),
    MetricSpec("dedup_runs", GAUGE, "runs of message ids remembered for de-duplication", "dedup_runs"),
    MetricSpec("writers", GAUGE, "writers of numbered batches (Spark queries) remembered", "writers"),
    MetricSpec("topics", GAUGE, "topics", "topics"),
    MetricSpec("producer_groups", GAUGE, "producer groups", "producer_groups"),
    MetricSpec("producer_sessions", GAUGE, "producer sessions remembered, connected or not", "producer_sessions"),
    MetricSpec(
        "log_damaged_frames",
        GAUGE,
        "damaged places in the log that were met and are not put right",
        "log_damaged_frames",
    ),
    # Access rights (docs/security.md); 0 without a rights file.
    MetricSpec("denied", COUNTER, "calls denied for lack of a right", "denied_total"),
    MetricSpec("unauthenticated", COUNTER, "greetings without a valid token or certificate", "unauthenticated_total"),
    MetricSpec(
        "rights_reload_failures",
        COUNTER,
        "times that the changed rights file was invalid and the former rights stayed",
        "rights_reload_failures_total",
    ),
    # Its place among several brokers of one shard (docs/failover.md).
    MetricSpec("leads", GAUGE, "1: it leads its shard; 0: it follows", "leads"),
    MetricSpec("log_epoch", GAUGE, "how often the log was opened, as far as it has followed it", "log_epoch"),
    MetricSpec(
        "log_silent_seconds",
        GAUGE,
        "since it heard of the leader, of one that follows; -1: nobody leads",
        "log_silent_seconds",
    ),
    MetricSpec("take_overs", COUNTER, "times that it took the lead since it was started", "take_overs_total"),
    # How it works.
    MetricSpec("rounds", COUNTER, "rounds of the writer: at most one sync each", "rounds_total"),
    MetricSpec("log_bytes", COUNTER, "bytes appended to the log since the start", "log_bytes_total"),
    MetricSpec("log_stored_bytes", GAUGE, "bytes of the log on the disk", "log_stored_bytes"),
    MetricSpec("disk_free_bytes", GAUGE, "bytes that are free on its disk", "disk_free_bytes"),
    MetricSpec("log_position", GAUGE, "position that the next row gets", "log_position"),
    MetricSpec("waiting_requests", GAUGE, "requests that wait for the writer", "waiting_requests"),
    MetricSpec("waiting_bytes", GAUGE, "bytes of those", "waiting_bytes"),
    MetricSpec("connections", GAUGE, "connections of clients", "connections"),
    MetricSpec("connections_ever", COUNTER, "connections of clients, ever", "connections_total"),
    MetricSpec("requests", COUNTER, "requests of clients", "requests_total"),
    MetricSpec("received_bytes", COUNTER, "bytes that clients sent", "received_bytes_total"),
    MetricSpec("sent_bytes", COUNTER, "bytes that were sent to clients", "sent_bytes_total"),
    MetricSpec("parked_receives", GAUGE, "receives that wait for messages", "parked_receives"),
)


@dataclass(frozen=True, slots=True)
class LabelledSpec:
    """One metric of each topic or group. ``of``: a kind of :func:`~escrowmq.broker.reads.standing.standing`,
    ``source`` its number."""

    name: str
    kind: str
    meaning: str
    of: str
    source: str

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the metric's labels."""
        return LABELS[self.of]


LABELS = {"topic": ("topic",), "consumer": ("group", "topic"), "producer": ("group",)}

LABELLED: tuple[LabelledSpec, ...] = (
    LabelledSpec(
        "consumer_lag_messages",
        GAUGE,
        "messages that a group has not done, leased ones and repeats to come included",
        "consumer",
        "lag",
    ),
    LabelledSpec("consumer_lag_seconds", GAUGE, "since the oldest of these was stored", "consumer", "lag_seconds"),
    LabelledSpec("consumer_leased", GAUGE, "messages that consumers of a group hold", "consumer", "leased"),
    LabelledSpec("consumer_retrying", GAUGE, "messages of a group that come again", "consumer", "retrying"),
    LabelledSpec("consumer_dead_letters", GAUGE, "dead letters of a group: they wait for a person", "consumer", "dead"),
    LabelledSpec("consumer_paused", GAUGE, "1: nothing of the topic is handed to the group", "consumer", "paused"),
    LabelledSpec("producer_open", GAUGE, "undecided transactions of a producer group", "producer", "open"),
    LabelledSpec("producer_oldest_seconds", GAUGE, "age of the oldest of these", "producer", "oldest_seconds"),
    LabelledSpec(
        "producer_parked",
        GAUGE,
        "parked transactions of a producer group: they wait for a person",
        "producer",
        "parked",
    ),
    LabelledSpec(
        "producer_connected", GAUGE, "processes of a producer group that can be asked", "producer", "connected"
    ),
    LabelledSpec("topic_stored_messages", GAUGE, "messages of a topic that are stored", "topic", "stored"),
    LabelledSpec("topic_messages", COUNTER, "messages of a topic that were ever visible", "topic", "end"),
)
"""Their number is bounded as groups and topics are: ``max_groups``, ``max_topics``."""

Stand = Mapping[str, Sequence[Standing]]


class BrokerCollector(Collector):
    """Asks the broker for its numbers whenever Prometheus asks for metrics."""

    def __init__(self, stats: Callable[[], Mapping[str, float]], stand: Callable[[], Stand] | None = None) -> None:
        self._stats = stats
        self._stand = stand

    def collect(self) -> Iterator[Metric]:
        """Request the broker's numbers, and yield :data:`METRICS` and :data:`LABELLED` as far as it gave them."""
        numbers = self._stats()
        for spec in METRICS:
            if spec.source in numbers:
                family = CounterMetricFamily if spec.kind == COUNTER else GaugeMetricFamily
                yield family(f"escrowmq_{spec.name}", spec.meaning, value=numbers[spec.source])
        stand = self._stand() if self._stand is not None else {}
        for labelled in LABELLED if stand else ():
            family = CounterMetricFamily if labelled.kind == COUNTER else GaugeMetricFamily
            metric = family(f"escrowmq_{labelled.name}", labelled.meaning, labels=labelled.labels)
            for one in stand[labelled.of]:
                metric.add_metric([one.labels[label] for label in labelled.labels], one.numbers[labelled.source])
            yield metric

    def describe(self) -> Iterator[Metric]:
        """Return no metrics, so that registering the collector sends no request to the broker."""
        return iter(())


def registry(stats: Callable[[], Mapping[str, float]], stand: Callable[[], Stand] | None = None) -> CollectorRegistry:
    """Return a Prometheus registry with the broker's metrics alone: those of the program around an embedded broker are
    left out."""
    own = CollectorRegistry(auto_describe=False)
    own.register(BrokerCollector(stats, stand))
    return own
