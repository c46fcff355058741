"""Settings in a file of lines ``NAME=VALUE``, as Kafka's own programs read them: for what should not stand in a
command, which others can see.
"""

from __future__ import annotations

from pathlib import Path

from escrowmq.errors import Code, error


def read_properties(path: str | Path) -> dict[str, str]:
    """Return the settings of a file; lines that are empty or begin with ``#`` say nothing, and nothing is unescaped.
    Misuse(BAD_SETTING) names the file and the number of
    a line that is wrong, never what is in it."""
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
            wrong = "a setting that was given already" if name in found else "not NAME=VALUE"
            raise error(Code.BAD_SETTING, f"{path}: line {number} is {wrong}")
        found[name] = value
    return found
