"""Bugs of the gateway: who may ask, how much, and whose answer counts."""

from __future__ import annotations

from typing import Any

from escrowmq.gateway import addresses, asking, producers, signing
from escrowmq.gateway.admission import Admission
from escrowmq.gateway.asking import HttpChecker
from escrowmq.gateway.routes import messages
from escrowmq.gateway.settling import LeaseHandle
from escrowmq.gateway.signing import ReplayGuard
from escrowmq.model import Outcome
from planting import Plant, bug

SIGNING = "gateway/test_gateway_signing.py::"
ASKING = "gateway/test_gateway_asking.py::"
LIMITS = "gateway/test_gateway_limits.py::"
PROBLEMS = "gateway/test_gateway_problems.py::"
ENDPOINTS = "gateway/test_gateway_endpoints.py::"


@bug("gateway", SIGNING + "test_an_answer_belongs_to_its_question", "DID NOT RAISE")
def take_a_question_for_its_answer(plant: Plant) -> None:
    """An answer is signed as a question is: whoever hears the one can send it back as the other."""
    real = signing._verify

    @plant.instead(signing, "_verify")
    def verified(secret: Any, headers: Any, body: bytes, purpose: str, *given: Any) -> str:
        return real(secret, headers, body, "", *given)

    made = signing.sign_answer

    @plant.instead(signing, "sign_answer")
    def sign_answer(secret: Any, question: Any, body: bytes, now: Any = None) -> Any:
        made(secret, question, body, now)
        return signing.sign(secret, question[signing.ID], body, now)


@bug("gateway", SIGNING + "test_a_timestamp_outside_the_window_is_refused[1699999699]", "DID NOT RAISE")
def accept_a_question_of_any_age(plant: Plant) -> None:
    real = signing._verify

    @plant.instead(signing, "_verify")
    def verified(secret: Any, headers: Any, body: bytes, purpose: str, tolerance: float, moment: float) -> str:
        return real(secret, headers, body, purpose, float("inf"), moment)


@bug("gateway", SIGNING + "test_a_replay_is_refused_by_the_guard_and_the_guard_forgets", "DID NOT RAISE")
def accept_a_question_twice(plant: Plant) -> None:
    @plant.instead(ReplayGuard, "first_time")
    def first_time(self: Any, identity: str, now: float, keep: float) -> bool:
        return True


@bug("gateway", SIGNING + "test_addresses_that_make_no_sense_are_refused[flags8-tables8]", "DID NOT RAISE")
def ask_an_address_of_any_kind(plant: Plant) -> None:
    @plant.instead(addresses, "check_url")
    def check_url(url: str) -> None:
        pass


@bug("gateway", ASKING + "test_proxies_of_the_environment_are_not_used", "proxy.asked == []")
def ask_through_a_proxy_of_the_environment(plant: Plant) -> None:
    real = asking.httpx.AsyncClient.__init__

    @plant.instead(asking.httpx.AsyncClient, "__init__")
    def init(self: Any, **options: Any) -> None:
        real(self, **{**options, "trust_env": True})


@bug("gateway", ASKING + "test_a_redirect_is_not_followed", "assert elsewhere.asked == []")
def follow_a_redirect(plant: Plant) -> None:
    real = asking.httpx.AsyncClient.__init__

    @plant.instead(asking.httpx.AsyncClient, "__init__")
    def init(self: Any, **options: Any) -> None:
        real(self, **{**options, "follow_redirects": True})


@bug("gateway", ASKING + "test_an_address_in_a_message_is_never_asked", "assert elsewhere.asked == []")
def ask_the_address_that_a_message_names(plant: Plant) -> None:
    real = HttpChecker._ask

    @plant.instead(HttpChecker, "_ask")
    async def ask(self: Any, checks: Any) -> Any:
        named = [message.properties.get("check_back") for check in checks for message in check.messages]
        if named and named[0]:
            object.__setattr__(self.address, "url", named[0])
        return await real(self, checks)


@bug("gateway", ASKING + "test_nothing_but_a_clear_answer_decides", "each kind of garbage was asked again about")
def take_any_status_for_an_answer(plant: Plant) -> None:
    real = asking._read

    @plant.instead(asking, "_read")
    async def read(response: Any, most: int) -> bytes:
        response.status_code = 200
        return await real(response, most)


@bug("gateway", ASKING + "test_questions_and_answers_are_signed", "no forged answer counted")
def believe_an_answer_without_its_signature(plant: Plant) -> None:
    @plant.instead(asking, "verify_answer")
    def verify_answer(*_: Any) -> None:
        pass


@bug("gateway", LIMITS + "test_a_declared_body_over_the_limit_is_refused_before_it_is_sent", "answer_of(connection)")
def read_a_body_before_its_length_is_looked_at(plant: Plant) -> None:
    @plant.instead(Admission, "_hold")
    def hold(self: Any, count: int, held: list[int]) -> None:
        held[0] += count
        self.bytes += count


@bug("gateway", LIMITS + "test_bodies_that_wait_together_are_bounded", "answer_of(second)")
def bound_each_body_and_not_their_sum(plant: Plant) -> None:
    real = Admission._hold

    @plant.instead(Admission, "_hold")
    def hold(self: Any, count: int, held: list[int]) -> None:
        before, self.bytes = self.bytes, 0
        try:
            real(self, count, held)
        finally:
            self.bytes += before


@bug("gateway", LIMITS + "test_a_post_without_a_body_from_another_site_is_refused", "== 403")
def let_the_pages_of_other_sites_in(plant: Plant) -> None:
    @plant.instead(Admission, "_check_origin")
    def check_origin(self: Any, headers: Any) -> None:
        pass


@bug(
    "gateway",
    ENDPOINTS + "test_a_repeat_by_message_id_or_idempotency_key_makes_nothing_twice[embedded]",
    "assert client.ok(path, given, **headers) == client.ok(path, given, **headers)",
)
def make_one_id_of_all_messages_of_a_request(plant: Plant) -> None:
    real = messages.idempotent_id

    @plant.instead(messages, "idempotent_id")
    def scoped(key: Any, request: Any, number: int) -> Any:
        return real(key, request, 0)


@bug("gateway", ENDPOINTS + "test_an_id_names_one_message_of_its_topic[embedded]", "MESSAGE_ID_TAKEN")
def take_an_idempotency_key_for_no_id(plant: Plant) -> None:
    @plant.instead(messages, "idempotent_id")
    def scoped(key: Any, request: Any, number: int) -> None:
        return None


@bug(
    "gateway",
    PROBLEMS + "test_handles_are_read_as_they_were_written",
    "assert LeaseHandle.parse(str(handle)) == handle",
)
def cut_a_lease_to_32_bits(plant: Plant) -> None:
    real = LeaseHandle.parse

    @plant.instead(LeaseHandle, "parse")
    def parse(cls: Any, text: str) -> Any:
        handle = real(text)
        return LeaseHandle(handle.shard, handle.lease & 0xFFFF_FFFF, handle.offset)


@bug(
    "gateway",
    ENDPOINTS + "test_a_transaction_that_is_rolled_back_never_appears[embedded]",
    'assert [client.ok(path)["code"] for _ in range(2)] == ["ROLLED_BACK", "ALREADY_ROLLED_BACK',
)
def end_every_transaction_by_a_commit(plant: Plant) -> None:
    real = producers.Producers.end

    @plant.instead(producers.Producers, "end")
    async def end(self: Any, group: str, transaction: Any, outcome: Any, confirm: Any = "answered") -> Any:
        return await real(self, group, transaction, Outcome.COMMIT, confirm)
