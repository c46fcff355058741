"""Search for the broker that leads a shard: each search probes all known addresses at the same time.

A leader reports its role in ``hello`` (a broker without a role has a log of its own, and leads). Of several leaders the
one with the highest epoch counts: the others lost the log and have not noticed it yet. A standby names the leader and
the other brokers; :mod:`escrowmq.wire.addresses` has the rules for following these names. A search probes each address
once, also if the names form a circle. It does not wait for a silent broker once another leads, does not probe it again
before it has answered or timed out, and waits for it in one search only: later searches are short, and find a new
leader soon. A response between two searches counts in the next one.

All brokers of a shard have the same shard number. Two numbers behind the addresses of one URL are a mistake in the URL.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from escrowmq.errors import Code, Denied, EscrowError, Misuse, unsent
from escrowmq.wire import Json, channel, frames
from escrowmq.wire.addresses import MOST, Address, may_follow, named_address
from escrowmq.wire.channel import Channel
from escrowmq.wire.credential import Credential
from escrowmq.wire.frames import Assembler, Frame, Kind, Pieces, Welcome

ANSWER_SECONDS = 5.0
"""Timeout of a probe."""
GRACE_SECONDS = 0.25
"""Wait for the other responses once one leads: another may lead since a later time."""
FIRST_SECONDS = 1.0
"""The same in the first search, which also checks that all addresses belong to one shard."""
SILENT_SECONDS = 0.4
"""Wait for silent brokers if all others have answered and none of them leads: one of them will lead soon, and only the
next search probes it again."""
KEPT_SECONDS = 1.0
"""Validity of a response that arrives between two searches."""
CALM_SECONDS = 5.0
"""For so long after a broker rejected a request as a standby, its claim to lead counts last."""

CONNECT_SECONDS = 5.0
"""Timeout for connecting and the welcome; a firewall may drop all packets."""
_WELCOME_BYTES = 64 << 10
_TLS_ALERT = b"\x15\x03"

_log = logging.getLogger(__name__)


class Met:
    """A broker that has sent its welcome, and the connection to it, which nobody reads yet."""

    def __init__(
        self, address: Address, hello: Json, open_channel: Channel, assembler: Assembler, welcome: Welcome
    ) -> None:
        self.address = address
        self.hello = hello
        self.channel = open_channel
        self.assembler = assembler
        self.welcome = welcome

    def close(self) -> None:
        """Close the connection to the broker."""
        self.channel.close()


def meet(address: Address, tls: ssl.SSLContext | None = None, credential: Credential | None = None) -> Met:
    """Connect to a broker, greet it and read its welcome. Raises EscrowError with the reason if that fails, Denied for
    a token that the broker does not accept; only the greeting was sent then."""
    token = credential.read() if credential is not None else None
    deadline = time.monotonic() + CONNECT_SECONDS
    try:
        open_channel = channel.connect(address.host, address.port, CONNECT_SECONDS, tls)
    except OSError as problem:
        raise unsent(_reason(problem)) from None
    try:
        return _greet(address, open_channel, deadline, token)
    except BaseException as raised:
        open_channel.close()
        if isinstance(raised, OSError):
            raise unsent(_reason(raised)) from None
        raise


def _reason(problem: OSError) -> str:
    if isinstance(problem, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {problem.verify_message}"
    if isinstance(problem, ssl.SSLError):
        return f"TLS fails: {problem.reason or problem} (does the broker speak TLS?)"
    return str(problem)


def _greet(address: Address, open_channel: Channel, deadline: float, token: str | None) -> Met:
    greeting: Pieces = [frames.hello(token)]
    assembler = Assembler(_WELCOME_BYTES)
    came: list[Frame] = []
    first = b""
    while not came:
        if greeting:  # with TLS only after the handshake, which runs while receiving
            greeting = frames.drop_bytes(greeting, open_channel.send(greeting))
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        open_channel.settimeout(min(left, 0.05) if greeting else left)
        target = assembler.target()
        try:
            count = open_channel.recv_into(target)
        except TimeoutError:
            continue
        if not count:
            asks = "" if open_channel.tls else " (does it want TLS? then write escrows:// in place of escrow://)"
            raise unsent(f"it closed the connection instead of answering{asks}")
        first = first or bytes(target[:2])
        if first == _TLS_ALERT:
            raise unsent("it wants TLS: write escrows:// in place of escrow://")
        try:
            came = assembler.filled(count)
        except EscrowError as problem:
            raise unsent(f"it does not speak EscrowMQ's protocol: {problem.message}") from None
    if came[0].kind == Kind.ERROR:
        raise frames.read_refusal(came[0])
    if came[0].kind != Kind.WELCOME or len(came) > 1 or assembler.waiting:
        raise unsent("it answered something else than a welcome")
    welcome, hello = frames.read_welcome(came[0])
    return Met(address, hello, open_channel, assembler, welcome)


class Seeker:
    """The addresses of one shard's brokers. ``meet`` connects to one and reads its welcome; it raises EscrowError.

    ``follow``: whether addresses that brokers name count, too. ``stays``: it must always be the same shard; with more
    than one address it must anyway.
    """

    def __init__(
        self,
        given: Sequence[Address],
        meet: Callable[[Address], Met],
        *,
        follow: bool = True,
        stays: bool = False,
        scheme: str = "escrow",
    ) -> None:
        self.given = tuple(given)
        self.shard: int | None = None
        self.requested_pause = 0.0
        """Pause (s) that standbys requested in the last search."""
        self._meet = meet
        self._follow = follow
        self._scheme = scheme
        self._stays = stays or len(given) > 1
        self._exactly = len(given) == 1 and not follow
        self._named: list[Address] = []
        self._hint: Address | None = None
        self._refuser: Address | None = None
        self._refused_at = 0.0
        self._logged: dict[Address, str] = {}  # logged warnings, one per address
        self._one_search = threading.Lock()
        self._news = threading.Condition()
        self._is_searching = False
        self._probing: set[Address] = set()
        self._answers: dict[Address, Met | EscrowError] = {}  # for this search or the next
        self._arrived_at: dict[Address, float] = {}
        self._probed_before: set[Address] = set()  # probed by an earlier search that found no leader
        self._silent: set[Address] = set()  # did not answer a search, and not since
        self._searching = False  # the last search found no leader
        self._closed = False

    @property
    def known(self) -> tuple[Address, ...]:
        """All known addresses of the shard's brokers, the given ones first."""
        return (*self.given, *self._named)

    def refused(self, by: Address, leader: object) -> None:
        """Note that the broker at ``by`` rejected a request as a standby, and the URL of the leader that it names: that
        one is probed first, and for a while a claim of ``by`` to lead counts last."""
        self._refuser, self._refused_at = by, time.monotonic()
        self._hint = self._accept(leader) or self._hint

    def on_fork(self) -> None:
        """Reset in a forked child: the probing threads are the parent's."""
        self._one_search, self._news = threading.Lock(), threading.Condition()
        self._is_searching = self._searching = False
        self._probing, self._answers = set(), {}

    def close(self) -> None:
        """Close all connections of probes, also of later responses."""
        with self._news:
            self._closed = True
            left, self._answers = list(self._answers.values()), {}
            self._news.notify_all()
        _close_all(left)

    def seek(self) -> Met:
        """Search for the broker that leads, and return it, connected. Raises ``unsent(...)`` if none is found,
        Denied(UNAUTHENTICATED) if the token is not accepted, Misuse(BAD_URL) if the addresses that were given are of
        several shards."""
        with self._one_search:
            first, self._hint = ([] if self._hint is None else [self._hint]), None
            leader = self._search([*first, *self.known], ANSWER_SECONDS)
        shard = leader.hello.get("shard")
        if self.shard is not None and shard != self.shard:  # of one address, which may have another folder by now
            self._named = []
        self.shard = shard
        self._learn(leader.hello, leader.address)
        return leader

    def newer(self, than: Met) -> bool:
        """Probe the other brokers. Returns whether one of them leads the shard with a later epoch than the broker
        ``than``, which is not probed; False if another search is running. Only answers: the leader found is neither
        stored nor kept connected, and the caller finds it again by :meth:`seek`."""
        others = [address for address in self.known if address != than.address]
        if not others or not self._one_search.acquire(blocking=False):
            return False
        try:
            leader = self._search(others, FIRST_SECONDS, than.address)
        except EscrowError:
            return False
        finally:
            self._one_search.release()
        leader.close()
        return leader.hello.get("shard") == than.hello.get("shard") and _epoch(leader) > _epoch(than)

    def _search(self, addresses: Sequence[Address], seconds: float, but: Address | None = None) -> Met:
        with self._news:
            self._is_searching, self.requested_pause = True, 0.0
            old = [address for address, at in self._arrived_at.items() if time.monotonic() - at > KEPT_SECONDS]
            stale = [self._answers.pop(address) for address in old if address in self._answers]
            self._probed_before = set(self._probing)
        _close_all(stale)
        search = _Search(self, seconds, but)
        leader: Met | None = None
        try:
            leader = search.leader(addresses)
            return leader
        finally:
            late: list[Met | EscrowError] = []
            with self._news:
                self._is_searching, self._searching = False, leader is None and but is None
                self._silent |= self._probing & set(search.open)
                if not self._searching:
                    late, self._answers = list(self._answers.values()), {}
            _close_all([answer for answer in (*search.found, *late) if answer is not leader])

    # Responses

    def _accept(self, url: object) -> Address | None:
        address = named_address(url, self._scheme)
        if address is None or not self._follow:
            return None
        return address if address in self.given or may_follow(address, self.given) else None

    def _learn(self, hello: Json, leads: Address | None = None) -> list[Address]:
        """Store the addresses that a broker of this shard names; return the new ones. ``leads``: its address if it
        leads; its list is complete then."""
        replicas = hello.get("replicas")
        candidates = [hello.get("leader"), *(replicas[: 2 * MOST] if isinstance(replicas, list) else [])]
        believed = [leads, *map(self._accept, candidates)]
        named = [address for address in dict.fromkeys(believed) if address is not None and address not in self.given]
        before = self._named
        if leads is None or not replicas:
            named = list(dict.fromkeys([*before, *named]))
        self._named = named[: max(MOST - len(self.given), 0)]
        if self._named:
            self._stays = True
        return [address for address in self._named if address not in before]

    def _leads(self, met: Met) -> bool:
        return self._exactly or met.hello.get("role", "leader") == "leader"

    def _stranger(self, met: Met) -> str | None:
        """Return the reason, as text, why a broker does not belong to the shard; None if it may belong to it."""
        shard = _shard(met)
        if not self._stays or self.shard is None or shard is None or shard == self.shard:
            return None
        return f"it was shard {self.shard:08x} and now says {shard:08x}: is that another data folder?"

    # Probing

    def _probe(self, address: Address) -> None:
        """Start a thread that connects to an address and stores the response, unless one is running or a response is
        there."""
        with self._news:
            if address in self._probing or address in self._answers or self._closed:
                return
            self._probing.add(address)
        try:
            threading.Thread(target=self._probe_on_thread, args=(address,), name="escrowmq-seek", daemon=True).start()
        except RuntimeError as problem:
            self._on_answer(address, unsent(f"no thread is to be had: {problem}"))

    def _probe_on_thread(self, address: Address) -> None:
        self._on_answer(address, self._answer(address))

    def _answer(self, address: Address) -> Met | EscrowError:
        try:
            return self._meet(address)
        except EscrowError as problem:
            return problem
        except Exception as problem:
            _log.exception("%s could not be asked", address.url)
            return unsent(f"it could not be asked: {problem!r}")

    def _on_answer(self, address: Address, answer: Met | EscrowError) -> None:
        with self._news:
            self._probing.discard(address)
            wanted = (self._is_searching or self._searching) and not self._closed
            if not isinstance(answer, EscrowError):
                self._silent.discard(address)
            if wanted:
                self._answers[address], self._arrived_at[address] = answer, time.monotonic()
                self._news.notify_all()
        if not wanted:
            _close_all([answer])


