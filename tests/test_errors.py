"""The error tree: every code has one branch, a sentence, and a number that never changes."""

import numpy as np
import pyarrow as pa
import pytest

from escrowmq import errors
from escrowmq.broker.writer.checkback import ANSWERED
from escrowmq.cli.failures import Exit, exit_code_of
from escrowmq.client.producing.ending import EndingCodec
from escrowmq.client.producing.results import EndResults
from escrowmq.errors import (
    AWAY,
    DONE,
    FIRST_ANSWER,
    NOT_APPLIED,
    REFUSED,
    STANDS_COMMITTED,
    STANDS_ROLLED_BACK,
    Code,
    EscrowError,
    Meaning,
    Overloaded,
    error,
    flags,
)
from escrowmq.gateway.problems import status_of
from escrowmq.model import COMMIT, ROLLBACK
from escrowmq.outbox.modes.driving import DrivenResult, classify
from escrowmq.outbox.relay.reading import Row
from escrowmq.outbox.relay.verdicts import Rules, judge
from escrowmq.outbox.tables import State
from escrowmq.outbox.targets import seam
from escrowmq.schemas import ENDED
from escrowmq_lab.history import Kind, kind_of

FAILURES = [code for code in Code if code.branch is not None]
TRAVELLING = [code for code in Code if code is not Code.SENT]
"""What a broker may answer."""

BRANCH_OF_BLOCK = {
    1: errors.Rejected,
    2: errors.Rejected,
    4: errors.Fenced,
    5: errors.Overloaded,
    6: errors.Unknown,
    7: errors.Corrupt,
    8: errors.Misuse,
    9: errors.Denied,
}
"""The number's sixteens → the branch. One exception: WRONG_SHARD."""


