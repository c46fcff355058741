"""The audit as a program for spark-submit: ``spark-submit --master spark://HOST:PORT submit.py FOLDER`` (see docs/audit.md).

Exit code 0 when all sides agree, 1 when they do not; verdict.json and report.html are in the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from escrowmq.pipeline.audit import run


def main() -> int:
    """Audit the folder that is named, on the session that was submitted."""
    parser = argparse.ArgumentParser(description="Compare both sides of a run, by id and content.")
    parser.add_argument("folder", type=Path, help="a run folder, which every worker sees under the same path")
    verdict = run(parser.parse_args().folder)
    told = verdict.to_json()
    print(json.dumps({name: told[name] for name in ("verdict", "lost", "repeated", "altered", "leaked", "orphaned")}))
    return 0 if verdict.agrees else 1


if __name__ == "__main__":
    sys.exit(main())
