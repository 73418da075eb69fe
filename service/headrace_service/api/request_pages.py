"""One list over the requests of several engines, page by page.

Owns the merge (newest first by time of creation; within an engine its own order) and the page
token: for each model that takes part, its tag and the sequence number of the row that was given
last. A model that is loaded while somebody turns pages is not in the token and stays out.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import heapq
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace_protos.engine.v1 import engine_pb2
from headrace_service import errors
from headrace_service.engines.served_model import ServedModel

_CURSOR = struct.Struct("<4sQ")
# 16,384 characters of metadata and more: nobody has so many models.
_MAX_CURSORS = 1024
# From the newest row; no row has this sequence number.
_NEWEST = 0


class Page(NamedTuple):
    """Rows with their models, newest first, and the token of the next page; "" on the last one."""

    rows: list[tuple[engine_pb2.RequestRow, ServedModel]]
    next_page_token: str


class _Part(NamedTuple):
    """What one engine has for the page."""

    model: ServedModel
    before: int
    listed: engine_pb2.RequestList

    def after(self, taken: int) -> int | None:
        """Returns the place where the next page begins, when `taken` rows went into this one.

        None behind the last.
        """
        rows = self.listed.rows
        if taken == len(rows):
            return self.listed.next_before or None
        return rows[taken - 1].sequence_number if taken else self.before


def is_token(page_token: str) -> bool:
    """Whether a text can be a token of ours."""
    return _cursors(page_token) is not None


async def page(models: Sequence[ServedModel], query: engine_pb2.ListQuery, page_token: str) -> Page:
    """Asks the engines and merges their answers.

    Args:
        models: whose requests are listed.
        query: tenant, state and page size.
        page_token: of the page before; "" for the first.

    Raises:
        ServiceError: UNAVAILABLE; an engine cannot be reached, so that the list would lack its
            requests.
    """
    cursors = _cursors(page_token) if page_token else {model.tag: _NEWEST for model in models}
    assert cursors is not None, "is_token comes first"
    parts = await asyncio.gather(*(_part(model, query, cursors[model.tag]) for model in models if model.tag in cursors))
    merged = heapq.merge(*(_rows(index, part) for index, part in enumerate(parts)), key=lambda row: row[0])
    taken = list(itertools.islice(merged, query.page_size))
    counts = [sum(row[1] == index for row in taken) for index in range(len(parts))]
    following = {
        part.model.tag: before
        for part, count in zip(parts, counts, strict=True)
        if (before := part.after(count)) is not None
    }
    return Page([(row, parts[index].model) for _, index, row in taken], _token(following))


async def _part(model: ServedModel, query: engine_pb2.ListQuery, before: int) -> _Part:
    own = engine_pb2.ListQuery(tenant=query.tenant, state=query.state, page_size=query.page_size, before=before)
    try:
        return _Part(model, before, await model.engine.list_requests(own))
    except errors.ServiceError as error:
        raise errors.ServiceError(error.code, f"model {model.name}: {error.message}", error.details) from None


def _rows(index: int, part: _Part) -> Iterator[tuple[int, int, engine_pb2.RequestRow]]:
    """Rows with what they are sorted by.

    An engine's clock may step back; its rows keep their order all the same.
    """
    newest_ns = 1 << 64
    for row in part.listed.rows:
        newest_ns = min(newest_ns, row.created_at_ns)
        yield -newest_ns, index, row


def _token(cursors: dict[str, int]) -> str:
    packed = b"".join(_CURSOR.pack(tag.encode(), before) for tag, before in sorted(cursors.items()))
    return base64.urlsafe_b64encode(packed).decode()


def _cursors(page_token: str) -> dict[str, int] | None:
    """Returns the place where each model's next rows begin, by tag; None for what is no token."""
    try:
        packed = base64.b64decode(page_token, altchars=b"-_", validate=True)
        if len(packed) > _MAX_CURSORS * _CURSOR.size:
            return None
        return {tag.decode("ascii"): before for tag, before in _CURSOR.iter_unpack(packed)}
    except (binascii.Error, struct.error, ValueError):
        return None
