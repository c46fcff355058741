"""Waiting for Kafka's answers, and what it means when none comes: Kafka is away, or it, or what is known of it, refuses
us.

Kafka's client answers a question in time or not at all; why it does not come is said beside it, as errors of
connections. Of those only what surely is a wrong setting ends the waiting: a password that is refused, a certificate
that does not check. Everything else may pass.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from escrowmq.errors import Code, EscrowError, Misuse, error

log = logging.getLogger(__name__)

SLICE = 0.1
"""Seconds of one wait, so that who is to stop never waits long."""
SURE_SECONDS = 2.0
"""A refusal, or a topic that is not there, is believed after so long without another answer: one of several nodes may
be wrong, or not know of a new topic yet.
"""
_K = KafkaError
DENIED = {
    _K.TOPIC_AUTHORIZATION_FAILED,
    _K.CLUSTER_AUTHORIZATION_FAILED,
    _K.SASL_AUTHENTICATION_FAILED,
    _K._AUTHENTICATION,
}
UNKNOWN_TOPIC = {_K.UNKNOWN_TOPIC_OR_PART, _K._UNKNOWN_TOPIC, _K._UNKNOWN_PARTITION}
_T = TypeVar("_T")


class Heard:
    """Events of Kafka's client about its connections."""

    def __init__(self) -> None:
        self._said = ""
        self.refusal: KafkaError | None = None
        """Why somebody who was there did not take us."""

    def note(self, problem: KafkaError) -> None:
        """For ``error_cb``."""
        log.debug("Kafka: %s", problem.str())
        if problem.code() in DENIED or (problem.code() == _K._SSL and _is_refusal(problem.str())):
            self.refusal = problem
        elif problem.code() != _K._ALL_BROKERS_DOWN:
            self._said = plain(problem.str())

    def late(self, name: str) -> EscrowError:
        """Return the error for an answer that did not come."""
        if self.refusal is not None:
            return refused(name, self.refusal)
        return late(name, self._said)


def _is_refusal(text: str) -> bool:
    """Return whether an error of TLS is about who the other is, rather than about a connection that broke off."""
    return "SSL routines::" in text and "unexpected eof" not in text


def plain(text: str) -> str:
    """Return librdkafka's text without the parts that differ each time."""
    return re.sub(r" \(after [^)]*\)", "", text)


def refused(name: str, problem: KafkaError) -> EscrowError:
    """Kafka, or our own settings, do not let us in: Denied(DENIED), Misuse(BAD_SETTING) for certificates."""
    what = f"{name}: {plain(problem.str())}"
    if problem.code() == _K._SSL:
        hint = "ssl.ca.location: certificates to trust; ssl.certificate.location and ssl.key.location: our own"
        return Misuse(Code.BAD_SETTING, what, hint)
    if problem.code() in (_K._AUTHENTICATION, _K.SASL_AUTHENTICATION_FAILED):
        return error(Code.DENIED, what, "look at sasl.mechanism, sasl.username and sasl.password")
    return error(Code.DENIED, what, "a broker reads, writes, describes and deletes records")


def failed(name: str, problem: KafkaError) -> EscrowError:
    """Return an answer that is an error."""
    if problem.code() in DENIED:
        return refused(name, problem)
    if problem.code() in UNKNOWN_TOPIC:
        return error(Code.UNKNOWN_TOPIC, f"{name} is not there", "make it with `escrowmq log create ADDRESS`")
    return error(Code.DISCONNECTED, f"{name}: {problem.str()}")


def late(name: str, said: str = "") -> EscrowError:
    """No answer came."""
    return error(
        Code.TIMED_OUT,
        f"{name} does not answer{f': {said}' if said else ''}",
        "is Kafka up, and is this its security.protocol?",
    )


def until(deadline: float, name: str, ask: Callable[[float], _T], heard: Heard | None = None) -> _T:
    """Ask until there is an answer: right after a topic was made, or its leader changed, the first question fails."""
    began = time.monotonic()
    while True:
        try:
            return ask(max(deadline - time.monotonic(), SLICE))
        except KafkaException as problem:
            code, sure = problem.args[0].code(), time.monotonic() - began > SURE_SECONDS
            if code in DENIED or problem.args[0].fatal() or (code in UNKNOWN_TOPIC and (sure or heard is None)):
                raise failed(name, problem.args[0]) from None
            log.debug("Kafka, asking for %s: %s", name, problem)
        except FutureTimeout:
            pass
        if time.monotonic() >= deadline:
            raise heard.late(name) if heard is not None else late(name)
        time.sleep(0.02)


def answer(
    future: Future[Any],
    timeout: float,
    name: str,
    poll: Callable[[float], object],
    heard: Heard,
    closed: Callable[[], bool],
) -> Any:
    """Wait for the answer to a question of an admin client. ``poll`` makes the client say what it has to say of
    connections.

    Raises KafkaException, TimeoutError; what :meth:`Heard.late` says when there was a refusal and nothing else for a
    while; Unknown(CLOSED).
    """
    began = time.monotonic()
    while True:
        try:
            return future.result(SLICE / 2)
        except FutureTimeout:
            waited = time.monotonic() - began
            if closed():
                raise error(Code.CLOSED, f"{name} was closed") from None
            if waited >= timeout:
                raise
            poll(SLICE / 2)
            if heard.refusal is not None and waited > SURE_SECONDS:
                raise heard.late(name) from None
