"""Address of a log in Kafka: ``kafka://HOST[:PORT][,HOST[:PORT]...]/TOPIC[/PARTITION][?SETTING=VALUE&...]``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, unquote, urlencode

from escrowmq.errors import Code, Misuse
from escrowmq.platform.properties import read_properties

FORM = "kafka://HOST[:PORT][,HOST[:PORT]...]/TOPIC[/PARTITION][?SETTING=VALUE&...]"
SCHEME = "kafka://"
BASE = ".base"  # suffix of the topic of base snapshots
REPLICAS = 3
_DEFAULT_PORT = 9092
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,244}")
_LARGEST_PARTITION = (1 << 31) - 1


@dataclass(frozen=True)
class KafkaAddress:
    """One partition of one topic. Its settings may be secrets and never appear in its representation."""

    servers: tuple[str, ...]
    topic: str
    partition: int = 0
    replicas: int = REPLICAS
    """Required number of replicas of the topic: ``?replication=N``. With fewer than three the user accepts the risk."""
    settings: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Settings of librdkafka: ``security.protocol`` and so on."""

    @classmethod
    def parse(cls, url: str) -> KafkaAddress:
        """Parse a URL. ``?config=FILE`` names a file with more settings, one ``NAME=VALUE`` per line; settings in the
        URL override them. Raises Misuse(BAD_URL) for the URL, Misuse(BAD_SETTING) for the file."""
        if not isinstance(url, str) or not url.startswith(SCHEME):
            raise _bad_url(f"{redact(str(url))!r} is not the address of a log in Kafka")
        place, _, query = url.removeprefix(SCHEME).partition("?")
        hosts, _, path = place.partition("/")
        if "@" in hosts:
            hint = "?config=FILE: a file with sasl.username=NAME and sasl.password=PASSWORD"
            raise _bad_url("a user name and a password are not accepted before the hosts", hint)
        servers = tuple(_server(host) for host in hosts.split(","))
        topic, *rest = path.rstrip("/").split("/")
        topic = unquote(topic)
        if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
            raise _bad_url(f"{topic!r} is not the name of a topic", "1 to 244 of A-Z a-z 0-9 . _ -")
        sound = not rest or (len(rest) == 1 and rest[0].isascii() and rest[0].isdigit())
        partition = int(rest[0][:12]) if rest and sound else 0
        if not sound or partition > _LARGEST_PARTITION:
            raise _bad_url(f"{'/'.join(rest)!r} is not the number of a partition")
        replicas, settings = REPLICAS, dict[str, str]()
        for name, value in parse_qsl(query, keep_blank_values=True):
            if name in settings:
                raise _bad_url(f"{name} is given twice")
            settings[name] = value
        if (file := settings.pop("config", None)) is not None:
            settings = {**read_properties(file), **settings}
        if (wanted := settings.pop("replication", None)) is not None:
            if not re.fullmatch("[1-9][0-9]{0,2}", wanted):
                raise _bad_url(f"replication = {wanted!r}", "the number of replicas, such as 3")
            replicas = int(wanted)
        for name in settings:
            if "." not in name:
                hint = "replication, config, or one of librdkafka's: security.protocol ...; in a value & is %26"
                raise _bad_url(f"there is no setting {name!r}", hint)
        return cls(servers, topic, partition, replicas, tuple(settings.items()))

    @property
    def base_topic(self) -> str:
        return self.topic + BASE

    @property
    def name(self) -> str:
        return f"{self.topic}/{self.partition}"

    @property
    def enough(self) -> int:
        """Number of replicas that must have a record before it is acknowledged: a majority; the rest may be lost."""
        return self.replicas // 2 + 1

    @property
    def url(self) -> str:
        """The complete URL, secrets included."""
        settings = dict(self.settings)
        if self.replicas != REPLICAS:
            settings["replication"] = str(self.replicas)
        return f"{self}?{urlencode(settings, quote_via=quote)}" if settings else str(self)

    def __str__(self) -> str:
        return f"{SCHEME}{','.join(self.servers)}/{self.topic}/{self.partition}"


def redact(url: str) -> str:
    """Remove possible secrets from ``url``, for logs and screens."""
    return re.sub(r"//[^/@]*@", "//***@", url).partition("?")[0]


def _server(text: str) -> str:
    match = _HOST.fullmatch(text)
    if match is None or int(match["port"] or 1) not in range(1, 65536):
        raise _bad_url(f"{text!r} is not HOST or HOST:PORT")
    return f"{match['host']}:{match['port'] or _DEFAULT_PORT}"


def _bad_url(message: str, hint: str = FORM) -> Misuse:
    return Misuse(Code.BAD_URL, message, hint)
