"""Settings from a file of ``NAME=VALUE`` lines, as for Kafka's own programs: command lines would expose secrets."""

from __future__ import annotations

from pathlib import Path

from escrowmq.errors import Code, error


def read_properties(path: str | Path) -> dict[str, str]:
    """Read the settings of a file; empty lines and lines starting with ``#`` are ignored, and nothing is unescaped.
    Raises Misuse(BAD_SETTING) with the file and the number of an invalid line, never with its content."""
    try:
        lines = Path(path).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8"
        raise error(Code.BAD_SETTING, f"cannot read the settings in {path}: {why}") from None
    found: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not line or line.startswith("#"):
            continue
        if not equals or not name or name in found:
            wrong = "a repeated setting" if name in found else "not NAME=VALUE"
            raise error(Code.BAD_SETTING, f"{path}: line {number} is {wrong}")
        found[name] = value
    return found
