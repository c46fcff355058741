"""The Flight service: the calls of ``wire.py`` over Arrow Flight (gRPC).

The protocol, version 1. Everything between ``<>`` is JSON (UTF-8, one object).

**Exchanges** (``DoExchange``), one per kind of ``wire.Exchange`` and connection; requests are pipelined.

| step | who | what |
| --- | --- | --- |
| 1 | client | descriptor: command ``<{"protocol": 1, "exchange": KIND, ...options that never change}>`` |
| 2 | client | ``begin(REQUEST[KIND])`` (for ``receive``: the schema without fields) |
| 3 | broker | ``begin(ANSWER[KIND])`` at once |
| 4 | client | one chunk a request: ``write_with_metadata(batch, pack_metadata(id, options))``; for ``receive`` either
              a batch of no rows or ``write_metadata(pack_metadata(id, options))`` |
| 5 | broker | one chunk an answer: ``write_with_metadata(batch, pack_metadata(id))``, or, refused as a whole,
              ``write_metadata(pack_metadata(id, <{"error": ERROR}>))``: a chunk without data |
| 6 | client | ``done_writing()``; the broker answers what it has begun, then ends |

Request ids (u64) are the client's and need only be unique among its requests in flight on that exchange. Answers of
``send``, ``prepare``, ``end`` and ``settle`` may come in another order than their requests (they *take effect* in order);
those of ``receive`` come when they come. Options of the descriptor and of the chunk are merged, the chunk's winning.
When the exchange ends, for whatever reason, its waiting receives are withdrawn.

**Checks** (``DoExchange``): the command is ``<{"protocol": 1, "exchange": "checks", "session": S}>``. The client begins
the schema without fields and then writes nothing; the broker begins ``CHECKS`` and writes batches without being asked,
each with ``pack_metadata(0)``. The client is a member to ask for as long as the exchange lasts; ``done_writing()``,
closing or losing it ends that. Answers go through an ``end`` exchange with ``{"session": S, "by": 1}``.

**Actions** (``DoAction``): type = the action's name, body = ``<request>`` (empty: {}); exactly one result, ``<answer>``.

**Reads** (``DoGet``): the ticket is ``<request of Link.read>``; the stream has the requested columns.

**Errors.** ``ERROR`` is ``pack_error``: ``<{"code", "name", "message", "hint", "retry_after"?}>``. An exchange that cannot
begin, or whose chunk cannot be read at all (garbage, another schema than begun, no request id), an action and a read
fail as a Flight error with ``extra_info = <ERROR>``; without ``extra_info`` the carrier itself failed. After such a
failure ``write``/``begin`` may raise first: the read side then has the error. A stopping broker answers SHARD_STOPPED.
"""