class _Search:
    """One search of at most ``seconds``. ``but``: an address that is not probed."""

    def __init__(self, seeker: Seeker, seconds: float, but: Address | None) -> None:
        self._seeker = seeker
        self._seconds = seconds
        self._but = but
        self._asked: list[Address] = []
        self.found: list[Met] = []
        self._reasons: dict[Address, str] = {}
        self._permanent: EscrowError | None = None  # waiting does not help
        self._first = seeker.shard is None

    def leader(self, addresses: Sequence[Address]) -> Met:
        """Probe these addresses and those that their brokers name. Returns the broker that leads; raises EscrowError if
        none does."""
        seeker = self._seeker
        deadline = time.monotonic() + self._seconds
        if seeker.known == tuple(addresses[:1]) == tuple(addresses):  # one address: probe on this thread
            self._asked.append(addresses[0])
            self._take(addresses[0], seeker._answer(addresses[0]))
        else:
            self._probe(addresses)
        while self.open:
            with seeker._news:
                there = self._list_arrived()
                if not there:
                    left = deadline - time.monotonic()
                    if left <= 0 or seeker._closed:
                        break
                    seeker._news.wait(left)
                    there = self._list_arrived()
                answers = [(address, seeker._answers.pop(address)) for address in there]
            for address, answer in answers:
                self._take(address, answer)
            deadline = min(deadline, time.monotonic() + self._patience())
        self._check_one_shard()
        leading = [met for met in self.found if seeker._leads(met)]
        if not leading:
            raise self._no_leader()
        lapsed = time.monotonic() - seeker._refused_at > CALM_SECONDS
        return max(
            leading,
            key=lambda met: (lapsed or met.address != seeker._refuser, _epoch(met), -self._asked.index(met.address)),
        )

    def _patience(self) -> float:
        """Return how long to wait for the missing responses (s)."""
        if any(self._seeker._leads(met) for met in self.found):
            return FIRST_SECONDS if self._first else GRACE_SECONDS
        if not (self.found or self._reasons):
            return self._seconds
        new = set(self.open) - self._seeker._probed_before  # earlier searches waited for the others
        return 0.0 if not new else GRACE_SECONDS if new <= self._seeker._silent else SILENT_SECONDS

    @property
    def open(self) -> list[Address]:
        """The addresses that were probed and have not responded."""
        done = {met.address for met in self.found} | set(self._reasons)
        return [address for address in self._asked if address not in done]

    def _list_arrived(self) -> list[Address]:
        """Return the addresses whose responses have arrived. Requires the seeker's lock."""
        return [address for address in self.open if address in self._seeker._answers]

    def _probe(self, addresses: Sequence[Address]) -> None:
        for address in dict.fromkeys(addresses):
            if address not in self._asked and address != self._but and len(self._asked) < 2 * MOST:
                self._asked.append(address)
                self._seeker._probe(address)

    def _take(self, address: Address, answer: Met | EscrowError) -> None:
        seeker = self._seeker
        if isinstance(answer, EscrowError):
            self._reasons[address] = answer.message
            if isinstance(answer, Denied | Misuse):
                self._permanent = answer
            return
        stranger = seeker._stranger(answer)
        if stranger is None and address not in seeker.given and self._is_foreign(answer):
            stranger = "it is of another shard"
        if stranger is not None:
            if seeker._logged.get(address) != stranger:
                seeker._logged[address] = stranger
                _log.warning("%s is not used: %s", address.url, stranger)
            self._reasons[address] = stranger
            _close_all([answer])
            return
        self.found.append(answer)
        if not seeker._leads(answer):
            new = seeker._learn(answer.hello)
            hint = seeker._accept(answer.hello.get("leader"))
            again_ms = answer.hello.get("again_ms")
            if isinstance(again_ms, int):
                seeker.requested_pause = max(seeker.requested_pause, again_ms / 1000)
            if not any(seeker._leads(met) for met in self.found):
                self._probe(new if hint is None else [hint, *new])

    def _is_foreign(self, named: Met) -> bool:
        """Return whether a broker at an address that another broker named is of another shard than the given
        addresses."""
        shards = {_shard(met) for met in self.found if met.address in self._seeker.given} - {None}
        return bool(shards) and _shard(named) not in shards

    def _check_one_shard(self) -> None:
        given = [met for met in self.found if met.address in self._seeker.given and _shard(met) is not None]
        for met in given[1:]:
            if (one := _shard(given[0])) != (other := _shard(met)):
                raise Misuse(
                    Code.BAD_URL,
                    f"{given[0].address.url} is shard {one or 0:08x} and {met.address.url} is shard {other or 0:08x}: "
                    "they are not brokers of one shard",
                    "a | stands between the brokers of one shard, a comma between shards",
                )

    def _no_leader(self) -> EscrowError:
        if self._permanent is not None and not self.found:
            return self._permanent
        for met in self.found:
            leader = met.hello.get("leader")
            self._reasons[met.address] = f"it is a standby, {leader if isinstance(leader, str) else 'nobody'} leads"
        for address in self.open:
            self._reasons[address] = "it is silent, or slow"
        if len(self._asked) == 1:
            return unsent(self._reasons[self._asked[0]])
        return unsent("; ".join(f"{address.url}: {self._reasons[address]}" for address in self._asked))


def _shard(met: Met) -> int | None:
    """Return the shard that a broker reported; None for a standby that has not read the log yet: the number of its
    empty folder is replaced by the log's."""
    shard = met.hello.get("shard")
    if not isinstance(shard, int) or (met.hello.get("role", "leader") != "leader" and _epoch(met) <= 0):
        return None
    return shard


def _epoch(met: Met) -> int:
    epoch = met.hello.get("epoch")
    return epoch if isinstance(epoch, int) else -1


def _close_all(answers: Sequence[Met | EscrowError]) -> None:
    for answer in answers:
        if not isinstance(answer, EscrowError):
            answer.close()
