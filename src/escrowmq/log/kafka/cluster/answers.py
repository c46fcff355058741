"""Waiting for Kafka's responses, and the cause if there is none: Kafka is unavailable, or it rejects our settings.

Kafka's client reports separately, as connection errors, why a response is late. Only definitely wrong settings end the
wait: a rejected password, an invalid certificate. Everything else may be temporary.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from escrowmq.errors import Code, EscrowError, Misuse, error

log = logging.getLogger(__name__)

SLICE = 0.1  # maximum duration (s) of one wait, so that stopping never takes long
SURE_SECONDS = 2.0  # then a rejection or a missing topic is final: one node may be wrong, or unaware of a new one
_K = KafkaError
UNAUTHENTICATED = {_K.SASL_AUTHENTICATION_FAILED, _K._AUTHENTICATION}
DENIED = {_K.TOPIC_AUTHORIZATION_FAILED, _K.CLUSTER_AUTHORIZATION_FAILED, *UNAUTHENTICATED}
UNKNOWN_TOPIC = {_K.UNKNOWN_TOPIC_OR_PART, _K._UNKNOWN_TOPIC, _K._UNKNOWN_PARTITION}
_T = TypeVar("_T")


class ConnectionErrors:
    """The connection errors reported by Kafka's client."""

    def __init__(self) -> None:
        self._last_message = ""
        self.refusal: KafkaError | None = None  # the rejection by a reachable server

    def note(self, problem: KafkaError) -> None:
        """Record an error as a possible cause of a late response: a rejection, or the last message. It is the
        ``error_cb`` of a client."""
        text = problem.str()
        log.debug("Kafka: %s", text)
        # a TLS error concerns the identity of a peer, or a broken connection
        identity = problem.code() == _K._SSL and "SSL routines::" in text and "unexpected eof" not in text
        if problem.code() in DENIED or identity:
            self.refusal = problem
        elif problem.code() != _K._ALL_BROKERS_DOWN:
            self._last_message = strip_timing(text)

    def timeout_error(self, name: str) -> EscrowError:
        if self.refusal is not None:
            return rejection_error(name, self.refusal)
        return timeout_error(name, self._last_message)


def strip_timing(text: str) -> str:
    """Remove the variable parts of a librdkafka message."""
    return re.sub(r" \(after [^)]*\)", "", text)


def rejection_error(name: str, problem: KafkaError) -> EscrowError:
    """Return the error for a rejection by Kafka or our settings: Denied(DENIED); certificates: Misuse(BAD_SETTING)."""
    message = f"{name}: {strip_timing(problem.str())}"
    if problem.code() == _K._SSL:
        hint = "ssl.ca.location: certificates to trust; ssl.certificate.location and ssl.key.location: our own"
        return Misuse(Code.BAD_SETTING, message, hint)
    if problem.code() in UNAUTHENTICATED:
        return error(Code.DENIED, message, "check sasl.mechanism, sasl.username and sasl.password")
    return error(Code.DENIED, message, "a broker reads, writes, describes and deletes records")


def response_error(name: str, problem: KafkaError) -> EscrowError:
    """Return the error for an error response of Kafka: Denied(DENIED), Rejected(UNKNOWN_TOPIC) or DISCONNECTED."""
    if problem.code() in DENIED:
        return rejection_error(name, problem)
    if problem.code() in UNKNOWN_TOPIC:
        return error(Code.UNKNOWN_TOPIC, f"{name} is not there", "make it with `escrowmq log create ADDRESS`")
    return error(Code.DISCONNECTED, f"{name}: {problem.str()}")


def timeout_error(name: str, detail: str = "") -> EscrowError:
    """Return the error Unknown(TIMED_OUT) for a missing response; ``detail``: the known cause."""
    message = f"{name} does not answer{f': {detail}' if detail else ''}"
    return error(Code.TIMED_OUT, message, "is Kafka up, and is this its security.protocol?")


def retry_until(deadline: float, name: str, call: Callable[[float], _T], errors: ConnectionErrors | None = None) -> _T:
    """Repeat ``call`` (with the seconds left) until it succeeds, and return its result: after a topic was created, or
    its leader changed, the first request fails. ``deadline`` is monotonic. Raises the cause if it is permanent,
    Unknown(TIMED_OUT) after the deadline."""
    began = time.monotonic()
    while True:
        try:
            return call(max(deadline - time.monotonic(), SLICE))
        except KafkaException as problem:
            code, sure = problem.args[0].code(), time.monotonic() - began > SURE_SECONDS
            if code in DENIED or problem.args[0].fatal() or (code in UNKNOWN_TOPIC and (sure or errors is None)):
                raise response_error(name, problem.args[0]) from None
            log.debug("Kafka, requesting %s: %s", name, problem)
        except FutureTimeout:
            pass
        if time.monotonic() >= deadline:
            raise errors.timeout_error(name) if errors is not None else timeout_error(name)
        time.sleep(0.02)
