"""Commands of golden scripts for the protocol's frames: a frame as bytes, and bytes as a frame.

| command | prints |
| --- | --- |
| ``encode KIND [number=N] [head=JSON] [body=TEXT]`` | the bytes of a frame, eight a line; the head is MessagePack |
| ``decode HEX ...`` | the frames in the bytes, or the code of what is wrong with them |
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from escrowmq.errors import EscrowError
from escrowmq.wire.frames.frame import Assembler, Kind, frame

MOST = 1 << 20


def interpret(name: str, words: list[str], options: dict[str, str]) -> Iterator[str]:
    """Run one command."""
    if name == "encode":
        head = json.loads(options["head"]) if "head" in options else None
        raw = frame(
            Kind[words[0]],
            int(options.get("number", 0)),
            options.get("body", "").encode(),
            b"" if "head" not in options else msgspec.msgpack.encode(head),
        )
        for at in range(0, len(raw), 8):
            yield raw[at : at + 8].hex(" ")
        return
    yield from _decode(bytes.fromhex("".join(words)))


def _decode(raw: bytes) -> Iterator[str]:
    assembler, left = Assembler(MOST), memoryview(raw)
    try:
        while left:
            target = assembler.target()
            size = min(len(target), len(left))
            target[:size] = left[:size]
            left = left[size:]
            for came in assembler.filled(size):
                kind = Kind(came.kind).name if came.kind in list(Kind) else f"0x{came.kind:02x}"
                head = f" head={msgspec.msgpack.decode(came.head)}" if len(came.head) else ""
                body = f" body={bytes(came.body)!r}" if len(came.body) else ""
                yield f"{kind} number={came.number}{head}{body}"
        if assembler.waiting:
            yield f"unfinished: {assembler.waiting} of {assembler.claimed or 'unknown'} bytes"
    except EscrowError as problem:
        yield f"{problem.code.name}: {problem.message}"
