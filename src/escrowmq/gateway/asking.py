"""Check-back over HTTP: the gateway joins the producer group and forwards check-backs to the group's URL.

Rules:

1. URLs come from the operator's configuration, never from a message. Redirects and proxy variables are ignored;
   compressed or oversized responses are rejected.
2. Three outcomes are valid: "committed", "rolled back", "in progress". Any other response means in progress: the broker
   retries the check-back, and a failure never decides anything.
3. Each URL has its own queue and connections: a slow one delays no other group.
4. While a URL is unreachable the gateway is absent from the group, because each request would count towards
   ``check_max``. It probes the URL with an empty request until it responds.
5. With a secret, request and response are both signed: the response decides (see ``signing.py``).
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
"""Concurrent requests to one URL."""
MAX_TRANSACTIONS = 100
"""Transactions of one request."""
MAX_QUESTION_BYTES = 8 << 20
"""Message bodies of one request, except for a single larger transaction."""
ANSWER_BASE, ANSWER_EACH = 4096, 256
"""Size limit (bytes) of a response: a base, and an allowance for each transaction of the request."""

FIRST_PROBE, LAST_PROBE = 0.1, 10.0
"""Pauses (s) between probes of an unreachable URL, see :class:`Backoff`."""

OUTCOMES = {"committed": Outcome.COMMIT, "rolled back": Outcome.ROLLBACK, "in progress": Outcome.UNKNOWN}

_PendingCheck = tuple[Check, "asyncio.Future[Outcome]"]


class _InvalidResponse(Exception):
    """An invalid response; the text gives the reason."""


class HttpChecker:
    """Sends the check-backs of one group to its URL; :meth:`decide` is the group's checker and batches concurrent
    calls. ``attend`` is called with whether the URL is reachable."""

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
        self._waiting: deque[_PendingCheck] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[None] | None = None
        self._last_failure: str | None = None  # reason of the last response that was invalid, wholly or in part

    async def decide(self, check: Check) -> Outcome:
        """Return the outcome of a transaction that the URL responds with; UNKNOWN if the response is not valid."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((check, future))
        if len(self._tasks) < AT_ONCE:
            task = asyncio.create_task(self._work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def close(self) -> None:
        """Cancel requests in flight: the broker asks another member of the group."""
        tasks = [*self._tasks, *([self._probing] if self._probing is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, future in self._waiting:
            future.cancel()
        await self._client.aclose()

    async def _work(self) -> None:
        await asyncio.sleep(0)  # let concurrent callers queue their check-backs first
        while batch := self._take():
            checks = [check for check, _ in batch]
            try:
                outcomes, unclear = await self._ask(checks)
                self._log_failure(unclear, len(checks))
            except (_InvalidResponse, EscrowError, httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError) as problem:
                self._log_failure(problem, len(checks))
                outcomes = {}
                if isinstance(problem, httpx.TransportError | TimeoutError | OSError):
                    self._probe()
            except BaseException:
                for _, future in batch:
                    future.cancel()
                raise
            for check, future in batch:
                if not future.done():
                    future.set_result(outcomes.get(str(check.transaction_id), Outcome.UNKNOWN))

    def _probe(self) -> None:
        if self._probing is None:
            self._probing = asyncio.create_task(self._probe_until_reachable())

    async def _probe_until_reachable(self) -> None:
        self.attend(False)
        backoff = Backoff(FIRST_PROBE, LAST_PROBE)
        while True:
            await asyncio.sleep(backoff.failed())
            try:
                await self._ask([])
                break
            except (_InvalidResponse, EscrowError):
                break  # the URL is served; its responses to real requests are checked later
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError, OSError):
                continue
        self._probing = None
        self._log_failure(None, 0)
        self.attend(True)

    def _take(self) -> list[_PendingCheck]:
        batch: list[_PendingCheck] = []
        size = 0
        while self._waiting and len(batch) < MAX_TRANSACTIONS:
            size += sum(len(message.body) for message in self._waiting[0][0].messages)
            if batch and size > MAX_QUESTION_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _ask(self, checks: Sequence[Check]) -> tuple[dict[str, Outcome], _InvalidResponse | None]:
        body = encode_checks(checks)
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

    def _log_failure(self, problem: BaseException | None, count: int) -> None:
        """Log a warning when a URL fails, fails for another reason or responds again; repeated failures at DEBUG."""
        if problem is None:
            if self._last_failure is not None:
                logger.warning("group %s: %s answers again", self.address.group, self._shown)
            self._last_failure = None
            return
        reason = f"{type(problem).__name__}: {problem}" if not isinstance(problem, _InvalidResponse) else str(problem)
        level = logging.DEBUG if self._last_failure == reason else logging.WARNING
        self._last_failure = reason
        text = "group %s: no answer from %s about %d transactions: %s"
        logger.log(level, text, self.address.group, self._shown, count, reason)


async def _read(response: httpx.Response, most: int) -> bytes:
    if response.status_code != 200:
        raise _InvalidResponse(f"status {response.status_code}")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise _InvalidResponse("the answer is compressed")
    found = bytearray()
    async for chunk in response.aiter_raw():
        found += chunk
        if len(found) > most:
            raise _InvalidResponse(f"the answer has more than {most} bytes")
    return bytes(found)


def encode_checks(checks: Sequence[Check]) -> bytes:
    """Encode a request body: {"transactions": [{transaction_id, attempt, messages: [...]}]}."""
    rows = [
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
    return json.dumps({"transactions": rows}, separators=(",", ":")).encode()


def outcomes_of(answer: bytes, requested: set[str]) -> tuple[dict[str, Outcome], _InvalidResponse | None]:
    """Decode a response {"outcomes": {id: word}}: the valid outcomes of ``requested``, and an error if any is
    missing."""
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError):
        raise _InvalidResponse("the answer is not JSON") from None
    outcomes = content.get("outcomes") if isinstance(content, dict) else None
    if not isinstance(outcomes, dict):
        raise _InvalidResponse('the answer is not {"outcomes": {...}}')
    answered = {name: word for name, word in outcomes.items() if name in requested}
    found = {name: OUTCOMES[word] for name, word in answered.items() if isinstance(word, str) and word in OUTCOMES}
    if len(found) == len(requested):
        return found, None
    strange = next((word for name, word in answered.items() if name not in found), None)
    if len(answered) == len(found):
        return found, _InvalidResponse("the answer tells nothing of some transactions")
    return found, _InvalidResponse(f"{strange!r:.80} is no outcome; those are {', '.join(map(repr, OUTCOMES))}")
