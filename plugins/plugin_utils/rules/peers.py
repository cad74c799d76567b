"""The paths between the GPUs of one host, as far as claims and measurements go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..core.finding import RUNG_CLAIMED, RUNG_DELIVERED
from ..core.snapshot import Fact, P2pMatrix, Snapshot

Pair = tuple[str, str]

# Reads, writes, or both in one table. Atomics over PCIe are never granted, so mode a is not judged.
JUDGED_MODES = ("r", "w", "rw")


@dataclass(frozen=True)
class Grants:
    """What the driver says about each ordered pair of GPUs, by mode. Rung 0: a claim.

    ``complete`` is False where a matrix was cut or reads or writes are missing.
    """

    gpus: tuple[str, ...]
    codes: Mapping[Pair, Mapping[str, str]]
    modes: tuple[str, ...]
    complete: bool
    facts: tuple[Fact[P2pMatrix], ...] = field(default_factory=tuple)

    def granted(self, pair: Pair) -> bool:
        """Whether every mode that was read says OK for this pair."""
        codes = self.codes.get(pair, {})
        return bool(codes) and all(code == "OK" for code in codes.values())

    @property
    def all_granted(self) -> bool:
        """Whether every pair that was read is granted."""
        return bool(self.codes) and all(self.granted(pair) for pair in self.codes)

    @property
    def none_granted(self) -> bool:
        """Whether no pair that was read is granted."""
        return bool(self.codes) and not any(self.granted(pair) for pair in self.codes)

    @property
    def islands(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of GPUs that granted paths connect, single GPUs included."""
        return components(
            self.gpus, [pair for pair in self.codes if self.granted(pair) and self.granted((pair[1], pair[0]))]
        )

    @property
    def refusals(self) -> dict[str, list[Pair]]:
        """Return the pairs by the code that refuses them."""
        found: dict[str, list[Pair]] = {}
        for pair, codes in self.codes.items():
            for code in dict.fromkeys(one for one in codes.values() if one != "OK"):
                found.setdefault(code, []).append(pair)
        return found


def components(nodes: Iterable[str], edges: Iterable[Pair]) -> tuple[tuple[str, ...], ...]:
    """Return the connected components, each in the order of ``nodes``."""
    order = list(dict.fromkeys(nodes))
    near: dict[str, set[str]] = {node: set() for node in order}
    for first, second in edges:
        near.setdefault(first, set()).add(second)
        near.setdefault(second, set()).add(first)
    seen: set[str] = set()
    found = []
    for start in order:
        if start in seen:
            continue
        group, todo = set(), [start]
        while todo:
            node = todo.pop()
            if node not in group:
                group.add(node)
                todo += near[node] - group
        seen |= group
        found.append(tuple(sorted(group, key=order.index)))
    return tuple(found)


def grants(snapshot: Snapshot) -> Grants | None:
    """Return what ``nvidia-smi topo -p2p`` says for reads and writes, or None where it was not read."""
    matrices = {mode: snapshot.p2p[mode] for mode in JUDGED_MODES if mode in snapshot.p2p and snapshot.p2p[mode].known}
    if not matrices:
        return None
    codes: dict[Pair, dict[str, str]] = {}
    gpus: list[str] = []
    cut = False
    for mode, fact in matrices.items():
        matrix = fact.value
        assert matrix is not None
        gpus += [gpu for gpu in matrix.gpus if gpu not in gpus]
        cut = cut or matrix.truncated
        for pair, code in matrix.pairs().items():
            codes.setdefault(pair, {})[mode] = code
    both = "rw" in matrices or {"r", "w"} <= set(matrices)
    wanted = len(gpus) * (len(gpus) - 1)
    return Grants(
        tuple(gpus), codes, tuple(matrices), both and not cut and len(codes) == wanted, tuple(matrices.values())
    )


def why_no_grants(snapshot: Snapshot) -> str:
    """Say why there is no matrix of reads and writes."""
    for mode in JUDGED_MODES:
        fact = snapshot.p2p.get(mode)
        if fact is not None and fact.reason:
            return fact.reason
    return "nvidia-smi topo -p2p r and w were not read"


def delivery(snapshot: Snapshot) -> str | None:
    """Return how the delivery test of the GPUs' paths ended: ``delivered``, ``failed`` ..., or None: not run."""
    found = snapshot.measurements.get("p2p")
    status = found.get("status") if isinstance(found, Mapping) else None
    return str(status) if status else None


@dataclass(frozen=True)
class PathState:
    """The best that can be said of all GPU paths of a host.

    ``state``: delivered, failed, granted, islands, refused, single (less than two GPUs), unknown.
    """

    state: str
    rung: int | None
    reason: str


def path_state(snapshot: Snapshot, gpu_count: int | None) -> PathState:
    """Return the state of the paths between GPUs with the rung that it reached."""
    if gpu_count is not None and gpu_count < 2:
        return PathState("single", None, "less than two GPUs")
    ended = delivery(snapshot)
    if ended == "delivered":
        return PathState("delivered", RUNG_DELIVERED, "the owner of the memory read the right bytes")
    if ended == "failed":
        return PathState("failed", RUNG_CLAIMED, "the delivery test failed")
    found = grants(snapshot)
    if found is None or not found.codes:
        return PathState("unknown", None, why_no_grants(snapshot))
    if found.none_granted:
        return PathState("refused", RUNG_CLAIMED, "the driver grants no pair")
    if not found.all_granted:
        return PathState("islands", RUNG_CLAIMED, "the driver grants some pairs")
    if not found.complete:
        return PathState("unknown", RUNG_CLAIMED, "only a part of the matrices was read")
    return PathState("granted", RUNG_CLAIMED, "the driver grants every pair; delivery was not tested")
