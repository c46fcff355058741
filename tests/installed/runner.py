"""Runs commands one after the other in the environment's own Python, and prints what came of each as a JSON line.

``python runner.py FOLDER`` reads the commands as a JSON list of lists from standard input. One that serves is stopped by a signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

SERVING_SECONDS = 1.5


def main() -> None:
    os.chdir(sys.argv[1])
    from typer.testing import CliRunner

    from escrowmq.cli.main import app

    for words in json.load(sys.stdin):
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, SERVING_SECONDS if words[0] in ("serve", "gateway", "console") else 0)
        result = CliRunner().invoke(app, words)
        signal.setitimer(signal.ITIMER_REAL, 0)
        failed = result.exception if not isinstance(result.exception, SystemExit) else None
        trace = "".join(traceback.format_exception(failed)) if failed is not None else ""
        print(json.dumps({"words": words, "code": result.exit_code, "told": result.output, "trace": trace}), flush=True)


if __name__ == "__main__":
    main()
