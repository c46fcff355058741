"""Rows by position, and the readable part of damaged frames: rows with valid checksums, the others without content.

Nothing in damaged bytes is trusted: the place of the frame and the number, kind and time of its rows come from the
segment's index.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import Code, Misuse
from escrowmq.log import bodies
from escrowmq.log.bodies import SoundColumns
from escrowmq.log.frames import CHECKED_BODIES, HEADER_BYTES, Encoding, read_header
from escrowmq.log.index import Segment
from escrowmq.log.report import Damage, FrameDamage, RowDamage
from escrowmq.log.seam import Frame
from escrowmq.schemas import MESSAGES, STORED, Kind, empty

Bools = npt.NDArray[np.bool_]
Int64s = npt.NDArray[np.int64]
T = TypeVar("T")

READ_SCHEMA: pa.Schema = STORED[Kind.PLAIN].append(pa.field("stored_us", pa.int64(), nullable=False))
"""Schema of the result of ``read``."""


_MESSAGE_KINDS = np.array([*MESSAGES, Kind.EDITED], np.uint8)  # frame kinds whose rows can be read as messages

NO_TRANSACTION = -1


@dataclass(frozen=True, slots=True)
class Located:
    """For each requested position (arrays of equal length): its frame's sequence, first position, time and kind."""

    sequences: Int64s
    starts: Int64s
    times: Int64s
    kinds: npt.NDArray[np.uint8]


Expected = tuple[int, int, int, int, int]  # frame fields from the index: kind, sequence, position, time and epoch


def expected_of(segment: Segment, sequence: int) -> tuple[int, int, int, Expected]:
    """Return byte offset, size, rows and expected fields of a frame from the segment's index. The lock must be held."""
    index, at = segment.index, sequence - segment.sequence
    offset, position, last = int(index.offsets[at]), int(index.positions[at]), at + 1 == index.count
    size = (segment.size if last else int(index.offsets[at + 1])) - offset
    rows = (segment.next_position if last else int(index.positions[at + 1])) - position
    return offset, size, rows, (int(index.kinds[at]), sequence, position, int(index.times[at]), segment.epoch)


def salvage_frame(expected: Expected, rows: int, data: pa.Buffer | None, salt: int, place: Damage) -> Frame:
    """Build a damaged frame from what its index expects and from its bytes ``data`` (None: unavailable); damaged rows
    have no content. ``place``: the damage."""
    kind = Kind(expected[0])
    parts = None if data is None or kind not in MESSAGES else _parts(kind, rows, data)
    good = None if parts is None else bodies.intact_rows(*parts, expected[1], salt)
    if parts is None or good is None:
        everything = FrameDamage(place, np.ones(rows, np.bool_), bodies_only=False)
        return Frame(kind, *expected[1:], _blank(STORED[kind], rows), everything)
    batch = parts[2]
    column = batch.schema.get_field_index("body")
    kept = [body if whole else b"" for body, whole in zip(batch[column].to_pylist(), good.tolist(), strict=True)]
    batch = batch.set_column(column, batch.schema.field(column), pa.array(kept, pa.binary()))
    return Frame(kind, *expected[1:], batch, FrameDamage(place, ~good, bodies_only=True))


def sound_columns(expected: Expected, rows: int, data: pa.Buffer, salt: int) -> SoundColumns | None:
    """Return the verified columns of the expected message frame, reading no body; its header is only a hint.
    None if it has no checksums of its bodies, is invalid or of a newer version; a full read reports which."""
    header = read_header(data, 0)
    if header.encoding != Encoding.ARROW or not header.flags & CHECKED_BODIES or header.is_newer:
        return None
    parts = _parts(Kind(expected[0]), rows, data)
    return None if parts is None else bodies.sound_columns(*parts, expected[1], salt, expected[2], expected[3])


def _parts(kind: Kind, rows: int, data: pa.Buffer) -> tuple[pa.Buffer, pa.Buffer, pa.RecordBatch] | None:
    """Return Arrow IPC message, checksums and batch from a frame's bytes, all unverified; None if not found."""
    size = bodies.size_of(rows)
    end = data.size - size
    if not size or end <= HEADER_BYTES:
        return None
    message = data.slice(HEADER_BYTES, end - HEADER_BYTES)
    try:
        batch = pa.ipc.read_record_batch(message, STORED[kind])
    except (pa.ArrowException, OSError, ValueError):
        return None
    return (message, data.slice(end, size), batch) if batch.num_rows == rows else None


