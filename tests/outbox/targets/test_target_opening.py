"""A URL names a target; nothing is connected to, and what is missing is named."""

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from escrowmq.errors import Code, Misuse
from escrowmq.outbox.targets.opening import open_target, read_options
from escrowmq.platform.listening import shown_address


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("escrow://127.0.0.1:1", "EscrowMQ"),
        ("kafka://127.0.0.1:1,127.0.0.1:2", "kafka"),
        ("amqp://127.0.0.1:1/", "rabbitmq"),
        ("redis://127.0.0.1:1/0", "redis"),
    ],
)
def test_each_scheme_has_its_target(url: str, name: str) -> None:
    target = open_target(url)
    assert target.promise.name == name
    target.close()


def test_an_unknown_scheme_is_misuse() -> None:
    with pytest.raises(Misuse) as caught:
        open_target("ftp://host")
    assert caught.value.code == Code.BAD_URL


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "aio_pika":
            raise ModuleNotFoundError(f"No module named {name!r}", name="aio_pika")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "escrowmq.outbox.targets.rabbitmq", raising=False)
    with pytest.raises(Misuse, match=r"escrowmq\[rabbitmq\]") as caught:
        open_target("amqp://127.0.0.1/")
    assert caught.value.code == Code.MISSING_PACKAGE


def test_options_are_checked_and_read() -> None:
    url = "redis://127.0.0.1:1/0"
    assert read_options(url, {"timeout": "2.5", "dedup_seconds": "7", "durability": "everysec"}) == {
        "timeout": 2.5,
        "dedup_seconds": 7,
        "durability": "everysec",
    }
    assert read_options("amqp://h/", {"declare": "false"}) == {"declare": False}
    with pytest.raises(Misuse, match="no option"):
        open_target(url, flavour="mild")
    for bad in ({"timeout": "soon"}, {"dedup_seconds": "1.5"}):
        with pytest.raises(Misuse, match="such as"):
            read_options(url, bad)


def test_values_that_make_no_sense_are_misuse() -> None:
    with pytest.raises(Misuse, match="one of always, everysec, memory"):
        open_target("redis://127.0.0.1:1/0", durability="perhaps")
    with pytest.raises(Misuse, match="quorum or classic"):
        open_target("amqp://127.0.0.1:1/", queue_type="mirrored")


def test_passwords_are_not_shown() -> None:
    for url in ("amqp://me:secret@host/", "redis://:secret@host:1/0", "kafka://host:1?sasl.password=secret"):
        assert "secret" not in shown_address(url)
    assert shown_address("escrow://a:7700,b:7700") == "escrow://a:7700,b:7700"


def test_a_target_of_another_package_is_found_by_its_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "our_target.py").write_text(
        "class Ours:\n    def __init__(self, url, *, tries=1):\n        self.url, self.tries = url, tries\n"
    )
    (tmp_path / "our_package-1.dist-info").mkdir()
    (tmp_path / "our_package-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: our-package\nVersion: 1\n"
    )
    (tmp_path / "our_package-1.dist-info" / "entry_points.txt").write_text(
        "[escrowmq.targets]\nours = our_target:Ours\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made: Any = open_target("ours://there", **read_options("ours://there", {"tries": "3"}))
    assert (made.url, made.tries) == ("ours://there", 3)
    with pytest.raises(Misuse, match="ours"):
        open_target("theirs://there")
