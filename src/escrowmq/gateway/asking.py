"""Check-back over HTTP: the gateway joins the producer group and forwards check-backs to the group's URL.

Rules:

1. Addresses come from the operator's configuration, never from a message. No redirect is followed, no proxy of the
   environment is used, no compressed or oversized answer is read.
2. Three answers count: "committed", "rolled back", "in progress". Anything else, of whatever kind, is in progress: the
   broker asks again, and nothing is ever decided by a failure.
3. Each address has its own queue and connections: a slow one delays no other group.
4. While an address cannot be reached the gateway is not among those to ask, because each question would count as one of
   ``check_max``. It probes the address with an empty question until it answers.
5. With a secret the question is signed, and so must the answer be: it decides (see ``signing.py``).
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import ssl
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import httpx

from escrowmq.errors import EscrowError
from escrowmq.gateway.addresses import Address
from escrowmq.gateway.signing import sign, verify_answer
from escrowmq.model import Check, Outcome
from escrowmq.platform.backoff import Backoff

logger = logging.getLogger(__name__)

AT_ONCE = 4
"""Questions on their way to one address."""
MAX_TRANSACTIONS = 100
"""Transactions of one question."""
MAX_QUESTION_BYTES = 8 << 20
"""Bodies of one question, but for a single transaction that is larger."""
ANSWER_BASE, ANSWER_EACH = 4096, 256
"""Bytes that an answer may have, and how many more for each transaction asked about."""

FIRST_PROBE, LAST_PROBE = 0.1, 10.0
"""Seconds between two probes of an address that is away, see :class:`Backoff`."""

OUTCOMES = {"committed": Outcome.COMMIT, "rolled back": Outcome.ROLLBACK, "in progress": Outcome.UNKNOWN}

_Waiting = tuple[Check, "asyncio.Future[Outcome]"]


class _Refused(Exception):
    """The answer does not count; the text says why."""


class Asker:
    """Asks one group's address. :meth:`decide` is the group's checker; questions that come together go together.

    ``attend`` is called with whether the address can be reached.
    """

    def __init__(self, address: Address) -> None:
        self.address = address
        self.attend: Callable[[bool], None] = lambda present: None
        parts = urlsplit(address.url)
        self._shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
        self._client = httpx.AsyncClient(
            follow_redirects=False,
            trust_env=False,
            verify=True if address.ca_file is None else ssl.create_default_context(cafile=address.ca_file),
            timeout=address.timeout,
            limits=httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=1),
        )
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[None] | None = None
        self._trouble: str | None = None  # why the last answer did not count, or not for all

    async def decide(self, check: Check) -> Outcome:
        """Ask the address about a transaction. Returns UNKNOWN for whatever is not a clear answer."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((check, future))
        if len(self._tasks) < AT_ONCE:
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def close(self) -> None:
        """Give up what is on its way: another member of the group will be asked."""
        tasks = [*self._tasks, *([self._probing] if self._probing is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, future in self._waiting:
            future.cancel()
        await self._client.aclose()

    async def _work(self) -> None:
        await asyncio.sleep(0)  # what was asked together has all come to wait
        while taken := self._take():
            checks = [check for check, _ in taken]
            try:
                outcomes, unclear = await self._ask(checks)
                self._note(unclear, len(checks))
            except (_Refused, EscrowError, httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as problem:
                self._note(problem, len(checks))
                outcomes = {}
                if isinstance(problem, httpx.TransportError | TimeoutError | OSError):
                    self._probe()
            except BaseException:
                for _, future in taken:
                    future.cancel()
                raise
            for check, future in taken:
                if not future.done():
                    future.set_result(outcomes.get(str(check.transaction_id), Outcome.UNKNOWN))

    def _probe(self) -> None:
        if self._probing is None:
            self._probing = asyncio.create_task(self._until_it_answers())

    async def _until_it_answers(self) -> None:
        self.attend(False)
        backoff = Backoff(FIRST_PROBE, LAST_PROBE)
        while True:
            await asyncio.sleep(backoff.failed())
            try:
                await self._ask([])
                break
            except (_Refused, EscrowError):
                break  # the address is served; its answers to real questions are judged when they come
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError):
                continue
        self._probing = None
        self._note(None, 0)
        self.attend(True)

    def _take(self) -> list[_Waiting]:
        taken: list[_Waiting] = []
        size = 0
        while self._waiting and len(taken) < MAX_TRANSACTIONS:
            size += sum(len(message.body) for message in self._waiting[0][0].messages)
            if taken and size > MAX_QUESTION_BYTES:
                break
            taken.append(self._waiting.popleft())
        return taken

    async def _ask(self, checks: Sequence[Check]) -> tuple[dict[str, Outcome], _Refused | None]:
        body = question(checks)
        identity = f"msg_{uuid.uuid4().hex}"
        headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
        if self.address.secret:
            headers |= sign(self.address.secret, identity, body)
        most = ANSWER_BASE + ANSWER_EACH * len(checks)
        async with asyncio.timeout(self.address.timeout):
            async with self._client.stream("POST", self.address.url, content=body, headers=headers) as response:
                answer = await _read(response, most)
        if self.address.secret:
            verify_answer(self.address.secret, identity, response.headers, answer)
        return outcomes_of(answer, {str(check.transaction_id) for check in checks})

    def _note(self, problem: BaseException | None, count: int) -> None:
        """Log a line when an address begins to fail or fails differently, and one when it answers again; each
        failure at DEBUG."""
        if problem is None:
            if self._trouble is not None:
                logger.warning("group %s: %s answers again", self.address.group, self._shown)
            self._trouble = None
            return
        reason = f"{type(problem).__name__}: {problem}" if not isinstance(problem, _Refused) else str(problem)
        level = logging.DEBUG if self._trouble == reason else logging.WARNING
        self._trouble = reason
        text = "group %s: no answer from %s about %d transactions: %s"
        logger.log(level, text, self.address.group, self._shown, count, reason)


async def _read(response: httpx.Response, most: int) -> bytes:
    if response.status_code != 200:
        raise _Refused(f"status {response.status_code}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise _Refused("the answer is compressed")
    found = bytearray()
    async for chunk in response.aiter_raw():
        found += chunk
        if len(found) > most:
            raise _Refused(f"the answer has more than {most} bytes")
    return bytes(found)


def question(checks: Sequence[Check]) -> bytes:
    """Return the body of a question: {"transactions": [{transaction_id, attempt, messages: [...]}]}."""
    asked = [
        {
            "transaction_id": str(check.transaction_id),
            "attempt": check.attempt,
            "messages": [
                {
                    "topic": message.topic,
                    "key": message.key,
                    "tag": message.tag,
                    "properties": dict(message.properties),
                    "message_id": message.message_id.hex(),
                    "born": message.born.isoformat(),
                    "body": base64.b64encode(message.body).decode(),
                }
                for message in check.messages
            ],
        }
        for check in checks
    ]
    return json.dumps({"transactions": asked}, separators=(",", ":")).encode()


def outcomes_of(answer: bytes, asked: set[str]) -> tuple[dict[str, Outcome], _Refused | None]:
    """Return the outcomes in an answer {"outcomes": {id: word}}, of ids that were asked and words that are known;
    and why there are not as many as were asked."""
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError):
        raise _Refused("the answer is not JSON") from None
    outcomes = content.get("outcomes") if isinstance(content, dict) else None
    if not isinstance(outcomes, dict):
        raise _Refused('the answer is not {"outcomes": {...}}')
    told = {name: word for name, word in outcomes.items() if name in asked}
    found = {name: OUTCOMES[word] for name, word in told.items() if isinstance(word, str) and word in OUTCOMES}
    if len(found) == len(asked):
        return found, None
    strange = next((word for name, word in told.items() if name not in found), None)
    if len(told) == len(found):
        return found, _Refused("the answer tells nothing of some transactions")
    return found, _Refused(f"{strange!r:.80} is no outcome; those are {', '.join(map(repr, OUTCOMES))}")