class Recent(Generic[T]):
    """An LRU cache by frame sequence, limited to ``most`` bytes. The caller must lock it."""

    def __init__(self, most: int) -> None:
        self._max_bytes = most
        self._bytes = 0
        self._entries: OrderedDict[int, tuple[T, int]] = OrderedDict()

    def get(self, sequence: int) -> T | None:
        """Return the cached value of a frame and make it the most recent."""
        if (entry := self._entries.get(sequence)) is None:
            return None
        self._entries.move_to_end(sequence)
        return entry[0]

    def put(self, sequence: int, value: T, cost: int) -> None:
        """Cache the value of a frame, which counts as ``cost`` bytes, unless present; evict the least recently used
        ones beyond the limit."""
        if sequence in self._entries:
            return
        self._entries[sequence] = value, cost
        self._bytes += cost
        while self._bytes > self._max_bytes:
            self._bytes -= self._entries.popitem(last=False)[1][1]

    def drop_below(self, sequence: int) -> None:
        for gone in [one for one in self._entries if one < sequence]:
            self._bytes -= self._entries.pop(gone)[1]


def _blank(schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """Build ``rows`` rows without content: null where allowed, else empty, zero or NO_TRANSACTION."""
    arrays = [pa.nulls(rows, x.type) if x.nullable else pa.array([_zero(x)] * rows, x.type) for x in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _zero(field: pa.Field) -> object:
    if pa.types.is_integer(field.type):
        return NO_TRANSACTION if field.name == "transaction" else 0
    if pa.types.is_fixed_size_binary(field.type):
        return bytes(field.type.byte_width)
    return False if pa.types.is_boolean(field.type) else ""


def row_damage(damaged: dict[int, Frame], sequences: Int64s, rows: Int64s) -> dict[int, RowDamage]:
    """Return the damage of requested rows by their index: each is named by its frame (``sequences``) and its row in
    that frame (``rows``). ``damaged``: the damaged frames, by sequence."""
    found: dict[int, RowDamage] = {}
    for sequence, frame in damaged.items():
        assert frame.damage is not None  # it is one of those that do not check
        for at in np.flatnonzero(sequences == sequence).tolist():
            row = int(rows[at])
            if frame.damage.rows[row]:
                found[at] = RowDamage(frame.damage.place, frame.position + row, frame.damage.bodies_only)
    return found


def gather(
    positions: Int64s, located: Located, fetch: Callable[[int], Frame], columns: Sequence[str] | None = None
) -> pa.RecordBatch:
    """Return the PLAIN, HALF and EDITED rows at ``positions``, in order, with their frame's time as ``stored_us``
    (last). ``located``: their frames, which ``fetch`` reads by sequence. ``columns`` selects and orders columns.
    Neighbouring rows of one frame are sliced: a single run is not copied, several are copied once. Scattered rows are
    taken frame by frame, then reordered if necessary."""
    schema = READ_SCHEMA if columns is None else pa.schema([*map(READ_SCHEMA.field, columns), READ_SCHEMA[-1]])
    if not len(positions):
        return empty(schema)
    wrong = np.flatnonzero(~np.isin(located.kinds, _MESSAGE_KINDS))
    if len(wrong):
        raise Misuse(Code.BAD_ARGUMENT, f"position {positions[wrong[0]]} holds no message")
    if len(schema) == 1:
        return pa.RecordBatch.from_arrays([pa.array(located.times)], schema=schema)
    rows = positions - located.starts

    def get(sequence: int) -> pa.RecordBatch:
        frame = fetch(sequence)
        if columns is not None:
            return frame.batch.select(list(columns))
        return frame.batch.select(READ_SCHEMA.names[:-1]) if frame.kind == Kind.EDITED else frame.batch

    breaks = np.flatnonzero((np.diff(located.sequences) != 0) | (np.diff(rows) != 1)) + 1
    if 4 * len(breaks) <= len(rows):
        edges = itertools.pairwise([0, *breaks.tolist(), len(rows)])
        runs = [get(int(located.sequences[at])).slice(int(rows[at]), end - at) for at, end in edges]
        batch = runs[0] if len(runs) == 1 else pa.concat_batches(runs)
    else:
        batch = _take(rows, located.sequences, get)
    return pa.RecordBatch.from_arrays([*batch.columns, pa.array(located.times)], schema=schema)


def _take(rows: Int64s, sequences: Int64s, get: Callable[[int], pa.RecordBatch]) -> pa.RecordBatch:
    order = None
    if (np.diff(sequences) < 0).any():
        order = np.argsort(sequences, kind="stable")
        rows, sequences = rows[order], sequences[order]
    edges = [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), len(rows)]
    pieces = []
    for start, end in itertools.pairwise(edges):
        batch = get(int(sequences[start]))
        chosen = rows[start:end]
        whole = end - start == 1 or (chosen[-1] - chosen[0] == end - start - 1 and (np.diff(chosen) == 1).all())
        pieces.append(batch.slice(int(chosen[0]), end - start) if whole else batch.take(pa.array(chosen)))
    combined = pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces)
    if order is None:
        return combined
    inverse = np.empty_like(order)
    inverse[order] = np.arange(len(order))
    return combined.take(pa.array(inverse))
