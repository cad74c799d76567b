"""Measurements: what a test of the paths between GPUs, or between GPU and host, really saw.

A measurement says which rung of the evidence ladder it reached. A writer's bandwidth is rung 1, the owner's own look at
the data is rung 2, a value-checked collective over a known peer path is rung 3. What reached none says so: ``None``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# ``inconclusive``: the output ends before its own verdict. ``error``: the test could not run to its end.
Status = Literal["ok", "wrong_results", "hang", "error", "unsupported", "inconclusive"]

Pair = tuple[str, str]


@dataclass(frozen=True)
class Device:
    """One GPU as a test numbers it. ``bus`` as printed, lower case; ``host`` where a test names it."""

    index: int
    name: str = ""
    bus: str = ""
    host: str = ""
    pid: int | None = None


@dataclass(frozen=True)
class Matrix:
    """One table between devices: ``cells[row][column]`` in ``unit``; None where nothing was measured.

    ``quantity``: bandwidth, latency. ``operation``: write, read, or "" where the tool does not say. ``p2p``: whether
    peer access was switched on for it; None where the tool has no such switch. ``both_ways``: the sum of both
    directions. ``ends``: gpu (both ends are GPUs) or host (one end is host memory).
    """

    name: str
    quantity: str
    unit: str
    cells: tuple[tuple[float | None, ...], ...]
    p2p: bool | None = None
    operation: str = ""
    both_ways: bool = False
    ends: str = "gpu"
    complete: bool = True

    def between(self) -> dict[Pair, float]:
        """Return the values of different devices, by their names ``GPU0``, ``GPU1`` ..."""
        return {
            (f"GPU{row}", f"GPU{column}"): value
            for row, cells in enumerate(self.cells)
            for column, value in enumerate(cells)
            if row != column and value is not None
        }


@dataclass(frozen=True)
class Timing:
    """One half of a collective's row. ``wrong``: how many values were wrong, None where that was not checked."""

    time_us: float
    algbw_gbps: float
    busbw_gbps: float
    wrong: int | None = None


@dataclass(frozen=True)
class CollectiveRow:
    """One message size of a collective."""

    size_bytes: int
    count: int
    type: str
    redop: str
    out_of_place: Timing | None = None
    in_place: Timing | None = None

    @property
    def wrong(self) -> int:
        """Return how many wrong values both halves saw."""
        return sum(half.wrong or 0 for half in (self.out_of_place, self.in_place) if half is not None)


@dataclass(frozen=True)
class Copy:
    """One copy between two devices; ``first_error`` is the verification line of the first wrong element."""

    devices: Pair
    bandwidth_gbps: float | None = None
    verified: bool | None = None
    first_error: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One run of one test.

    ``kind``: p2p, host, or a collective's name (allreduce, alltoall, sendrecv ...). ``backend``: the tool. ``access``:
    what the driver told the tool of peer access (a claim). ``numbers``: single figures, their unit in the name.
    ``transports``: what NCCL's log in the same output says of the paths; empty where it says nothing. ``p2p_off``:
    whether peer access was switched off for the run; None where that is not told.
    """

    kind: str
    backend: str
    status: Status
    rung: int | None = None
    devices: tuple[Device, ...] = ()
    access: Mapping[Pair, bool] = field(default_factory=dict)
    results: tuple[Matrix | CollectiveRow | Copy, ...] = ()
    numbers: Mapping[str, float | int | str] = field(default_factory=dict)
    transports: tuple[str, ...] = ()
    p2p_off: bool | None = None
    complete: bool = True
    failure: str = ""
    fingerprint: str = ""
    started_at: str = ""
    wall_s: float | None = None
    source: str = ""
    excerpt: str = ""

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Return the tables of this run."""
        return tuple(one for one in self.results if isinstance(one, Matrix))

    @property
    def rows(self) -> tuple[CollectiveRow, ...]:
        """Return the message sizes of this run."""
        return tuple(one for one in self.results if isinstance(one, CollectiveRow))

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Return the single copies of this run."""
        return tuple(one for one in self.results if isinstance(one, Copy))

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts that took part, as the tool names them."""
        return tuple(dict.fromkeys(one.host for one in self.devices if one.host))
