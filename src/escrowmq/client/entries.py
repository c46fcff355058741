"""Entries of the listings of :class:`~escrowmq.client.admin.Admin`: the protocol's fields, and the broker that each
comes from."""

from __future__ import annotations

from typing import Annotated, TypedDict

from escrowmq.wire.actions import (
    acts,
    brokers,
    dead_letters,
    groups,
    messages,
    producers,
    rights,
    standing,
    topics,
    transactions,
    writers,
)


class AtBroker(TypedDict):
    """The broker of an entry."""

    broker: Annotated[str, "address of the broker"]


class Topic(topics.Topic, AtBroker):
    """One topic at one broker."""


class AlteredTopic(topics.Altered, AtBroker):
    """A topic's own settings at one broker."""


class DeletedTopic(topics.Deleted, AtBroker):
    """Losses of a topic's deletion at one broker, real or previewed."""


class Queue(topics.QueueOffsets, AtBroker):
    """Where one queue of a topic begins and ends."""

    shard: Annotated[int, "number of the broker's shard"]


class Group(groups.Group, AtBroker):
    """One consumer group at one broker."""


class AlteredGroup(groups.Subscription, AtBroker):
    """The subscription of a consumer group at one broker."""


class MovedGroup(groups.Moved, AtBroker):
    """Where a consumer group continues in one queue of one broker."""


class PausedGroup(groups.Paused, AtBroker):
    """The pause of a consumer group at one broker."""


class LimitedGroup(groups.Limited, AtBroker):
    """The limits of a consumer group at one broker."""


class DeletedGroup(groups.Deleted, AtBroker):
    """Losses of a consumer group's deletion at one broker."""


class Member(groups.Member, AtBroker):
    """One member of a consumer group at one broker."""


class Producer(producers.Producer, AtBroker):
    """One producer group at one broker."""


class AlteredProducers(producers.Altered, AtBroker):
    """A producer group's own settings at one broker."""


class Writer(writers.WriterListed, AtBroker):
    """One writer of numbered batches at one broker."""


class ForgottenWriter(writers.Forgotten, AtBroker):
    """A writer that one broker has forgotten."""


class Transaction(transactions.Transaction, AtBroker):
    """One transaction of a listing."""


class Message(messages.MessageFields):
    """A stored message."""

    body: bytes


class FoundMessage(Message, messages.Standing, AtBroker):
    """A message that was looked up."""


class TransactionDetails(transactions.Details):
    """One transaction in full."""

    messages: list[Message]


class UndecidedTransactions(transactions.OfGroup, AtBroker):
    """Undecided transactions of a producer group at one broker, by cause."""


class DeadLetter(dead_letters.DeadLetter, AtBroker):
    """One dead letter at one broker."""


class DeadLettersSummary(dead_letters.OfGroupSummary, AtBroker):
    """The dead letters of one group at one broker, by cause."""


class Health(brokers.Health, AtBroker):
    """Whether one broker works."""


class Hello(brokers.Hello, AtBroker):
    """One broker's description of itself."""


class SteppedDown(brokers.SteppedDown, AtBroker):
    """A broker that handed over."""


class Act(acts.Act, AtBroker):
    """An operator action at one broker."""


class VerifiedActs(acts.Verified, AtBroker):
    """The verification of one broker's record of operator actions."""


class AllStands(standing.Standings, AtBroker):
    """The state of everything at one broker."""


class MessageStands(standing.OfMessage, AtBroker):
    """Where one message stands at one broker."""


class WhoAmI(rights.WhoAmI, AtBroker):
    """The caller, as one broker knows it."""


class Denials(rights.Denials, AtBroker):
    """Denied calls at one broker."""


class ReloadedRights(rights.Reloaded, AtBroker):
    """A broker that has read its rights file again."""
