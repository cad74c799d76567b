"""The hosts of an audit of files. Of a large fleet only a part is kept: the others are read again when asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import EvidenceSet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import drift
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules.cards import Card, card

# Evidence whose snapshots are kept; a snapshot takes two to three times the memory of its text.
KEPT_CHARACTERS = 64 * 1024 * 1024


class FleetOfFiles(Mapping[str, Snapshot]):
    """Hosts by name, in the order in which they were added.

    ``cards`` and ``rows`` are what joining and comparing need; they stay for all hosts. Every snapshot stays where
    ``room`` (characters of evidence) is None.
    """

    def __init__(self, room: int | None = None) -> None:
        self.cards: list[Card] = []
        self.rows: list[drift.Row] = []
        self._room = room
        # Each host with its snapshot, or with how to get its evidence once more.
        self._hosts: dict[str, Snapshot | Callable[[], EvidenceSet]] = {}
        self._lent: dict[str, Snapshot] = {}

    def add(self, evidence: EvidenceSet, again: Callable[[], EvidenceSet] | None) -> None:
        """Read a host. ``again`` gives its evidence once more; None: that can't be done."""
        made = snapshot.build(evidence)
        self.cards.append(card(made))
        self.rows.append(drift.row(made))
        if again is not None and self._room is not None:
            self._room -= sum(len(entry.stdout) for entry in evidence)
            self._hosts[evidence.host] = made if self._room >= 0 else again
        else:
            self._hosts[evidence.host] = made

    def release(self, hosts: Iterable[str]) -> None:
        """Say that these hosts are done with, and so are those that were read again."""
        self._lent.clear()
        for host in hosts:
            self._hosts[host] = self._gone

    @staticmethod
    def _gone() -> EvidenceSet:
        raise ValueError("the host was released")

    def __getitem__(self, host: str) -> Snapshot:
        kept = self._hosts[host]
        if isinstance(kept, Snapshot):
            return kept
        if host not in self._lent:
            self._lent[host] = snapshot.build(kept())
        return self._lent[host]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)


class Aside:
    """Texts by name that wait for their turn: the first in memory, the others in a file without a name."""

    ROOM = 32 * 1024 * 1024

    def __init__(self) -> None:
        self._here: dict[str, str] = {}
        self._there: dict[str, tuple[int, int]] = {}
        self._file: IO[bytes] | None = None
        self._room = self.ROOM

    def put(self, name: str, text: str) -> None:
        """Lay a text aside."""
        if len(text) <= self._room:
            self._room -= len(text)
            self._here[name] = text
            return
        self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - closed with this object
        data = text.encode()
        self._there[name] = (self._file.seek(0, 2), len(data))
        self._file.write(data)

    def take(self, name: str) -> str | None:
        """Return a text, which is then no longer here, or None where there is none of this name."""
        if name in self._here:
            text = self._here.pop(name)
            self._room += len(text)
            return text
        if name not in self._there or self._file is None:
            return None
        start, size = self._there.pop(name)
        self._file.seek(start)
        return self._file.read(size).decode()
