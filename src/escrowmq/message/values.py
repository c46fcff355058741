"""Fast construction of frozen values: the ``__init__`` of a frozen dataclass is too slow for 10,000s of receipts/s.

It sets each field through ``object.__setattr__``. Here a plain twin class with the same slots is filled, and then its
``__class__`` is set to the frozen class; the result is indistinguishable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, make_dataclass
from typing import Any, TypeVar

from escrowmq.model import Receipt, TransactionId

T = TypeVar("T")


def _constructor_of(frozen: type[T]) -> Callable[..., T]:
    names = [field.name for field in fields(frozen)]  # type: ignore[arg-type]
    twin: Any = make_dataclass(frozen.__name__, names, slots=True)

    def make(*values: Any) -> T:
        """Create a value of the class from all of its fields in order."""
        value = twin(*values)
        value.__class__ = frozen
        return value  # type: ignore[no-any-return]

    return make


make_receipt = _constructor_of(Receipt)
make_transaction_id = _constructor_of(TransactionId)
