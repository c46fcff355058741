"""The rights file: what it says, and the errors of what cannot be used."""

import datetime as dt

import pytest

from escrowmq.errors import Code, Misuse
from escrowmq.rights import Access, Need, load, parse

HASH = "a" * 64


def test_everything_that_a_file_can_say():
    rights = parse(
        f"""
[roles.till]
allow = ["send sales", "produce till"]
[principals.shop]
tokens = [{{ sha256 = "{HASH}", id = "abcdefgh", name = "2026-11", expires = 2027-02-01 }},
          {{ sha256 = "{"b" * 64}", expires = 2027-02-01T12:00:00+01:00 }}]
certificates = ["shop.prod.example"]
roles = ["till", "reader"]
allow = ["consume cart"]
limits = {{ rows_per_s = 20_000, bytes_per_s = "50MB", open_transactions = 7, connections = 2 }}
""".encode()
    )
    shop = rights.principals["shop"]
    assert [str(rule) for rule in shop.rules] == ["consume cart", "send sales", "produce till", "read *", "view"]
    assert (shop.limits.rows_per_s, shop.limits.bytes_per_s) == (20_000, 50_000_000)
    assert rights.certificates == {"shop.prod.example": shop}
    first, second = rights.tokens[HASH], rights.tokens["b" * 64]
    assert first.principal is shop
    assert first.expires_us == dt.datetime(2027, 2, 1, tzinfo=dt.UTC).timestamp() * 1e6
    assert second.expires_us == dt.datetime(2027, 2, 1, 11, tzinfo=dt.UTC).timestamp() * 1e6
    assert shop.rule_for(Need(Access.SEND, "sales")) is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "principals"),
        ("[principals]", "there is no principal"),
        ("[principals.x", "Expected"),
        ("[principals.x]\ntoken = []", "unknown field `token`"),
        ('[principals.x]\nallow = ["sned a"]', "principals.x.allow: 'sned' is no kind of access"),
        ('[principals.x]\nroles = ["oprator"]', "did you mean 'operator'"),
        ("[roles.admin]\nallow = []\n[principals.x]", "roles.admin: this role exists already"),
        ('[principals.x]\ntokens = [{ sha256 = "A" }]', "sha256|match"),
        (f'[principals.x]\ntokens = [{{ sha256 = "{HASH}", expires = "soon" }}]', "is no date"),
        ("[principals.x]\nlimits = { rows_per_s = 0 }", ">= 1"),
        ('[principals.x]\nlimits = { bytes_per_s = "much" }', "bytes_per_s"),
        (
            f'[principals.x]\ntokens = [{{ sha256 = "{HASH}" }}]\n[principals.y]\ntokens = [{{ sha256 = "{HASH}" }}]',
            "x has this token",
        ),
        ('[principals.x]\ncertificates = ["a"]\n[principals.y]\ncertificates = ["a"]', "x has 'a', too"),
        ('[principals."a b"]', "match|regex"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_place(text, problem):
    with pytest.raises(Misuse, match=problem) as caught:
        parse(text.encode(), "rights.toml")
    assert caught.value.code is Code.BAD_SETTING
    assert "rights.toml" in caught.value.message


def test_bytes_that_are_no_text():
    with pytest.raises(Misuse):
        parse(b"\xff\xfe")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(Misuse, match="No such file"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize(("mode", "allowed"), [(0o777, False), (0o702, False), (0o1777, True), (0o775, True)])
def test_a_file_that_others_can_replace_is_refused(tmp_path, mode, allowed):
    folder = tmp_path / "conf"
    folder.mkdir()
    (folder / "rights.toml").write_text("[principals.x]\n")
    folder.chmod(mode)
    if allowed:
        assert load(folder / "rights.toml").principals
        return
    with pytest.raises(Misuse, match="other users can put another file in its place"):
        load(folder / "rights.toml")
