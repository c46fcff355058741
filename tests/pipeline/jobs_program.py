"""Commands of ``escrowmq``, one after the other in one session on a cluster: ``jobs_program.py MASTER COMMANDS.json``, a list of lists of words.

Prints a list of exit codes and of what each printed. A session for each would take as long again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from typer.testing import CliRunner

from apart import SETTINGS
from escrowmq.cli.main import app
from escrowmq.pipeline.session import local_session


def main() -> None:
    """As the words say."""
    _, master, commands = sys.argv
    told = []
    with local_session("jobs", master=master, rows=1000, settings=SETTINGS):
        for words in json.loads(Path(commands).read_text()):
            ran = CliRunner().invoke(app, [*words, "--master", master])
            told.append([ran.exit_code, ran.stdout, ran.stderr or repr(ran.exception)])
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
