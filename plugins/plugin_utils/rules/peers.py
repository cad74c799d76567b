"""The paths between the GPUs of one host, as far as claims and measurements go."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.finding import RUNG_CLAIMED, RUNG_DELIVERED, Excerpt
from ..core.measurement import Measurement, Pair
from ..core.snapshot import NOT_READ, Fact, P2pMatrix, Snapshot
from ..core.values import by_identity
from .common import gpu_count, listed
from .registry import Verdict, verdict
from .views import view

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

    @functools.cached_property
    def all_granted(self) -> bool:
        """Whether every pair that was read is granted."""
        return bool(self.codes) and all(self.granted(pair) for pair in self.codes)

    @functools.cached_property
    def none_granted(self) -> bool:
        """Whether no pair that was read is granted."""
        return bool(self.codes) and not any(self.granted(pair) for pair in self.codes)

    @functools.cached_property
    def islands(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of GPUs that granted paths connect, single GPUs included."""
        return components(
            self.gpus, [pair for pair in self.codes if self.granted(pair) and self.granted((pair[1], pair[0]))]
        )

    @functools.cached_property
    def unequal_modes(self) -> tuple[Pair, ...]:
        """Return the pairs whose modes have different codes."""
        return tuple(pair for pair, codes in self.codes.items() if len(set(codes.values())) > 1)

    @functools.cached_property
    def unequal_ways(self) -> tuple[Pair, ...]:
        """Return the pairs whose two directions have different codes."""
        back = {pair: self.codes.get((pair[1], pair[0]), {}) for pair in self.codes}
        return tuple(
            pair
            for pair, codes in self.codes.items()
            if codes != back[pair] and any(code != back[pair].get(mode, code) for mode, code in codes.items())
        )

    @functools.cached_property
    def refusals(self) -> Mapping[str, list[Pair]]:
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


@view
def grants(snapshot: Snapshot) -> Grants | None:
    """Return what ``nvidia-smi topo -p2p`` says for reads and writes, or None where it was not read."""
    read, write, both = (snapshot.p2p.get(mode, NOT_READ) for mode in JUDGED_MODES)
    return _granted(read, write, both) if read.known or write.known or both.known else None


@by_identity()
def _granted(*facts: Fact[P2pMatrix]) -> Grants:
    matrices = {mode: fact for mode, fact in zip(JUDGED_MODES, facts, strict=True) if fact.known}
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


@dataclass(frozen=True)
class Delivery:
    """What the delivery tests of a host say together.

    ``state``: delivered (every pair of the known GPUs), partly (some pairs), failed, inconclusive (the control without
    P2P failed too), or None: no test has a verdict. ``rung`` is the highest that held for all of its pairs.
    """

    state: str | None
    rung: int | None = None
    pairs: frozenset[Pair] = frozenset()
    bad: tuple[Measurement, ...] = ()
    good: tuple[Measurement, ...] = ()

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """Return what the state stands on."""
        return self.bad or self.good


@view
def deliveries(snapshot: Snapshot, count: int | None) -> Delivery:
    """Judge the tests in which the owner of the memory, or a value-checked collective, looked at the data.

    A collective counts only over a known peer path; with P2P switched off it is the control: where that fails too, the
    fault is not in the peer path.
    """
    tests = [one for kind, ones in snapshot.measurements.items() if kind != "host" for one in ones]
    good = [one for one in tests if one.status == "ok" and (one.rung or 0) >= RUNG_DELIVERED]
    bad = [one for one in tests if one.status in ("wrong_results", "hang") and _over_peers(one)]
    controls = [one for one in tests if one.p2p_off and one.rows and one.complete]
    broken = [one for one in controls if one.status != "ok"]
    if bad and broken:
        return Delivery("inconclusive", bad=tuple(bad))
    if bad:
        return Delivery("failed", bad=tuple(bad))
    if not good:
        return Delivery(None)
    pairs = frozenset(pair for one in good for pair in _pairs(one))
    wanted = count if count is not None else max(len(one.devices) for one in good)
    whole = len(pairs) >= wanted * (wanted - 1)
    rungs = [one.rung or 0 for one in good if len(_pairs(one)) == len(pairs)]
    rung = max(rungs, default=RUNG_DELIVERED)
    return Delivery("delivered" if whole else "partly", rung, pairs, good=tuple(good))


