"""The paths between the GPUs of one host as a table: what the driver grants, and the rung that each pair reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..core.finding import RUNG_CLAIMED, RUNG_COPIED, RUNG_DELIVERED, RUNGS
from ..core.measurement import Measurement, Pair
from ..core.snapshot import Snapshot
from ..rules.peers import Grants, grants, why_no_grants

CODES: Mapping[str, str] = {
    "OK": "granted",
    "NS": "not supported",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "DR": "disabled by a registry key",
    "U": "unknown to the driver",
    "yes": "the test says that peer access is possible",
    "no": "the test says that peer access is not possible",
    "?": "not read",
}
_MODES: Mapping[str, str] = {"r": "reads", "w": "writes", "rw": "reads and writes"}
LINKS: Mapping[str, str] = {
    "NV": "NVLinks (the number says how many)",
    "C2C": "chip-to-chip link",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
}


@dataclass(frozen=True)
class Cell:
    """One ordered pair of GPUs.

    ``state``: self, granted, refused, unknown, wrong (data arrived wrong). ``rung`` None: nothing is known.
    ``link``: what ``topo -m`` names; ``figure``: a bandwidth that was measured, with its unit.
    """

    code: str
    state: str
    rung: int | None = None
    link: str = ""
    figure: str = ""
    said: str = ""

    @property
    def rung_name(self) -> str:
        """Return the rung's name, or "" where there is none."""
        return RUNGS[self.rung] if self.rung is not None else ""


@dataclass(frozen=True)
class Table:
    """All pairs, row by row, with what limits the table."""

    gpus: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def cells(self) -> Iterator[Cell]:
        """Return every cell of different GPUs."""
        return (cell for row in self.rows for cell in row if cell.state != "self")

    @property
    def reached(self) -> bool:
        """Whether any cell stands on a rung."""
        return any(cell.rung is not None for cell in self.cells)

    @property
    def codes(self) -> dict[str, str]:
        """Return the codes that occur, with their meanings."""
        seen = {part for cell in self.cells for part in cell.code.split("/")}
        return {code: meaning for code, meaning in CODES.items() if code in seen}

    @property
    def links(self) -> dict[str, str]:
        """Return the kinds of link that occur, with their meanings."""
        seen = {cell.link for cell in self.cells if cell.link}
        return {code: text for code, text in LINKS.items() if any(one.startswith(code) for one in seen)}


def table(snapshot: Snapshot) -> Table | None:
    """Return the table of a host's GPUs, or None where fewer than two are known by name."""
    found = grants(snapshot)
    topology = snapshot.topology.value
    runs = tuple(run for kind, ones in snapshot.measurements.items() if kind != "host" for run in ones)
    seen = _Seen(snapshot, runs)
    gpus = found.gpus if found else topology.gpus if topology else seen.gpus
    if len(gpus) < 2:
        return None
    links = topology.links if topology else {}
    rows = tuple(
        tuple(
            Cell("", "self") if row == column else _cell((row, column), found, links.get((row, column), ""), seen)
            for column in gpus
        )
        for row in gpus
    )
    notes = []
    if found is None:
        notes.append(f"What the driver grants is not known: {why_no_grants(snapshot)}.")
    elif not found.complete:
        notes.append("Only a part of the driver's matrices was read.")
    if found and len(found.modes) > 1 and any("/" in cell.code for row in rows for cell in row):
        notes.append("Two codes in a cell: reads / writes.")
    return Table(gpus, rows, (*notes, *seen.notes))


def _cell(pair: Pair, found: Grants | None, link: str, seen: _Seen) -> Cell:
    codes = found.codes.get(pair, {}) if found else {}
    said = ", ".join(f"{_MODES.get(mode, mode)} {code}" for mode, code in codes.items())
    if codes and found:
        code = "/".join(dict.fromkeys(codes.values()))
        granted: bool | None = found.granted(pair)
    else:
        granted = seen.access.get(pair)
        code = "?" if granted is None else "yes" if granted else "no"
    figure = seen.figures.get(pair, "")
    if pair in seen.wrong:
        return Cell(code, "wrong", RUNG_CLAIMED if granted is not None else None, link, figure, said)
    if granted is None:
        return Cell(code, "unknown", None, link, figure, said)
    # What was copied between GPUs without a grant went through host memory: that is no rung of this path.
    rung = seen.rungs.get(pair, RUNG_CLAIMED) if granted else RUNG_CLAIMED
    return Cell(code, "granted" if granted else "refused", rung, link, figure, said)


