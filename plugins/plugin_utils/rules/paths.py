"""Rules D7 to D10: what tests of the paths between GPUs really showed, and where the GPUs sit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..core.finding import RUNG_COPIED, RUNGS, Excerpt, Fix, Gain
from ..core.measurement import Copy, Matrix, Measurement, Pair
from ..core.snapshot import Gpu, Snapshot, Topology
from .common import SECURITY_NOTES, counted, gpu_count, listed
from .knowledge import names, number
from .peers import components, deliveries, delivery_test, excerpt, few_gpus, grants, groups, shown, why_no_grants
from .registry import Fleet, Verdict, rule, verdict

# One lane and direction, GB/s, by PCI Express generation (8b/10b up to the second, 128b/130b from the third).
_LANE_GBPS: Mapping[int, float] = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.56}

TESTS = ("p2p_bandwidth_latency", "simple_p2p", "nvbandwidth", "nccl_tests")


# --- D7 -------------------------------------------------------------------------------------------------------------

_HANG_RISK = (
    "A test that hangs may keep the GPUs at full utilisation until they are reset (rule D18): run it on idle GPUs, "
    "with a time limit."
)


@rule(
    "D7",
    "p2p-delivery-verified",
    title="Data that one GPU sends to another arrives",
    roles=("bare_metal", "guest"),
    severity="critical",
    looks_at=TESTS,
    why=(
        "A grant and a copy's bandwidth are seen by the sender alone: in a public guest the sender read back its own "
        "writes at full speed while the owner of the memory saw zeros. Only a test in which the owner, or a "
        "value-checked collective, looks at the data shows delivery."
    ),
    restart="service",
    automation="ask",
    risk=f"Restarts the service. {_HANG_RISK} {SECURITY_NOTES['forced_p2p']}",
    verify="all_reduce_perf -c 1 with NCCL_DEBUG=INFO: `via P2P` and #wrong 0, after the same with NCCL_P2P_DISABLE=1",
    sources=("NVIDIA/nccl #2335", "club-3090", "CUDA samples simpleP2P", "nccl-tests"),
    gain=Gain("correct answers", "", "wrong peer data reaches every token"),
    without_role=True,
)
def _delivery(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if none := few_gpus(snapshot):
        yield none
        return
    count = gpu_count(snapshot).value
    found = deliveries(snapshot, count)
    evidence = [excerpt(one) for one in found.measurements]
    if found.state == "failed":
        yield verdict(
            "fail",
            f"Data between the GPUs does not arrive: {_what_failed(found.bad)}",
            *evidence,
            fix=Fix(
                "Switch P2P off for NCCL and the engine's own all-reduce, then look for the cause",
                (
                    "# in the unit of the engine: Environment=NCCL_P2P_DISABLE=1",
                    "# vLLM and SGLang: --disable-custom-all-reduce   (their kernels ignore NCCL's switch)",
                    "# leave NCCL_SHM_DISABLE unset",
                    "# then: IOMMU mode and ACS (rules E1, E2, C13), Resizable BAR (C15), a display on a GPU, the "
                    "clique (D1)",
                    *delivery_test(count),
                ),
            ),
            explains=("D11", "D12", "D14", "S1", "S4"),
            rung=max((one.rung or 0 for one in found.bad), default=0),
        )
    elif found.state == "inconclusive":
        yield verdict(
            "unknown",
            "Whether peer data arrives is not known: the control without P2P fails too",
            *evidence,
            reason="with NCCL_P2P_DISABLE=1 the values are wrong as well, so the fault is not (only) in the peer path",
        )
    elif found.state == "delivered":
        yield verdict(
            "pass",
            f"Data arrives between all tested GPUs ({RUNGS[found.rung or 0]}: {_what_passed(found.good)})",
            *evidence,
            rung=found.rung,
        )
    elif found.state == "partly":
        yield verdict(
            "unknown",
            f"Data arrives between {shown(sorted(found.pairs))}; the other pairs were not tested",
            *evidence,
            reason=f"{len(found.pairs) // 2} of {(count or 0) * ((count or 0) - 1) // 2} pairs were tested",
            rung=found.rung,
        )
    else:
        yield _untested(snapshot)


def _untested(snapshot: Snapshot) -> Verdict:
    granted = grants(snapshot)
    if granted is not None and granted.none_granted and granted.complete:
        return verdict(
            "not_applicable", "There is no peer path to test", *granted.facts, reason="the driver grants no pair"
        )
    runs = [one for kind, ones in snapshot.measurements.items() if kind != "host" for one in ones]
    copied = [one for one in runs if one.rung == RUNG_COPIED]
    unknown_path = [one for one in runs if one.backend == "nccl-tests" and one.status == "ok"]
    if unknown_path:
        reason = "the collective was right, but over which path it went is not in its output: run with NCCL_DEBUG=INFO"
    elif copied:
        reason = f"{copied[0].backend} shows what the sender saw; its output has no verdict of the receiver"
    else:
        reason = "no test of delivery was recorded"
    return verdict(
        "unknown",
        "Whether data arrives between the GPUs is not known",
        *(excerpt(one) for one in (unknown_path or copied)[:2]),
        reason=reason,
        rung=RUNG_COPIED if copied else None,
    )


def _what_failed(bad: Sequence[Measurement]) -> str:
    said = []
    for one in bad:
        if one.copies and one.copies[0].first_error:
            error = one.copies[0].first_error
            pair = shown([one.copies[0].devices])
            said.append(
                f"{one.backend} read {error.get('value')} instead of {error.get('expected')} ({pair}, element "
                f"{error.get('element')})"
            )
        elif one.status == "hang":
            said.append(f"{one.backend} did not end")
        else:
            said.append(f"{one.backend} counted {sum(row.wrong for row in one.rows) or 'some'} wrong values over P2P")
    return listed(list(dict.fromkeys(said)), 3)


def _what_passed(good: Sequence[Measurement]) -> str:
    return listed(list(dict.fromkeys(one.backend for one in good)))


# --- D8, D9: latency and bandwidth ----------------------------------------------------------------------------------


def _copies(snapshot: Snapshot) -> list[Measurement]:
    return [one for one in snapshot.measurements.get("p2p", ()) if one.matrices or one.copies]


def _reachable(snapshot: Snapshot, one: Measurement, pairs: Iterable[Pair]) -> dict[Pair, bool | None]:
    """Say which pairs may use peer access, as the test itself or else the driver says; None: not known."""
    found = grants(snapshot)
    return {
        pair: one.access[pair]
        if pair in one.access
        else found.granted(pair)
        if found is not None and pair in found.codes
        else None
        for pair in pairs
    }


def _nothing_copied(snapshot: Snapshot) -> Verdict:
    found = grants(snapshot)
    if found is not None and found.none_granted and found.complete:
        return verdict(
            "not_applicable", "There is no peer path to measure", *found.facts, reason="the driver grants no pair"
        )
    return verdict(
        "unknown",
        "Copies between the GPUs were not measured",
        reason="no output of p2pBandwidthLatencyTest, nvbandwidth or simpleP2P was recorded",
    )


@rule(
    "D8",
    "p2p-latency-band",
    title="A small copy between GPUs takes the time of a direct path",
    roles=("bare_metal", "guest"),
    severity="medium",
    looks_at=("p2p_bandwidth_latency", "nvbandwidth"),
    why=(
        "A direct copy takes about 1 us, one through host memory 8 us and more. Granted P2P with the latency of host "
        "memory is granted, but not used."
    ),
    automation="never",
    verify="p2pBandwidthLatencyTest: P2P=Enabled Latency Matrix",
    sources=("rtx6kpro", "club-3090", "cloud-hypervisor #6235"),
    rung=RUNG_COPIED,
    gain=Gain("14 -> 0.4", "us copy latency", "rtx6kpro"),
    without_role=True,
)
def _latency(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if none := few_gpus(snapshot):
        yield none
        return
    judged = False
    for one in _copies(snapshot):
        for table in one.matrices:
            if table.quantity == "latency" and table.ends == "gpu" and table.p2p is not False:
                judged = True
                yield _judge_latency(snapshot, one, table)
    if not judged:
        yield _nothing_copied(snapshot)


def _judge_latency(snapshot: Snapshot, one: Measurement, table: Matrix) -> Verdict:
    factor = 1000 if table.unit == "us" else 1
    times = {pair: value * factor for pair, value in table.between().items()}
    direct, staged = number("p2p.latency_direct_ns"), number("p2p.latency_staged_ns")
    may = _reachable(snapshot, one, times)
    slow = [pair for pair, value in times.items() if value >= staged]
    used = [pair for pair in slow if may[pair]]
    between = [pair for pair, value in times.items() if direct < value < staged and may[pair] is not False]
    evidence = _table_excerpt(one, table)
    worst = max(times.values(), default=0.0) / 1000
    if used:
        return verdict(
            "fail",
            f"P2P is granted for {shown(used)}, but a small copy takes {worst:.1f} us: it goes through host memory",
            evidence,
            subject=table.name,
            fix=Fix(
                "Find what keeps the copies off the direct path: IOMMU mode and ACS first (rules E1, E2)",
                ("nvidia-smi topo -p2p r; nvidia-smi topo -p2p w", "p2pBandwidthLatencyTest"),
            ),
        )
    if between:
        return verdict(
            "warn",
            f"A small copy between {shown(between)} takes more than {direct / 1000:g} us: too slow for a direct path",
            evidence,
            subject=table.name,
            fix=Fix("Repeat it on idle GPUs, then look at IOMMU mode and ACS", ("p2pBandwidthLatencyTest",)),
        )
    if slow and any(may[pair] is None for pair in slow):
        return verdict(
            "unknown",
            f"A small copy takes {worst:.1f} us, as through host memory; whether P2P is granted is not known",
            evidence,
            subject=table.name,
            reason=why_no_grants(snapshot),
        )
    if not times or not table.complete:
        return verdict(
            "unknown", "The latencies were read in part only", evidence, subject=table.name, reason="the table was cut"
        )
    if slow:
        return verdict(
            "pass",
            f"A small copy takes {worst:.1f} us, as expected without P2P between {shown(slow)}",
            evidence,
            subject=table.name,
        )
    return verdict(
        "pass",
        f"A small copy takes at most {worst:.2f} us: a direct path, as the sender sees it",
        evidence,
        subject=table.name,
    )


def _table_excerpt(one: Measurement, table: Matrix) -> Excerpt:
    rows = [
        f"{row:6} " + " ".join("   N/A" if cell is None else f"{cell:7.2f}" for cell in cells)
        for row, cells in enumerate(table.cells[:8])
    ]
    return Excerpt(one.source, "\n".join([f"{table.name} ({table.unit})", *rows]))


@rule(
    "D9",
    "p2p-bandwidth-band",
    title="Copies between GPUs reach the rate of their link",
    roles=("bare_metal", "guest"),
    severity="medium",
    looks_at=("p2p_bandwidth_latency", "nvbandwidth", "simple_p2p", "nvidia_smi.q"),
    why=(
        "A direct path carries about four fifths of its link. Peer traffic that is sent up to the root complex (ACS "
        "redirect, a translating IOMMU) carries less, at times less than a copy through host memory. The ratio alone "
        "proves no transport: with two GPUs, staging can come close to the link."
    ),
    automation="never",
    verify="p2pBandwidthLatencyTest: P2P=Enabled against P2P=Disabled",
    sources=("rtx6kpro", "NVIDIA/nccl #814", "NVIDIA/nvbandwidth #50", "PCI Express 5.0"),
    rung=RUNG_COPIED,
    gain=Gain("43 -> 103", "GB/s both ways", "rtx6kpro, Menlo"),
    without_role=True,
)
def _bandwidth(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if none := few_gpus(snapshot):
        yield none
        return
    runs = [one for one in _copies(snapshot) if _speeds(one)]
    if not runs:
        yield _nothing_copied(snapshot)
    for one in runs:
        found = list(_judge_bandwidth(snapshot, one))
        yield from found
        if not any(given.state in ("fail", "warn", "unknown") for given in found):
            yield _sound(one)


def _speeds(one: Measurement) -> bool:
    return any(table.quantity == "bandwidth" and table.ends == "gpu" for table in one.matrices) or any(
        copy.bandwidth_gbps is not None for copy in one.copies
    )


def _judge_bandwidth(snapshot: Snapshot, one: Measurement) -> Iterator[Verdict]:
    on = [table for table in one.matrices if table.quantity == "bandwidth" and table.ends == "gpu" and table.p2p]
    for table in on:
        off = next((x for x in one.matrices if x.p2p is False and x.both_ways == table.both_ways
                    and x.quantity == "bandwidth"), None)  # fmt: skip
        slower = list(_slower(snapshot, one, table, off)) if off else []
        yield from slower
        if not slower:
            yield from _against_link(snapshot, one, table.between(), table.both_ways, _table_excerpt(one, table))
    for table in on:
        if not table.both_ways:
            yield from _islands(one, table)
            break
    for copy in one.copies:
        if copy.bandwidth_gbps is not None:
            yield from _against_link(
                snapshot, one, {copy.devices: copy.bandwidth_gbps}, False, _copy_excerpt(one, copy)
            )


def _copy_excerpt(one: Measurement, copy: Copy) -> Excerpt:
    return Excerpt(one.source, f"copy between {shown([copy.devices])}: {copy.bandwidth_gbps} GB/s")


def _slower(snapshot: Snapshot, one: Measurement, table: Matrix, off: Matrix) -> Iterator[Verdict]:
    without = off.between()
    share = number("p2p.slower_percent") / 100
    slow = {pair: speed for pair, speed in table.between().items() if speed < share * without.get(pair, 0.0)}
    may = _reachable(snapshot, one, slow) if slow else {}
    pairs = {pair: (speed, without[pair]) for pair, speed in slow.items() if may[pair] is not False}
    if not pairs:
        return
    ratio = sum(first / second for first, second in pairs.values()) / len(pairs)
    least, most = min(first for first, _ in pairs.values()), max(second for _, second in pairs.values())
    yield verdict(
        "fail",
        f"Copies are slower with P2P than without: {least:.1f} against {most:.1f} GB/s, on average {ratio:.0%} "
        f"({counted(len(pairs), 'directed pair')}: {shown(list(pairs), 3)})",
        _table_excerpt(one, table),
        _table_excerpt(one, off),
        subject=f"{one.source} {table.name}",
        why="Peer traffic takes a slow way, typically up to the root complex and back: ACS redirect or a translating "
        "IOMMU.",
        fix=Fix(
            "Find the redirect; until then let NCCL go through host memory",
            (
                "lspci -vvv | grep -E '^[0-9a-f]|ACSCtl'   # ReqRedir+ or CmpltRedir+ above a GPU: rule E2",
                "cat /proc/cmdline; ls /sys/class/iommu   # rule E1",
                "# until then, in the unit of the engine: Environment=NCCL_P2P_DISABLE=1",
            ),
        ),
    )


def link_gbps(snapshot: Snapshot, index: int) -> float | None:
    """Return what the link of a GPU carries one way, in GB/s, or None where generation or width is not known."""
    gpu: Gpu | None = next((one for one in snapshot.gpus.value or () if one.index == index), None)
    lane = _LANE_GBPS.get(gpu.link_gen_max or 0) if gpu is not None else None
    width = (gpu.link_width_current or gpu.link_width_max) if gpu is not None else None
    return lane * width if lane and width else None


def _has_nvlink(snapshot: Snapshot, one: Measurement) -> bool | None:
    """Whether NVLink connects the GPUs; None where neither the topology nor their names tell."""
    topology = snapshot.topology.value
    if topology is not None and topology.gpus:
        return any(link.startswith("NV") for link in topology.links.values())
    matrix = snapshot.p2p.get("n")
    if matrix is not None and matrix.value is not None:
        return any(code == "OK" for code in matrix.value.pairs().values())
    known = [device.name for device in one.devices if device.name] or [g.name for g in snapshot.gpus.value or ()]
    without = names("gpu.names_without_nvlink")
    if known and all(any(part in name for part in without) for name in known):
        return False
    return None


def _against_link(
    snapshot: Snapshot, one: Measurement, speeds: Mapping[Pair, float], both: bool, evidence: Excerpt
) -> Iterator[Verdict]:
    nvlink = _has_nvlink(snapshot, one)
    may = _reachable(snapshot, one, speeds)
    usable = {pair: speed for pair, speed in speeds.items() if may[pair] is not False}
    subject = f"{one.source} {'both ways' if both else 'one way'}"
    limit = number("p2p.link_limit_mbps") / 1000 * (2 if both else 1)
    over = {pair: speed for pair, speed in usable.items() if speed > limit}
    if over and nvlink is None:
        yield verdict(
            "unknown",
            f"{max(over.values()):.1f} GB/s between {shown(list(over), 3)} is more than PCI Express 5.0 x16 carries; "
            "whether NVLink connects them is not known",
            evidence,
            subject=subject,
            reason="neither nvidia-smi topo -m nor the names of the GPUs tell of NVLink",
        )
        return
    if over and nvlink is False:
        yield verdict(
            "warn",
            f"{max(over.values()):.1f} GB/s between {shown(list(over), 3)} is more than PCI Express 5.0 x16 carries "
            f"({limit:.0f}), and there is no NVLink: no such transfer took place",
            evidence,
            subject=subject,
            severity="medium",
            why="A figure above the link means that the data did not cross it: a sender that reads back its own "
            "memory, or a copy that never ended. It is no proof of a fast path.",
            fix=Fix("Test delivery; do not use the figure", delivery_test(gpu_count(snapshot).value)),
        )
        return
    if nvlink:
        return
    known = {pair: _share(snapshot, pair, speed, both) for pair, speed in usable.items()}
    shares = {pair: share for pair, share in known.items() if share is not None}
    failed = {pair: x for pair, x in shares.items() if x < number("p2p.bandwidth_fail_percent") / 100}
    warned = {pair: x for pair, x in shares.items() if x < number("p2p.bandwidth_warn_percent") / 100}
    if warned:
        worst = min(warned, key=lambda pair: warned[pair])
        yield verdict(
            "fail" if failed else "warn",
            f"Copies between {shown(list(warned), 3)} reach {usable[worst]:.1f} GB/s, {warned[worst]:.0%} of what "
            "their links usually give",
            evidence,
            subject=subject,
            severity="medium",
            fix=Fix(
                "Read the links under load, then look for a shared or redirected path",
                ("nvidia-smi -q | grep -A12 'GPU Link Info'", "lspci -vvv | grep -E '^[0-9a-f]|ACSCtl|LnkSta:'"),
            ),
        )
    unknown = {pair: speed for pair, speed in usable.items() if pair not in shares}
    slow = {pair: x for pair, x in unknown.items() if x < number("p2p.slow_mbps") / 1000 * (2 if both else 1)}
    if slow:
        yield verdict(
            "warn",
            f"Copies between {shown(list(slow), 3)} reach only {min(slow.values()):.2f} GB/s: the rate of four lanes "
            "of Gen4 or eight of Gen3",
            evidence,
            subject=subject,
            severity="medium",
            why="The link of these GPUs is not known here. If they have sixteen lanes, the copies take a slow way.",
            fix=Fix("Read the links under load", ("nvidia-smi -q | grep -A12 'GPU Link Info'", "lspci -vvv")),
        )


def _share(snapshot: Snapshot, pair: Pair, speed: float, both: bool) -> float | None:
    """Return the share that a speed has of what the pair's links usually give, or None where a link is not known."""
    links = [link_gbps(snapshot, int(name[3:])) for name in pair if name[3:].isdigit()]
    if len(links) != 2 or None in links:
        return None
    slowest = min(link for link in links if link is not None)
    topology = snapshot.topology.value
    far = topology is not None and topology.links.get(pair) in ("NODE", "SYS")
    name = f"p2p.band_percent_{'both_ways' if both else 'one_way'}{'_cross' if far else ''}"
    return speed / (slowest * (2 if both else 1) * number(name) / 100)


