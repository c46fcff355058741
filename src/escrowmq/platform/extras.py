"""Names of a package that need an extra: imported when they are first asked for, with a hint where the extra is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

from escrowmq.errors import Code, Misuse


def from_extra(
    package: str, modules: Mapping[str, str], *, extra: str, needs: Collection[str], who: str
) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``: each name of ``modules`` from the module named there.

    It raises AttributeError for other names, and Misuse(MISSING_PACKAGE), "``who`` needs ...", where one of the packages ``needs``, which come with ``extra``, is not installed.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(f"{package}.{modules[name]}")
        except ModuleNotFoundError as problem:
            missing = (problem.name or "").partition(".")[0]
            if missing not in needs:
                raise
            hint = f'python -m pip install "escrowmq[{extra}]"'
            raise Misuse(Code.MISSING_PACKAGE, f"{who} needs {missing}, which is not installed", hint) from problem
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get
