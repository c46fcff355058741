"""docs/http.md: its commands run as they stand, and their answers are of the shape that it shows."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from escrowmq.gateway import GatewaySettings
from escrowmq.settings import parse_quantity

TEXT = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
TOLD = {"name", "code", "text", "state", "refused", "key", "decided_by", "group", "topic", "message", "hint", "attempt"}
"""Fields whose values are always the same."""


def curl(command: str, url: str, known: dict[str, str]) -> Any:
    """What ``curl`` would get, for the few options that the page uses."""
    for name, value in known.items():
        command = command.replace(f"${name}", value)
    words = shlex.split(command)
    assert words.pop(0) == "curl"
    method, headers, body, target = "GET", {}, None, ""
    while words:
        word = words.pop(0)
        if word == "-X":
            method = words.pop(0)
        elif word == "-H":
            name, _, value = words.pop(0).partition(": ")
            headers[name] = value
        elif word in ("-d", "--data-binary"):
            method, body = "POST", words.pop(0)
        else:
            target = word
    target = target.replace("http://127.0.0.1:7780", url)
    return httpx.request(method, target, headers=headers, content=body, trust_env=False, timeout=60).json()


def same_shape(given: Any, shown: Any, place: str = "") -> None:
    if isinstance(shown, dict):
        assert set(given) == set(shown), place
        for name in shown:
            same_shape(given[name], shown[name], f"{place}.{name}")
            assert name not in TOLD or isinstance(shown[name], dict) or given[name] == shown[name], f"{place}.{name}"
    elif isinstance(shown, list):
        assert len(given) == len(shown), place
        for one, other in zip(given, shown, strict=True):
            same_shape(one, other, place)
    else:
        assert type(given) is type(shown), place


def test_the_walk_works_as_it_is_written(run_gateway: Callable[..., Any], brokers: Callable[[str], Any]) -> None:
    client = run_gateway(brokers("embedded"))
    blocks = re.findall(r"```(sh|json)\n(.*?)```", TEXT, re.DOTALL)
    known: dict[str, str] = {}
    steps = [(one[1], two[1]) for one, two in itertools.pairwise(blocks) if one[0] == "sh"]
    assert len(steps) >= 8
    for command, shown in steps:
        given = curl(command.strip(), client.url, known)
        same_shape(given, json.loads(shown), command)
        if "transaction_id" in given:
            known["TRANSACTION"] = given["transaction_id"]
        if isinstance(given.get("messages"), list) and "handle" in given["messages"][0]:
            known["HANDLE"] = given["messages"][0]["handle"]
    assert set(known) == {"TRANSACTION", "HANDLE"}


def test_the_table_of_limits_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", TEXT, re.MULTILINE)
    fields = {field.name: field for field in dataclasses.fields(GatewaySettings)}
    assert [name for name, _ in rows] == list(fields)
    for name, shown in rows:
        unit = fields[name].metadata["unit"]
        assert (float(shown) if unit == "count" else parse_quantity(shown, unit)) == fields[name].default, name


def test_every_status_is_documented() -> None:
    from escrowmq.gateway.problems import _BRANCHES, _CODES

    documented = {int(number) for number in re.findall(r"\b([45]\d\d)\b", TEXT.split("## Errors")[1].split("##")[0])}
    assert {*_CODES.values(), *(status for _, status in _BRANCHES)} - {500} <= documented
