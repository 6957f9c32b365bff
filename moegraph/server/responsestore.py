"""Responses that later requests refer to: in memory, within a cap in bytes."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ApiError
from .replies import encode

Item = dict[str, Any]
CAP_BYTES = 64 << 20


@dataclass(frozen=True)
class _Stored:
    """A response as JSON, and the items of its input.

    previous: the id of the response before it. item_ids: of the items that it brought.
    """

    response: bytes
    items: bytes
    previous: str | None
    item_ids: tuple[str, ...]

    @property
    def n_bytes(self) -> int:
        return len(self.response) + len(self.items)

    def all_items(self) -> list[Item]:
        return [*json.loads(self.items), *json.loads(self.response)["output"]]


class ResponseStore:
    """Keeps the responses of each client by id, all together within a cap in bytes.

    A client finds only its own; owner: as `guards.owner_of` returns it. At the cap, the client that
    has most bytes loses what it did not use for longest, so that no client can push out responses
    of others. A conversation is a chain of responses, each with the items that it added. The
    server's end forgets everything.
    """

    def __init__(self, cap_bytes: int = CAP_BYTES) -> None:
        self._cap = cap_bytes
        self._stored: OrderedDict[tuple[str, str], _Stored] = OrderedDict()
        self._of_items: dict[tuple[str, str], str] = {}
        self._n_bytes = Counter[str]()

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def n_bytes(self) -> int:
        """Return the bytes of all responses."""
        return self._n_bytes.total()

    def put(
        self, owner: str, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keep a response and the items of its input; one that is larger than the cap is not."""
        named = [*items, *response["output"]]
        made = _Stored(
            encode(response),
            encode(items),
            response.get("previous_response_id"),
            tuple(item["id"] for item in named if isinstance(item.get("id"), str)),
        )
        if made.n_bytes > self._cap:
            return
        self._stored[owner, response["id"]] = made
        self._of_items.update(
            dict.fromkeys(((owner, one) for one in made.item_ids), response["id"])
        )
        self._n_bytes[owner] += made.n_bytes
        while self.n_bytes > self._cap:
            ((most, _),) = self._n_bytes.most_common(1)
            self._forget(*next(key for key in self._stored if key[0] == most))

    def response(self, owner: str, response_id: str) -> dict[str, Any]:
        """Return a response."""
        found: dict[str, Any] = json.loads(self._get(owner, response_id).response)
        return found

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response."""
        self._get(owner, response_id)
        self._forget(owner, response_id)

    def items(self, owner: str, response_id: str) -> list[Item]:
        """Return all items of a conversation up to the output of this response."""
        chain: list[_Stored] = []
        at: str | None = response_id
        while at is not None:
            stored = self._stored.get((owner, at))
            if stored is None:
                raise _no_previous(response_id)
            chain.append(stored)
            self._stored.move_to_end((owner, at))
            at = stored.previous
        return [item for stored in reversed(chain) for item in stored.all_items()]

    def item(self, owner: str, item_id: str) -> Item | None:
        """Return an item of any response of a client, by its id."""
        found = self._of_items.get((owner, item_id))
        if found is None:
            return None
        items = self._stored[owner, found].all_items()
        return next(item for item in items if item.get("id") == item_id)

    def _get(self, owner: str, response_id: str) -> _Stored:
        found = self._stored.get((owner, response_id))
        if found is None:
            message = f"there is no response {response_id[:80]!a}"
            raise ApiError(404, message, param="response_id", code="not_found")
        return found

    def _forget(self, owner: str, response_id: str) -> None:
        gone = self._stored.pop((owner, response_id))
        self._n_bytes[owner] -= gone.n_bytes
        for item_id in gone.item_ids:
            if self._of_items.get((owner, item_id)) == response_id:
                del self._of_items[owner, item_id]


def _no_previous(response_id: str) -> ApiError:
    message = (
        f"there is no response {response_id[:80]!a}, or one before it is gone: this server keeps "
        "responses in memory until newer ones take their place; send the whole input instead"
    )
    param, code = "previous_response_id", "previous_response_not_found"
    return ApiError(400, message, param=param, code=code)
