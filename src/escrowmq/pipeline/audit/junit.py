"""The verdict as a JUnit file: a test case per comparison, for continuous integration."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

from escrowmq.pipeline.audit.verdict import Verdict

_BAD = {n: "\ufffd" for n in (*range(0x20), 0xFFFE, 0xFFFF, *range(0xD800, 0xE000)) if n not in (9, 10, 13)}
"""Characters that XML cannot contain."""


def write_junit(path: Path, verdict: Verdict) -> None:
    """Write the verdict. A comparison fails if it has findings, which are named as far as the verdict names them."""
    cases = {f"{side.expected} → {side.found}": side.wrong_ids for side in verdict.comparisons}
    cases["still in escrow"] = verdict.orphaned
    failed = sum(bool(wrong) for wrong in cases.values())
    suite = ElementTree.Element("testsuite", name=(verdict.title or "escrowmq audit").translate(_BAD))
    suite.attrib |= {"tests": str(len(cases)), "failures": str(failed)}
    for name, wrong in cases.items():
        case = ElementTree.SubElement(suite, "testcase", classname="audit", name=name.translate(_BAD))
        if wrong:
            lines = [
                f"{one.kind} {one.id}: expected {one.expected}, found {one.found}{one.reason and f' ({one.reason})'}"
                for one in verdict.findings
                if one.between == name
            ]
            failure = ElementTree.SubElement(case, "failure", message=f"{wrong:,} ids differ")
            failure.text = "\n".join(lines).translate(_BAD)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)
