"""``escrowmq rights``, ``tokens``, ``whoami`` and ``certs``: access rights, and certificates for development."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from escrowmq.cli.failures import Exit
from escrowmq.cli.options import DEFAULT_URL, Json, Url, Why, admin_at, check_folder
from escrowmq.cli.printing import moment, notice, print_facts, print_json, print_rows
from escrowmq.errors import Code, EscrowError, error

if TYPE_CHECKING:
    from escrowmq.rights import Principal, Rights

rights = typer.Typer(no_args_is_help=True, help="The rights file: principals, and what they may do.")
tokens = typer.Typer(no_args_is_help=True, help="Tokens of principals.")
certs = typer.Typer(no_args_is_help=True, help="Certificates for development and tests.")

DEFAULT_FILE = Path("rights.toml")
RightsFile = Annotated[
    Path, typer.Option("--rights", "-r", envvar="ESCROWMQ_RIGHTS", metavar="FILE", help="The rights file.")
]
_EXAMPLE = """\
# Who may do what on this broker. Give every broker of a cluster the same file: serve --rights rights.toml
# A change takes effect within a second, without a restart; an invalid file changes nothing.
#
# allow: send TOPIC      send messages
#        produce GROUP   prepare and decide transactions of a producer group, answer its check-backs
#        consume GROUP   receive and acknowledge messages of a consumer group
#        read TOPIC      read messages without consuming them, and subscribe a group to the topic
#        act GROUP       dead letters, decisions by hand, reset, pause and limits of a group
#        view            states, listings, metrics and system views
#        admin           create and delete topics, back up, hand over
# A name that ends in * is a prefix. Whatever is not allowed is denied.
#
# roles: reader, spark (read *, view), service (send *, produce *, consume *, read *), operator (read *, view, act *),
#        admin (everything). Define others: [roles.NAME] with allow = [...]

[principals.admin]
tokens = [{{ id = "{admin.identity}", sha256 = "{admin.sha256}" }}]
roles = ["admin"]

[principals.operator]
tokens = [{{ id = "{operator.identity}", sha256 = "{operator.sha256}" }}]
roles = ["operator"]

[principals.service]
tokens = [{{ id = "{service.identity}", sha256 = "{service.sha256}" }}]
# tokens can have name = "2026-11", expires = 2027-02-01; several can be valid at the same time
# certificates = ["shop.prod.example"]  # the first name in a client certificate, in place of a token
allow = ["send orders*", "produce shop", "consume cart", "read orders*"]
# limits = {{ rows_per_s = 20_000, bytes_per_s = "50MB", open_transactions = 100_000, connections = 200 }}

[principals.spark]
tokens = [{{ id = "{spark.identity}", sha256 = "{spark.sha256}" }}]
roles = ["spark"]
"""


@rights.command("init")
def init(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = DEFAULT_FILE,
    folder: Annotated[
        Path | None, typer.Option("--tokens", metavar="FOLDER", help="Write NAME.token files here; print no token.")
    ] = None,
    json: Json = False,
) -> None:
    """Write a rights file with comments: an administrator, an operator, a service and a Spark principal.

    Each one's token is printed once; the file has its SHA-256 only.
    """
    from escrowmq.rights.tokens import new_token

    made = {name: new_token() for name in ("admin", "operator", "service", "spark")}
    token_files = {} if folder is None else {folder / f"{name}.token": token.text for name, token in made.items()}
    for path in (file, *token_files):
        if path.exists():
            raise _exists(path)
    for path, text in token_files.items():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_private(path, text + "\n")
    _write_private(file, _EXAMPLE.format(**made))
    if token_files:
        return notice(f"wrote {file}, and the tokens to {', '.join(map(str, token_files))}")
    if json:
        return print_json({"file": str(file), "tokens": {name: token.text for name, token in made.items()}})
    notice(f"wrote {file}; these tokens are not stored anywhere, so keep them now:")
    print_facts({name: token.text for name, token in made.items()})


def _write_private(file: Path, text: str) -> None:
    """Create a file that its owner alone can read. Raises Rejected(ALREADY_EXISTS), Misuse(BAD_ARGUMENT)."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise _exists(file) from None
    except OSError as problem:
        raise error(Code.BAD_ARGUMENT, f"{file} cannot be written: {problem.strerror}") from None
    with open(descriptor, "w") as opened:
        opened.write(text)


def _exists(file: Path) -> EscrowError:
    return error(Code.ALREADY_EXISTS, f"{file} exists", "name another file")


@rights.command("check")
def check(
    principal: Annotated[str, typer.Argument(help="A principal of the file.")],
    access: Annotated[str, typer.Argument(metavar="ACCESS", help="send, produce, consume, read, act, view or admin.")],
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="A topic or group, if any.")] = None,
    file: RightsFile = DEFAULT_FILE,
    json: Json = False,
) -> None:
    """Show whether a principal has a right, and by which rule. Exit code 7 if not."""
    from escrowmq.rights import Rule

    one = _principal(file, principal)
    try:
        wanted = Rule.parse(f"{access} {name}" if name is not None else access)
    except ValueError as problem:
        raise error(Code.BAD_ARGUMENT, str(problem)) from None
    found = next((rule for rule in one.rules if rule.includes(wanted)), None)
    if json:
        print_json({"allowed": found is not None, "rule": str(found) if found is not None else None})
    elif found is not None:
        print(f"{principal} may: `{found}` allows it")
    if found is None:
        if not json:
            print(f"{principal} may not: it needs `{wanted}`")
        raise typer.Exit(Exit.DENIED)


