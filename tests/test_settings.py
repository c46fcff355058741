"""The settings table: defaults, TOML, environment and flags; every value checked, every name known."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq import settings
from escrowmq.errors import Code, Misuse
from escrowmq.settings import BYTES, SECONDS, BrokerSettings, parse_quantity

FIELDS = dataclasses.fields(BrokerSettings)


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_line_has_a_unit_and_a_reason(field: dataclasses.Field[Any]) -> None:
    units = {settings.SECONDS, settings.BYTES, settings.COUNT, settings.CHOICE, settings.FLAG, settings.TEXT}
    assert field.metadata["unit"] in units
    assert len(field.metadata["reason"]) > 10
    assert (field.metadata["unit"] == settings.CHOICE) == bool(field.metadata["choices"])


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.name)
def test_every_setting_can_be_given_as_text(field: dataclasses.Field[Any]) -> None:
    assert getattr(BrokerSettings.of({field.name: str(field.default)}), field.name) == field.default


@pytest.mark.parametrize("field", [f for f in FIELDS if f.metadata["least"]], ids=lambda f: f.name)
def test_nothing_below_its_least(field: dataclasses.Field[Any]) -> None:
    least = field.metadata["least"]
    assert getattr(BrokerSettings.of({field.name: least}), field.name) == least
    with pytest.raises(Misuse, match=field.name):
        BrokerSettings.of({field.name: least * 0.5 if field.metadata["unit"] == SECONDS else least - 1})


def test_the_defaults_are_those_that_the_documents_name() -> None:
    assert BrokerSettings() == BrokerSettings.of({})
    table = BrokerSettings()
    assert (table.transaction_timeout, table.check_interval, table.check_max) == (6.0, 30.0, 15)
    assert table.half_retention == 72 * 3600
    assert table.checks_exhausted == "park"
    assert table.retention == 7 * 86400
    assert table.max_body_bytes == 4 << 20


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("500ms", SECONDS, 0.5),
        ("8min", SECONDS, 480),
        ("8 MIN", SECONDS, 480),
        ("72h", SECONDS, 259_200),
        ("7d", SECONDS, 604_800),
        ("250us", SECONDS, 0.00025),
        (" 1.5 ", SECONDS, 1.5),
        ("4MiB", BYTES, 4 << 20),
        ("1gib", BYTES, 1 << 30),
        ("2kB", BYTES, 2000),
        ("17", BYTES, 17),
    ],
)
def test_quantities_as_people_write_them(text: str, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value)


@given(st.floats(0, 1e6), st.sampled_from(["us", "ms", "s", "min", "h", "d"]))
def test_a_number_and_a_unit_multiply(number: float, unit: str) -> None:
    factor = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}[unit]
    assert parse_quantity(f"{number:.6f}{unit}", SECONDS) == pytest.approx(float(f"{number:.6f}") * factor)


@pytest.mark.parametrize("text", ["", "min", "-1s", "1e3", "4MiB", "1 2", "1,5s", "nan", "inf", "0x10"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="seconds"):
        parse_quantity(text, SECONDS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"check_max": "many"}, "check_max = 'many': not readable as count"),
        ({"check_max": 0}, "check_max = 0: a number of count, at least 1"),
        ({"check_max": True}, "check_max = True"),
        ({"check_max": 2.5}, "check_max = 2.5"),
        ({"retention": float("inf")}, "retention = inf"),
        ({"retention": False}, "retention = False"),
        ({"max_body_bytes": float("inf")}, "max_body_bytes = inf"),
        ({"check_interval": float("nan")}, "check_interval = nan"),
        ({"check_interval": "soon"}, "check_interval = 'soon'"),
        ({"checks_exhausted": "drop"}, "one of park, rollback"),
        ({"auto_create_topics": "maybe"}, "auto_create_topics = 'maybe'"),
        ({"segment_bytes": "1KiB"}, "segment_bytes"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(Misuse) as caught:
        BrokerSettings.of(values)
    assert caught.value.code is Code.BAD_SETTING
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("unknown", "meant"), [("check_maxx", "check_max"), ("transaction_time_out", "transaction_timeout")]
)
def test_an_unknown_name_brings_the_nearest_right_one(unknown: str, meant: str) -> None:
    with pytest.raises(Misuse) as caught:
        BrokerSettings.of({unknown: 1})
    assert caught.value.hint == f"did you mean {meant!r}?"


def test_flags_win_over_the_environment_and_that_over_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "broker.toml"
    config.write_text('[broker]\ncheck_max = 3\ncheck_interval = "10s"\ntransaction_timeout = 1\n')
    monkeypatch.setenv("ESCROWMQ_CHECK_INTERVAL", "20s")
    monkeypatch.setenv("ESCROWMQ_TRANSACTION_TIMEOUT", "2s")
    loaded = BrokerSettings.load(config, {"transaction_timeout": "500ms", "check_max": None})
    assert (loaded.check_max, loaded.check_interval, loaded.transaction_timeout) == (3, 20.0, 0.5)


@pytest.mark.parametrize("content", [b"[broker\n", b"\xff\xfe", b"[broker]\ncheck_max = \n"])
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes) -> None:
    config = tmp_path / "broker.toml"
    config.write_bytes(content)
    with pytest.raises(Misuse, match=r"broker\.toml"):
        BrokerSettings.load(config)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match=r"absent\.toml"):
        BrokerSettings.load(tmp_path / "absent.toml")
