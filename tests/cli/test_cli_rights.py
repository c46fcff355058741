"""``escrowmq rights``, ``tokens`` and ``certs``: what they answer, and what they leave untouched."""

import tomllib

import pytest

from escrowmq.cli.failures import Exit
from escrowmq.rights import parse

FILE = """
[principals.shop]
tokens = []
allow = ["send orders", "consume cart*", "view"]
"""


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ("send orders", True),
        ("send orders*", False),
        ("send order", False),
        ("consume cart", True),
        ("consume cart-2", True),
        ("consume cart-*", True),
        ("consume *", False),
        ("view", True),
        ("admin", False),
    ],
)
def test_check_answers_for_a_name_or_the_whole_prefix(run, tmp_path, words, allowed):
    (tmp_path / "rights.toml").write_text(FILE)
    ran = run("rights", "check", "shop", *words.split(), "--rights", str(tmp_path / "rights.toml"), "--json")
    assert ran.code == (0 if allowed else Exit.DENIED)
    assert ran.json["allowed"] is allowed


@pytest.mark.parametrize("existing", ["rights.toml", "tokens/service.token"])
def test_init_writes_nothing_if_a_file_exists(run, tmp_path, existing):
    folder = tmp_path / "new"
    (folder / existing).parent.mkdir(parents=True)
    (folder / existing).write_text("mine")
    ran = run("rights", "init", str(folder / "rights.toml"), "--tokens", str(folder / "tokens"))
    assert ran.code != 0
    assert "exists" in ran.err
    assert [path.read_text() for path in folder.rglob("*") if path.is_file()] == ["mine"]


@pytest.mark.parametrize("name", ["2026-11", 'of "Ann"', "back\\slash", "Zürich", "\N{ROCKET}"])
def test_a_name_of_a_token_is_written_so_that_it_is_read_again(run, name):
    made = run("tokens", "new", "--name", name, "--expires", "2027-02-01", "--json").json
    content = f"[principals.x]\ntokens = [{made['entry']}]\n"
    [token] = parse(content.encode()).tokens.values()
    assert token.name == tomllib.loads(content)["principals"]["x"]["tokens"][0]["name"] == name


def test_an_authority_without_its_key_is_not_replaced(run, tmp_path):
    folder = tmp_path / "certs"
    assert run("certs", "dev", str(folder)).code == 0
    before = (folder / "ca.pem").read_bytes()
    (folder / "ca.key").unlink()
    ran = run("certs", "dev", str(folder))
    assert ran.code != 0
    assert "ca.key" in ran.err
    assert (folder / "ca.pem").read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {"broker.key", "broker.pem", "ca.pem"}
