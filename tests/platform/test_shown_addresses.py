"""Addresses as they are shown: nothing secret is in them, and everything else is."""

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.platform.listening import shown_address


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql+psycopg://u@h/db?password=X", "postgresql+psycopg://u@h/db?password=***"),
        (
            "postgresql://u:X@h/db?sslmode=require&sslpassword=X",
            "postgresql://u:***@h/db?sslmode=require&sslpassword=***",
        ),
        ("mysql+pymysql://u:p@X@h:3306/db", "mysql+pymysql://u:***@h:3306/db"),
        ("postgresql://u:a?X@h/db?a=1", "postgresql://u:***@h/db?a=1"),
        ("postgresql://h/db?p%61ssword=X", "postgresql://h/db?p%61ssword=***"),
        ("kafka://h:9092/t?client.id=a@b", "kafka://h:9092/t?client.id=a@b"),
        ("http://[::1]:80/x?y=@", "http://[::1]:80/x?y=@"),
        ("redis://:X@h:6379/0", "redis://:***@h:6379/0"),
        ("kafka://h:9092/t?sasl.password=X;client.id=a", "kafka://h:9092/t?sasl.password=***;client.id=a"),
        ("https://h/hook?access_token=X", "https://h/hook?access_token=***"),
        ("sqlite:///shop.db", "sqlite:///shop.db"),
        ("escrow://a:7700|b:7700,c:7700", "escrow://a:7700|b:7700,c:7700"),
        ("escrow://127.0.0.1:port", "escrow://127.0.0.1:port"),
        ("file:./data", "file:./data"),
    ],
)
def test_secrets_are_hidden_and_nothing_else(address: str, shown: str) -> None:
    assert shown_address(address) == shown


@given(st.text(min_size=8, max_size=20), st.sampled_from(["password", "sslpassword", "PWD", "client_secret", "token"]))
def test_no_secret_is_shown_wherever_it_stands(secret: str, name: str) -> None:
    text = "Zq9-" + quote(secret, safe="")
    for address in (
        f"db://user:{text}@host/name",
        f"db://host/name?a=1&{name}={text}",
        f"db://u:{text}@h?{name}={text}",
    ):
        shown = shown_address(address)
        assert "***" in shown
        assert text not in shown.replace("***", "")