@rights.command("denied")
def denied(url: Url = DEFAULT_URL, json: Json = False) -> None:
    """Show recent denied calls, and the rule that would allow each."""
    with admin_at(url) as admin:
        answers = admin.denials()
    rows = [{**one, "broker": answer["broker"]} for answer in answers for one in answer["denials"]]
    columns: dict[str, str | Callable[[Any], Any]] = {
        "principal": "principal",
        "needs": lambda row: f'allow = ["{row["needs"]}"]',
        ">times": "count",
        "last": lambda row: moment(row["last_us"]),
    }
    print_rows(rows, json, columns, "no call was denied")
    unknown = sum(answer["unauthenticated"] for answer in answers)
    if unknown and not json:
        notice(f"{unknown:,} greetings had no valid token or certificate")


@rights.command("reload")
def reload(url: Url = DEFAULT_URL, why: Why = None, json: Json = False) -> None:
    """Make each broker read its rights file again now. An invalid file changes nothing, and is reported."""
    with admin_at(url) as admin:
        rows = admin.reload_rights(why=why)
    print_rows(rows, json, {"broker": "broker", "rights": "rights", "changed": "changed"}, "no broker")


@tokens.command("new")
def new(
    name: Annotated[str, typer.Option("--name", help="A name for the token, such as the month.")] = "",
    expires: Annotated[
        datetime.datetime | None,
        typer.Option("--expires", formats=["%Y-%m-%d"], help="The day from which it is invalid."),
    ] = None,
    json: Json = False,
) -> None:
    """Create a token: print it, and the line for the rights file. To replace a token, add, deploy, then remove."""
    from escrowmq.rights.tokens import new_token

    made = new_token()
    fields = [f'id = "{made.identity}"', f'sha256 = "{made.sha256}"']
    if name:
        fields.append(f"name = {_quote(name)}")
    if expires is not None:
        fields.append(f"expires = {expires:%Y-%m-%d}")
    line = f"{{ {', '.join(fields)} }}"
    if json:
        return print_json({"token": made.text, "entry": line})
    notice("the token, which is not stored anywhere:")
    print(made.text)
    notice("its entry in the rights file, in tokens = [...]:")
    print(line)


def _quote(text: str) -> str:
    """Return a basic string of TOML."""
    from json import dumps

    return dumps(text, ensure_ascii=False)


@tokens.command("list")
def list_(file: RightsFile = DEFAULT_FILE, json: Json = False) -> None:
    """List the tokens and certificates of a rights file, without secrets."""
    loaded = _load(file)
    rows: list[Mapping[str, Any]] = [
        {
            "principal": token.principal.name,
            "id": token.identity or None,
            "name": token.name or None,
            "sha256": token.sha256[:12],
            "expires": None if token.expires_us is None else moment(token.expires_us),
        }
        for token in loaded.tokens.values()
    ]
    rows += [{"principal": one.name, "certificate": name} for name, one in loaded.certificates.items()]
    columns: dict[str, str | Callable[[Any], Any]] = {
        "principal": "principal",
        "id": lambda row: row.get("id") or row.get("certificate"),
        "name": "name",
        "sha256": "sha256",
        "expires": "expires",
    }
    print_rows(rows, json, columns, "no tokens")


def _load(file: Path) -> Rights:
    from escrowmq.rights import load

    return load(file)


def _principal(file: Path, name: str) -> Principal:
    from escrowmq.settings import nearest

    loaded = _load(file)
    found = loaded.principals.get(name)
    if found is None:
        hint = nearest(name, list(loaded.principals)) or f"there are {', '.join(loaded.principals)}"
        raise error(Code.NOT_FOUND, f"{file} has no principal {name!r}", hint)
    return found


def whoami(url: Url = DEFAULT_URL, json: Json = False) -> None:
    """Show the principal of your token or certificate, and its rights."""
    with admin_at(url) as admin:
        answers = admin.whoami()
    if json:
        return print_json(answers)
    for answer in answers:
        facts: dict[str, Any] = {"broker": answer["broker"]}
        if answer["principal"] is None:
            facts["rights"] = "this broker has no rights file: everybody may do everything"
        else:
            facts |= {"principal": answer["principal"], "authenticated by": answer["authenticated_by"]}
            if "expires_us" in answer:
                facts["expires"] = moment(answer["expires_us"])
            facts |= {"may": ", ".join(answer["rules"]), "rights file": answer["rights"]}
        print_facts(facts)


@certs.command("dev")
def dev(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the files go; made if it is not there.")],
    name: Annotated[
        list[str] | None, typer.Option("--name", help="A host name or address of the broker; may be given again.")
    ] = None,
    client: Annotated[
        list[str] | None, typer.Option("--client", help="The name in a client certificate; may be given again.")
    ] = None,
    days: Annotated[int, typer.Option("--days", min=1, help="Days until they expire.")] = 30,
) -> None:
    """Create a certificate authority and certificates for development.

    FOLDER gets ca.pem, broker.pem and broker.key, and NAME.pem and NAME.key for each --client. An existing authority
    signs again, so that certificates can be renewed.
    """
    from escrowmq.cli.development import Authority

    check_folder(folder, "FOLDER")
    authority = Authority(folder, days)
    names = name or ["localhost", "127.0.0.1", "::1"]
    authority.issue("broker", names)
    for one in client or ():
        authority.issue(one, [one], client=True)
    notice(f"wrote {folder}/ca.pem, broker.pem and broker.key for {', '.join(names)}, valid for {days} days")