def _over_peers(one: Measurement) -> bool:
    """Whether a test with a bad end surely used peer access on one host."""
    if one.p2p_off:
        return False
    return one.backend != "nccl-tests" or any(path.startswith("P2P") for path in one.transports)


def _pairs(one: Measurement) -> set[Pair]:
    """Return the ordered pairs that a good test vouches for, by name; a collective vouches for all of its GPUs."""
    if one.copies:
        return {pair for copy in one.copies for pair in (copy.devices, (copy.devices[1], copy.devices[0]))}
    names = [f"GPU{device.index}" for device in one.devices]
    return {(first, second) for first in names for second in names if first != second}


def delivery(snapshot: Snapshot) -> str | None:
    """Return how the delivery test of the GPUs' paths ended: ``delivered``, ``failed`` ..., or None: not run."""
    return deliveries(snapshot, gpu_count(snapshot).value).state


@dataclass(frozen=True)
class PathState:
    """The best that can be said of all GPU paths of a host.

    ``state``: delivered, failed, granted, islands, refused, single (less than two GPUs), unknown.
    """

    state: str
    rung: int | None
    reason: str


@view
def path_state(snapshot: Snapshot, count: int | None) -> PathState:
    """Return the state of the paths between GPUs with the rung that it reached."""
    if count is not None and count < 2:
        return PathState("single", None, "less than two GPUs")
    ended = deliveries(snapshot, count)
    if ended.state == "delivered":
        return PathState("delivered", ended.rung, "the owner of the memory read the right bytes")
    if ended.state == "failed":
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


# --- words and steps that several rules share -----------------------------------------------------------------------


def shown(pairs: Sequence[Pair], most: int = 6) -> str:
    """Return pairs as ``GPU0-GPU1, ...``, each once whichever way round."""
    undirected = dict.fromkeys(tuple(sorted(pair, key=lambda one: (len(one), one))) for pair in pairs)
    return listed([f"{first}-{second}" for first, second in undirected], most)


def groups(islands: Sequence[Sequence[str]]) -> str:
    """Return ``{GPU0, GPU1}; {GPU2, GPU3}``."""
    return "; ".join("{" + ", ".join(island) + "}" for island in islands)


def excerpt(one: Measurement) -> Excerpt:
    """Return what a measurement stands on."""
    return Excerpt(one.source, one.excerpt or f"{one.backend}: {one.status}")


def delivery_test(gpus: int | None) -> tuple[str, ...]:
    """Return the commands that show whether peer data arrives: a control without P2P first, then the same with it."""
    perf = f"all_reduce_perf -b 4 -e 16M -f 4 -c 1 -g {gpus or 2}"
    return (
        "# with no engine running (nccl-tests); the control must pass first, with #wrong 0",
        f"NCCL_P2P_DISABLE=1 timeout 120 {perf}",
        f"NCCL_DEBUG=INFO NCCL_P2P_LEVEL=SYS timeout 120 {perf}",
        "# keep both outputs: `via P2P` lines and #wrong 0 show delivery; a time-out or any #wrong above 0 does not",
    )


def few_gpus(snapshot: Snapshot) -> Verdict | None:
    """Return the verdict of a host that surely has less than two GPUs, else None."""
    count = gpu_count(snapshot)
    if count.value is None or count.value >= 2:
        return None
    return verdict("not_applicable", "There are no two GPUs here", count, reason=f"{count.value} GPU(s) found")