def _islands(one: Measurement, table: Matrix) -> Iterator[Verdict]:
    """Say which GPUs are nearer to each other, where the speeds fall into groups."""
    speeds = table.between()
    gpus = sorted({gpu for pair in speeds for gpu in pair}, key=lambda gpu: (len(gpu), gpu))
    if not table.complete or len(gpus) < 4:
        return
    near_from = max(speeds.values()) * number("p2p.island_percent") / 100
    near = [pair for pair, speed in speeds.items() if speed >= near_from]
    islands = components(gpus, near)
    inside = {(a, b) for island in islands for a in island for b in island if a != b}
    if len(islands) < 2 or set(near) != inside or any(len(island) < 2 for island in islands):
        return
    across = [speed for pair, speed in speeds.items() if pair not in inside]
    within = [speed for pair, speed in speeds.items() if pair in inside]
    less = 1 - (sum(across) / len(across)) / (sum(within) / len(within))
    yield verdict(
        "info",
        f"The GPUs form {len(islands)} islands: {groups(islands)}; across them copies are {less:.0%} slower: place "
        "tensor parallel groups inside an island",
        _table_excerpt(one, table),
        subject="islands",
    )


def _sound(one: Measurement) -> Verdict:
    tables = [x for x in one.matrices if x.quantity == "bandwidth" and x.ends == "gpu" and x.p2p]
    whole = bool(one.copies) or bool(tables and all(table.complete for table in tables))
    speeds = [speed for table in tables if not table.both_ways for speed in table.between().values()]
    speeds += [copy.bandwidth_gbps for copy in one.copies if copy.bandwidth_gbps is not None]
    evidence = _table_excerpt(one, tables[0]) if tables else excerpt(one)
    if not whole or not speeds:
        return verdict(
            "unknown",
            "The bandwidths were read in part only",
            evidence,
            subject=one.source,
            reason="a table with P2P on was cut or is missing",
        )
    least, most = f"{min(speeds):.1f}", f"{max(speeds):.1f}"
    return verdict(
        "pass",
        f"Copies between GPUs reach {least if least == most else f'{least} to {most}'} GB/s ({one.backend}, as the "
        "sender sees it)",
        evidence,
        subject=one.source,
    )


