"""The generated classes of ``apache.rocketmq.v2``, from the package of the Python client.

Only its generated modules are imported. Importing ``rocketmq`` itself would start that client's log, which writes into
the user's home folder.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any


def _generated(name: str) -> Any:
    return importlib.import_module(f"rocketmq.grpc_protocol.{name}")


def _import_all() -> tuple[Any, Any, Any]:
    spec = importlib.util.find_spec("rocketmq") if "rocketmq" not in sys.modules else None
    borrowed = spec is not None and spec.submodule_search_locations is not None
    if borrowed:
        package = ModuleType("rocketmq")
        package.__path__ = list(spec.submodule_search_locations or ())  # type: ignore[union-attr]
        sys.modules["rocketmq"] = package
    try:
        return _generated("definition_pb2"), _generated("service_pb2"), _generated("service_pb2_grpc")
    finally:
        if borrowed:
            del sys.modules["rocketmq"]  # so that the client can still be imported in this process


definition, service, service_grpc = _import_all()
