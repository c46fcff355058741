"""The rights that calls need, by way in, and who calls: the matrix tests run over these tables, and compare them with
the registries of the product.
"""

from escrowmq.rights import Need, Principal, Rule, denied
from escrowmq.rights.matrix import ACTIONS, EXCHANGES
from escrowmq.rights.rules import ROLES, rules_of
from escrowmq.wire import VIEWS, Exchange
from escrowmq.wire.actions import table

CALLERS = {
    "nobody": [],
    "other": ["send tx", "produce shopx", "consume gx", "read tx", "act gx"],
    **{role: [str(rule) for rule in rules] for role, rules in ROLES.items()},
}
"""The principals of each way in, with their rules: one without any, one with rights for other names, each role."""
ABSENT = "00000001-f423f-1"
"""A transaction that no broker has."""
NO_SESSION = 999_999

# Per action: a sound request, and the rules that are needed together; empty: it is open to everybody known.
SAMPLES = {
    "hello": ({}, []),
    "health": ({}, []),
    "stats": ({}, ["view"]),
    "step_down": ({"epoch": 1}, ["admin"]),
    "topics.list": ({}, ["view"]),
    "topics.offsets": ({"topic": "t"}, ["read t"]),
    "topics.wait": ({"topic": "t"}, ["read t"]),
    "topics.create": ({"name": "t2"}, ["admin"]),
    "topics.alter": ({"name": "t", "queues": 64}, ["admin"]),
    "topics.delete": ({"name": "gone", "check": True}, ["admin"]),
    "session.open": ({"group": "shop", "instance": "i"}, ["produce shop"]),
    "producers.list": ({}, ["view"]),
    "producers.alter": ({"group": "shop", "check_max": 3}, ["act shop"]),
    "groups.subscribe": ({"group": "g", "topics": ["t"]}, ["consume g", "read t"]),
    "groups.alter": ({"group": "g", "topics": ["t"]}, ["act g", "read t"]),
    "groups.reset": ({"group": "g", "start": "earliest"}, ["act g"]),
    "groups.pause": ({"group": "g"}, ["act g"]),
    "groups.resume": ({"group": "g"}, ["act g"]),
    "groups.limit": ({"group": "g", "rate": 5.0}, ["act g"]),
    "groups.delete": ({"group": "gone"}, ["admin"]),
    "groups.join": ({"group": "g", "instance": "i", "process": 1}, ["consume g"]),
    "groups.members": ({"group": "g"}, ["view"]),
    "groups.fence": ({"group": "g", "instance": "i"}, ["act g"]),
    "groups.list": ({}, ["view"]),
    "transactions.list": ({}, ["view"]),
    "transactions.summary": ({}, ["view"]),
    "transactions.show": ({"id": "OPEN"}, ["produce shop"]),
    "transactions.settle": ({"ids": ["OPEN"], "outcome": "commit"}, ["act shop"]),
    "transactions.recheck": ({"ids": ["OPEN"]}, ["act shop"]),
    "transactions.reveal": ({"id": "OPEN"}, ["act shop"]),
    "writers.commit": ({"writer": "w", "batch": 1, "transactions": [], "session": "WRITING"}, ["produce spark"]),
    "writers.show": ({"writer": "w"}, ["produce *"]),
    "writers.list": ({}, ["view"]),
    "writers.forget": ({"writer": "w"}, ["admin"]),
    "dead_letters.list": ({"group": "g"}, ["view"]),
    "dead_letters.summary": ({}, ["view"]),
    "dead_letters.edit": (
        {"group": "g", "topic": "t", "queue": 0, "offset": 0, "dead_us": 1, "message_id": "00" * 16},
        ["act g"],
    ),
    "dead_letters.settle": ({"group": "g", "act": "discard", "items": []}, ["act g"]),
    "messages.recall": ({"topic": "t", "message_id": "00" * 16}, ["send t"]),
    "view": ({"topic": "t", "id_or_key": "k"}, ["read t"]),
    "lookup": ({"key": "k", "topic": "t"}, ["read t"]),
    "standing": ({}, ["view"]),
    "messages.standing": ({"topic": "t", "queue": 0, "offset": 0}, ["read t"]),
    "acts.list": ({}, ["view"]),
    "acts.verify": ({}, ["view"]),
    "backup.files": ({}, ["admin"]),
    "rights.whoami": ({}, []),
    "rights.denials": ({}, ["view"]),
    "rights.reload": ({}, ["admin"]),
}
READS = {
    "t": ["read t"],
    "absent": ["read absent"],
    "%half": ["view"],
    "%op": ["view"],
    "%acks": ["view"],
    "%group-acts": ["view"],
    "%dead-letters.g": ["act g"],
    "%file.00000000000000000001.segment": ["admin"],
    "%nothing": ["view"],
}
ROWS = {
    "send": ["send t"],
    "send with a session": ["send t", "produce shop"],
    "send of two topics": ["send t", "send u"],
    "prepare": ["send t", "produce shop"],
    "end": ["produce shop"],
    "settle": ["consume g"],
    "receive": ["consume g"],
    "watch": ["produce shop"],
}
BY_ID = {"transactions.show", "transactions.settle", "transactions.recheck", "transactions.reveal"}
"""Actions on a transaction: nothing in a refusal says whether it exists, and of which group it is."""
BY_SESSION = {"writers.commit", "send with a session", "prepare", "end", "watch"}
"""Calls with the number of a session: one of another group is as unknown as one that does not exist."""


def unlisted():
    """Calls of the registries of the protocol that the product's or the tests' tables lack, or that are there no
    more."""
    rows = {*map(str, Exchange), "watch"}
    return [
        *(set(table.ACTIONS) ^ set(ACTIONS)),
        *(set(table.ACTIONS) ^ set(SAMPLES)),
        *(rows ^ set(EXCHANGES)),
        *(rows ^ {name.split()[0] for name in ROWS}),
        *(set(VIEWS) - set(READS)),
    ]


def need_of(rule):
    """The right that a rule of the tables stands for; ``produce *`` for any name."""
    parsed = Rule.parse(rule)
    return Need(parsed.access, None if parsed.prefix else parsed.name or None)


def lacking(held, *alternatives):
    """The first right that a caller with the rules ``held`` lacks for the first of the alternatives; None if it may."""
    principal = Principal("somebody", rules_of(*held))
    missing = [principal.missing(map(need_of, needed)) for needed in alternatives]
    return None if None in missing else missing[0]


def sentence(name, need):
    """What every way in answers to a caller that lacks a right."""
    return denied(name, need).message
