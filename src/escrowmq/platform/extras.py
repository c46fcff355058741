"""Names of a package that need an extra: imported when they are first asked for, with a hint where the extra is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from escrowmq.errors import Code, Misuse


def from_extra(package: str, modules: Mapping[str, str], *, needs: Mapping[str, str], who: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``package``: each name of ``modules`` from the module named there, which is the value itself if its last part is the name.

    ``needs``: packages that are imported, and the extra that each comes with. The function raises AttributeError for other names, and
    Misuse(MISSING_PACKAGE), "``who`` needs ...", where one of these packages is not installed; ``{name}`` in ``who`` is the name that was asked for.
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
            hint = f'python -m pip install "escrowmq[{needs[missing]}]"'
            text = f"{who.format(name=name)} needs {missing}, which is not installed"
            raise Misuse(Code.MISSING_PACKAGE, text, hint) from problem
        value = module if modules[name] == name else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get
