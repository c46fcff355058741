"""Decodes a body into the type with which the first parameter of a handler is annotated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from escrowmq.errors import Code, Misuse

Decode = Callable[[bytes], Any]


def decoder_of(kind: Any, who: str) -> Decode:
    """Return the function from a body to a value of type ``kind``: ``bytes``, ``str`` (UTF-8), or JSON of a pydantic
    model or of any type that msgspec decodes. Raises Misuse(BAD_ARGUMENT) that names the handler ``who``."""
    if kind is bytes:
        return bytes
    if kind is str:
        return bytes.decode
    if is_pydantic(kind):
        return kind.model_validate_json  # type: ignore[no-any-return]
    hint = "bytes, str, dict, a dataclass, a msgspec.Struct or another type of msgspec, or a pydantic model"
    try:
        unknown = _find_unknown(msgspec.inspect.type_info(kind), set())
        decode: Decode = msgspec.json.Decoder(kind).decode
    except (TypeError, NameError) as problem:
        raise Misuse(Code.BAD_ARGUMENT, f"{who}: no body becomes {kind!r}: {problem}", hint) from problem
    if unknown is not None:
        raise Misuse(Code.BAD_ARGUMENT, f"{who}: no body becomes {unknown!r}", hint)
    return decode


def is_pydantic(kind: Any) -> bool:
    """Return whether a type is a pydantic model, without a need for pydantic."""
    return hasattr(kind, "model_validate_json")


def _find_unknown(info: Any, seen: set[int]) -> Any:
    """Return a class within a type that msgspec cannot decode by itself, or None."""
    if id(info) in seen:
        return None
    seen.add(id(info))
    if isinstance(info, msgspec.inspect.CustomType):
        return info.cls
    parts = info if isinstance(info, tuple) else ()
    if isinstance(info, msgspec.inspect.Type | msgspec.inspect.Field):
        parts = tuple(getattr(info, name) for name in info.__struct_fields__)
    return next((found for part in parts if (found := _find_unknown(part, seen)) is not None), None)
