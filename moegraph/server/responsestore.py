"""Responses that later requests refer to: in memory, within a cap in bytes."""

from __future__ import annotations

import json
from collections import OrderedDict
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


class ResponseStore:
    """Keeps one client's responses by id; what was not used for longest goes at the cap.

    A conversation is a chain of responses, each with the items that it added. The server's end
    forgets everything.
    """

    def __init__(self, cap_bytes: int = CAP_BYTES) -> None:
        self._cap = cap_bytes
        self._stored: OrderedDict[str, _Stored] = OrderedDict()
        self._owners: dict[str, str] = {}
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]) -> None:
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
        self._stored[response["id"]] = made
        self._owners.update(dict.fromkeys(made.item_ids, response["id"]))
        self.n_bytes += made.n_bytes
        while self.n_bytes > self._cap:
            self.forget_oldest()

    def forget_oldest(self) -> None:
        """Forget the response that was not used for longest."""
        self._forget(next(iter(self._stored)))

    def response(self, response_id: str) -> dict[str, Any]:
        """Return a response."""
        found: dict[str, Any] = json.loads(self._get(response_id).response)
        return found

    def delete(self, response_id: str) -> None:
        """Forget a response."""
        self._get(response_id)
        self._forget(response_id)

    def items(self, response_id: str) -> list[Item]:
        """Return all items of a conversation up to the output of this response."""
        chain: list[str] = []
        at: str | None = response_id
        while at is not None:
            if at not in self._stored or at in chain:
                raise _no_previous(response_id)
            chain.append(at)
            self._stored.move_to_end(at)
            at = self._stored[at].previous
        found: list[Item] = []
        for at in reversed(chain):
            found += json.loads(self._stored[at].items)
            found += json.loads(self._stored[at].response)["output"]
        return found

    def item(self, item_id: str) -> Item | None:
        """Return an item of any response, by its id."""
        owner = self._owners.get(item_id)
        if owner is None:
            return None
        stored = self._stored[owner]
        items: list[Item] = json.loads(stored.items) + json.loads(stored.response)["output"]
        return next(item for item in items if item.get("id") == item_id)

    def _get(self, response_id: str) -> _Stored:
        found = self._stored.get(response_id)
        if found is None:
            message = f"there is no response {response_id[:80]!a}"
            raise ApiError(404, message, param="response_id", code="not_found")
        return found

    def _forget(self, response_id: str) -> None:
        gone = self._stored.pop(response_id)
        self.n_bytes -= gone.n_bytes
        for item_id in gone.item_ids:
            if self._owners.get(item_id) == response_id:
                del self._owners[item_id]


class ResponseStores:
    """The responses of each client, all together within a cap in bytes.

    A client finds only its own. At the cap, the client that has most bytes loses its oldest
    response, so that no client can push out responses of others.
    """

    def __init__(self, cap_bytes: int = CAP_BYTES) -> None:
        self._cap = cap_bytes
        self._stores: dict[str, ResponseStore] = {}

    def of(self, owner: str) -> ResponseStore:
        """Return the responses of a client; owner: as `guards.owner_of` returns it."""
        return self._stores.get(owner) or ResponseStore(self._cap)

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a client's response."""
        self.of(owner).delete(response_id)
        self._drop_empty()

    def put(
        self, owner: str, response: Mapping[str, Any], items: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keep a client's response; see `ResponseStore.put`."""
        self._stores.setdefault(owner, ResponseStore(self._cap)).put(response, items)
        while sum(store.n_bytes for store in self._stores.values()) > self._cap:
            max(self._stores.values(), key=lambda store: store.n_bytes).forget_oldest()
        self._drop_empty()

    def _drop_empty(self) -> None:
        self._stores = {owner: store for owner, store in self._stores.items() if len(store)}


def _no_previous(response_id: str) -> ApiError:
    message = (
        f"there is no response {response_id[:80]!a}, or one before it is gone: this server keeps "
        "responses in memory until newer ones take their place; send the whole input instead"
    )
    param, code = "previous_response_id", "previous_response_not_found"
    return ApiError(400, message, param=param, code=code)