class _Seen:
    """What the tests of pairs showed, by pair."""

    def __init__(self, snapshot: Snapshot, runs: tuple[Measurement, ...]) -> None:
        self.access: dict[Pair, bool] = {}
        self.rungs: dict[Pair, int] = {}
        self.figures: dict[Pair, str] = {}
        self.wrong: set[Pair] = set()
        self.notes: list[str] = []
        names: set[str] = set()
        for run in runs:
            named = _names(snapshot, run)
            names |= set(named.values())
            self._add(run, named)
        self.gpus = tuple(sorted(names, key=lambda name: (len(name), name)))

    def _add(self, run: Measurement, named: Mapping[str, str]) -> None:
        for pair, access in run.access.items():
            self.access.setdefault(_pair(pair, named), access)
        most = run.rung if run.rung is not None else -1
        for matrix in run.matrices:
            if matrix.ends != "gpu" or matrix.p2p is False:
                continue
            for pair, value in matrix.between().items():
                pair = _pair(pair, named)
                if matrix.quantity == "bandwidth" and not matrix.both_ways:
                    self.figures.setdefault(pair, f"{value:.3g} {matrix.unit}")
                if most >= RUNG_COPIED:
                    self.rungs[pair] = max(self.rungs.get(pair, 0), RUNG_COPIED)
        for copy in run.copies:
            pair = _pair(copy.devices, named)
            if copy.bandwidth_gbps is not None:
                self.figures.setdefault(pair, f"{copy.bandwidth_gbps:.3g} GB/s")
            if copy.verified is False:
                self.wrong |= {pair, (pair[1], pair[0])}
            elif copy.verified and most >= RUNG_DELIVERED:
                # Each of the two GPUs reads the other's memory before values are compared.
                for both in (pair, (pair[1], pair[0])):
                    self.rungs[both] = max(self.rungs.get(both, 0), RUNG_DELIVERED)
        if run.status == "ok" and not run.copies and most >= RUNG_DELIVERED:
            self._group(run, most, [named[f"GPU{device.index}"] for device in run.devices])
        if run.status != "ok":
            why = f": {run.failure}" if run.failure else ""
            self.notes.append(f"{run.backend}, {run.kind}: ended with {run.status.replace('_', ' ')}{why}.")

    def _group(self, run: Measurement, rung: int, gpus: list[str]) -> None:
        """Take a test of a whole group for each of its pairs, and say so: it does not look at them one by one."""
        for pair in ((first, second) for first in gpus for second in gpus if first != second):
            self.rungs[pair] = max(self.rungs.get(pair, 0), rung)
        self.notes.append(
            f"{run.backend}, {run.kind} over {len(gpus)} GPUs: {RUNGS[rung]} as a group, not pair by pair."
        )


def _names(snapshot: Snapshot, run: Measurement) -> dict[str, str]:
    """Return what the GPUs of a test are called elsewhere: CUDA may number them in another order than nvidia-smi."""
    by_bus = {_bus(gpu.bus_id): f"GPU{gpu.index}" for gpu in snapshot.gpus.value or () if gpu.index is not None}
    by_bus.pop(None, None)
    found = {}
    for device in run.devices:
        own = f"GPU{device.index}"
        found[own] = by_bus.get(_bus(device.bus), own)
    return found if len(set(found.values())) == len(found) else {name: name for name in found}


def _bus(text: str) -> int | None:
    parts = text.split(":")
    try:
        return int(parts[-2] if len(parts) > 1 else parts[0], 16)
    except ValueError:
        return None


def _pair(pair: Pair, named: Mapping[str, str]) -> Pair:
    first, second = (f"GPU{one}" if one.isdigit() else one for one in pair)
    return named.get(first, first), named.get(second, second)
