"""The error tree: every code has one branch, a sentence, and a number that never changes."""

import pytest

from escrowmq import errors
from escrowmq.cli.failures import DONE
from escrowmq.errors import Code, EscrowError, Overloaded, error, explain

FAILURES = [code for code in Code if code not in DONE]

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
    assert problem.message == explain(code)[0] != code.name
    assert str(problem).startswith(f"{code.name}: {problem.message}")


@pytest.mark.parametrize("code", FAILURES)
def test_sentences_are_sentences_of_their_own(code: Code) -> None:
    message, hint = explain(code)
    assert message
    assert not message.endswith(".")
    assert message != hint
    assert [c for c in FAILURES if explain(c)[0] == message] == [code]


@pytest.mark.parametrize("code", sorted(DONE))
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


def test_one_catch_for_everything() -> None:
    assert all(issubclass(branch, EscrowError) for branch in BRANCH_OF_BLOCK.values())