# --- D10: where the GPUs sit ----------------------------------------------------------------------------------------


@rule(
    "D10",
    "topo-codes",
    title="GPUs that work together sit close to each other",
    roles=("bare_metal", "guest"),
    severity="medium",
    looks_at=("nvidia_smi.topo_m",),
    why=(
        "NV# is NVLink, PIX one bridge, PXB several, PHB the host bridge, NODE several host bridges of one NUMA node, "
        "SYS another socket or die. None of them says whether P2P works. In a guest the matrix shows the emulator's "
        "ports."
    ),
    automation="never",
    verify="nvidia-smi topo -m; lspci -tv",
    sources=("nvidia-smi topo legend", "rtx6kpro", "NVIDIA/cuda-samples #284"),
    gain=Gain("6.5 -> 13.17", "GB/s between two PHB slots", "club-3090, chipset slot against CPU slot"),
    without_role=True,
)
def _topology(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    topology = snapshot.topology.value
    if topology is None or not topology.gpus:
        reason = snapshot.topology.reason or "nvidia-smi topo -m was not read"
        yield few_gpus(snapshot) or verdict("unknown", "Where the GPUs sit is not known", reason=reason)
        return
    if len(topology.gpus) < 2:
        yield verdict("not_applicable", "There are no two GPUs here", snapshot.topology, reason="the matrix has one")
        return
    if snapshot.role.value == "guest":
        codes = sorted({code for pair, code in topology.links.items() if set(pair) <= set(topology.gpus)} - {"X"})
        yield verdict(
            "info",
            f"The guest's matrix ({', '.join(codes)}) shows the emulated ports, not the machine: ask the hypervisor",
            snapshot.topology,
        )
        return
    found = [*_sockets(snapshot, topology), *_numa(snapshot, topology), *_nics(snapshot, topology)]
    yield from found
    if topology.truncated and not found:
        yield verdict("unknown", "The topology was read in part only", snapshot.topology, reason="the matrix was cut")
    elif not any(one.subject == "topology" for one in found):
        yield verdict("pass", f"No pair of the {len(topology.gpus)} GPUs crosses sockets", snapshot.topology)


def _sockets(snapshot: Snapshot, topology: Topology) -> Iterator[Verdict]:
    """Say which pairs cross the sockets, and whether that is known to work."""
    links = {pair: code for pair, code in topology.links.items() if set(pair) <= set(topology.gpus)}
    crossing = [pair for pair, code in links.items() if code == "SYS"]
    if not crossing:
        return
    near = [pair for pair, code in links.items() if code not in ("SYS", "X")]
    islands = components(topology.gpus, near)
    works = _verified(snapshot, crossing)
    if works:
        yield verdict(
            "info",
            f"{shown(crossing)} cross sockets or dies (SYS), and data arrives there all the same: {works}",
            snapshot.topology,
            subject="topology",
        )
        return
    alone = all(len(island) == 1 for island in islands)
    where = groups([island for island in islands if len(island) > 1])
    yield verdict(
        "warn" if alone else "info",
        f"{shown(crossing)} cross sockets or dies (SYS)"
        + ("" if alone else f": keep tensor parallel groups inside {where}"),
        snapshot.topology,
        subject="topology",
        why="Tensor parallel traffic between them takes the link between the dies or sockets. SYS alone does not mean "
        "that P2P is refused.",
        fix=Fix("Prefer slots on one NUMA node for GPUs that work together", ("nvidia-smi topo -m", "lspci -tv"))
        if alone
        else None,
    )


def _verified(snapshot: Snapshot, crossing: Sequence[Pair]) -> str:
    """Return the test that verified all of these pairs with its figure, or ""."""
    found = deliveries(snapshot, gpu_count(snapshot).value)
    if found.bad or not set(crossing) <= found.pairs:
        return ""
    speeds = [copy.bandwidth_gbps for one in found.good for copy in one.copies if copy.bandwidth_gbps is not None]
    test = _what_passed(found.good)
    return f"{test}, {max(speeds):.2f} GB/s" if speeds else test


def _numa(snapshot: Snapshot, topology: Topology) -> Iterator[Verdict]:
    known = {gpu: topology.numa_affinity.get(gpu) for gpu in topology.gpus if gpu in topology.numa_affinity}
    without = [gpu for gpu, node in known.items() if node is None]
    nodes = {gpu: node for gpu, node in known.items() if node is not None}
    if nodes and without:
        cpus = [f"{gpu} to CPUs {topology.cpu_affinity[gpu]}" for gpu in without if topology.cpu_affinity.get(gpu)]
        yield verdict(
            "info",
            f"The firmware names no NUMA node for {listed(without)}"
            + (f": pin {listed(cpus)} instead of using numactl --cpunodebind" if cpus else ""),
            snapshot.topology,
            subject="numa",
        )
    elif len(set(nodes.values())) > 1:
        places = listed([f"{gpu} on node {node}" for gpu, node in nodes.items()], 8)
        yield verdict(
            "info", f"The GPUs sit on several NUMA nodes ({places}): pin each worker to its own", snapshot.topology,
            subject="numa",
        )  # fmt: skip


def _nics(snapshot: Snapshot, topology: Topology) -> Iterator[Verdict]:
    """Name the network card beside each GPU, and those that have none beside them."""
    beside = {
        gpu: [nic for nic in topology.nics if topology.links.get((gpu, nic)) in ("PIX", "PXB")] for gpu in topology.gpus
    }
    if len(topology.nics) < 2 or not all(beside.values()):
        return
    alone = [nic for nic in topology.nics if all(nic not in nics for nics in beside.values())]
    pairs = listed([f"{gpu}: {', '.join(nics)}" for gpu, nics in beside.items()], 16)
    yield verdict(
        "info",
        f"Each GPU has its own network card ({pairs})"
        + (f"; leave {listed(alone)} out of NCCL_IB_HCA: no GPU is beside it" if alone else ""),
        snapshot.topology,
        subject="nics",
    )
