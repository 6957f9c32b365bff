"""Files of whole sequences, by name: what a slot of a server holds is saved, and restored later."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from ..errors import PoolFull, RequestError
from ..resident.hostcopies import RowsCopy
from ..resident.layout import PAGE
from . import prefixfile as files
from .prefixes import Prefixes
from .sequencecopies import SequenceCopies, SwappedSequence


class SlotFiles:
    """The files of one model and its settings in a folder; see prefixfile.py.

    Actions take an idle sequence, the name of a file, who asks, and all idle sequences. They return
    tokens of the sequence and bytes of the file, and raise `RequestError`.
    """

    def __init__(
        self, prefixes: Prefixes, copies: SequenceCopies, folder: Path, identity: str,
        widths: files.Widths,
    ) -> None:  # fmt: skip
        """identity, widths: as of `PrefixDisk`."""
        files.private_folder(folder)
        self._prefixes, self._copies, self._folder = prefixes, copies, folder
        self._identity, self._widths = identity, widths

    def save(self, seq: int, name: str, owner: str, idle: Sequence[int]) -> tuple[int, int]:
        """Write what a sequence holds."""
        ids = np.array(self._prefixes.owned(seq, owner), np.int32)
        if not len(ids):
            raise RequestError(f"slot {seq} holds nothing")
        states, rows = self._copies.take_states(seq), self._copies.take_rows(seq, 0, ids.tolist())
        head, data = files.head_of(self._identity, owner, 0, ids, rows, self._widths.states)
        try:
            files.write_file(self._folder / name, head, data, states.array[: head.n_states])
        except OSError as error:
            raise RequestError(f"unable to save slot: {error.strerror}") from error
        return len(ids), head.n_bytes

    def restore(self, seq: int, name: str, owner: str, idle: Sequence[int]) -> tuple[int, int]:
        """Have a sequence hold what another one held."""
        path, memory = self._folder / name, self._copies.memory
        try:
            head = files.read_head(path)
            if (head.identity, head.parent, head.first) != (self._identity, owner, 0):
                raise files.DamagedFile("it is of another model, other settings or another key")
            head.require(self._widths)
            rows, states = RowsCopy(*files.read_rows(path, head)), memory.new_states(head.n_tokens)
            with closing(SwappedSequence(head.tokens.tolist(), rows, states)) as whole:
                files.read_states(path, head, states.array[: head.n_states])
                if not states.is_finite:
                    raise files.DamagedFile("its states are not finite")
                n_pages, n_most = -(-head.n_tokens // PAGE), self._copies.pool.n_without(idle)
                if n_pages > n_most:
                    raise PoolFull(n_pages, n_most)
                self._prefixes.free(n_pages, [seq, *idle])
                self._copies.swap_in(seq, whole)
        except (files.DamagedFile, OSError) as error:
            why = getattr(error, "strerror", None) or error
            raise RequestError(f"unable to restore slot: {why}") from error
        self._prefixes.own(seq, owner)
        return head.n_tokens, head.n_bytes

    def erase(self, seq: int, name: str, owner: str, idle: Sequence[int]) -> tuple[int, int]:
        """Empty a sequence; there is no file."""
        n_held = len(self._prefixes.owned(seq, owner))
        self._copies.swap_in(seq, SwappedSequence([]))
        return n_held, 0