@pytest.mark.parametrize("code", FAILURES)
def test_every_failure_has_its_branch_and_says_what_happened(code: Code) -> None:
    problem = error(code)
    expected = errors.Rejected if code is Code.WRONG_SHARD else BRANCH_OF_BLOCK[code // 16]
    assert type(problem) is expected
    assert problem.code is code
    assert problem.message == code.sentence != code.name
    assert str(problem).startswith(f"{code.name}: {problem.message}")


@pytest.mark.parametrize("code", FAILURES)
def test_sentences_are_sentences_of_their_own(code: Code) -> None:
    message, hint = code.sentence, code.hint
    assert message
    assert not message.endswith(".")
    assert message != hint
    assert [c for c in FAILURES if c.sentence == message] == [code]


@pytest.mark.parametrize("code", [*sorted(DONE), Code.SENT])
def test_results_that_are_no_error_make_no_error(code: Code) -> None:
    with pytest.raises(KeyError):
        error(code)


def test_own_words_replace_the_standard_ones() -> None:
    problem = error(Code.UNKNOWN_TOPIC, "no topic 'ordres'", "did you mean 'orders'?")
    assert (problem.message, problem.hint) == ("no topic 'ordres'", "did you mean 'orders'?")
    assert str(problem) == "UNKNOWN_TOPIC: no topic 'ordres' (did you mean 'orders'?)"
    assert str(error(Code.UNKNOWN_TOPIC, "no", hint="")) == "UNKNOWN_TOPIC: no"


def test_overload_says_when_to_come_back() -> None:
    problem = error(Code.DISK_FULL, retry_after=2.5)
    assert isinstance(problem, Overloaded)
    assert problem.retry_after == 2.5
    assert Overloaded(Code.QUEUE_FULL).retry_after == 1.0


def test_a_timeout_is_never_rejected() -> None:
    for code in (Code.TIMED_OUT, Code.DISCONNECTED, Code.SHARD_STOPPED, Code.CLOSED):
        assert type(error(code)) is errors.Unknown


def test_numbers_fit_a_byte_and_are_unique() -> None:
    assert len({int(code) for code in Code}) == len(Code.__members__)
    assert all(0 <= code < 256 for code in Code)


MEANING_OF_BRANCH = {
    errors.Rejected: Meaning.REFUSED,
    errors.Unknown: Meaning.UNKNOWN,
    errors.Fenced: Meaning.NOT_NOW,
    errors.Overloaded: Meaning.NOT_NOW,
    errors.Corrupt: Meaning.UNKNOWN,
    errors.Misuse: Meaning.NOT_NOW,
    errors.Denied: Meaning.NOT_NOW,
}


def test_every_code_has_one_meaning() -> None:
    sets = (DONE, REFUSED, NOT_APPLIED - REFUSED, {c for c in Code if c.meaning is Meaning.UNKNOWN})
    assert sorted(code for each in sets for code in each) == sorted(Code)
    for code in FAILURES:
        assert code.meaning is MEANING_OF_BRANCH[type(error(code))] is error(code).meaning
    assert {code: code.meaning for code in DONE} == dict.fromkeys(DONE, Meaning.DONE)
    assert Code.SENT.meaning is Meaning.UNKNOWN
    assert Code.SENT not in DONE
    assert {code: code.meaning for code in AWAY} == {
        Code.DISCONNECTED: Meaning.UNKNOWN,
        Code.TIMED_OUT: Meaning.UNKNOWN,
        Code.BROKER_AWAY: Meaning.NOT_NOW,  # nothing was sent
    }
    assert [code for code in range(256) if flags(DONE)[code]] == sorted(DONE)


@pytest.mark.parametrize("code", TRAVELLING)
def test_a_code_means_the_same_everywhere(code: Code) -> None:
    """Each place that judges results, against the one table."""
    done, refused = code in DONE, code.meaning is Meaning.REFUSED
    surely_not = code.meaning in (Meaning.REFUSED, Meaning.NOT_NOW)
    row = np.array([code], np.uint8)

    # every place on columns
    assert (seam.REFUSED[code], seam.NOT_APPLIED[code], ANSWERED[code]) == (refused, surely_not, done)
    # the relay
    verdict = judge([_ROW], row, {}, Rules(1, 1, 1, True), 0, partly_there=True)
    if code >= Code.CONFLICT:
        assert (verdict.refused, verdict.aside[0].attempts, verdict.sent) == (refused, refused, [])
    # the producer-driven mode
    for outcome, stands in ((COMMIT, STANDS_COMMITTED), (ROLLBACK, STANDS_ROLLED_BACK)):
        ended, contrary = classify(row, outcome)
        as_good = outcome is ROLLBACK and code in (Code.EXPIRED, Code.UNKNOWN_TRANSACTION)
        assert (ended[0], contrary[0]) == (code in stands or as_good, refused and not as_good)
    assert DrivenResult(b"", None, code).done == (code in STANDS_COMMITTED)
    # the client
    (told,) = EndingCodec().decode([(b"", COMMIT)], None, pa.record_batch([row], schema=ENDED), False)
    (again,) = EndingCodec().decode([(b"", COMMIT)], None, pa.record_batch([row], schema=ENDED), True)
    assert EndResults(row).ok == done
    assert (told, again) == (code, FIRST_ANSWER.get(code, code)) if done else isinstance(told, EscrowError)
    # the command line, HTTP, the recorded histories
    assert (exit_code_of([code]) is Exit.OK) == done
    if not done:
        assert (status_of(error(code)) >= 500) == (
            not surely_not
            or code in (Code.DISK_FULL, Code.QUEUE_FULL, Code.OUT_OF_RESOURCES, Code.BROKER_AWAY, Code.NOT_LEADER)
        )
        assert (kind_of(error(code)) is Kind.FAIL) == surely_not


_ROW = Row(1, 0, State.PENDING, 0, b"i" * 16, "t", None, None, None, b"", 5, 0)


def test_one_catch_for_everything() -> None:
    assert all(issubclass(branch, EscrowError) for branch in BRANCH_OF_BLOCK.values())
