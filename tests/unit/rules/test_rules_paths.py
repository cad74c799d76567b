"""Rules D7 to D10: what tests showed of the paths between GPUs, and no more than that."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.measurement import (
    CollectiveRow,
    Copy,
    Device,
    Matrix,
    Measurement,
    Timing,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot


def table(name: str, *rows: tuple[float | None, ...], **more: object) -> Matrix:
    made = {"quantity": "bandwidth", "unit": "GB/s", "p2p": "off" not in name, "both_ways": "both" in name, **more}
    return Matrix(name, cells=tuple(rows), **made)


def pair(on: float, off: float | None = None, name: str = "one_way", **more: object) -> tuple[Matrix, ...]:
    made = [table(f"{name}_on_write", (800.0, on), (on, 800.0), **more)]
    return (*([table(f"{name}_off", (800.0, off), (off, 800.0))] if off else []), *made)


def latency(us: float, **more: object) -> Matrix:
    return table("latency_gpu_on_write", (1.4, us), (us, 1.4), **{"quantity": "latency", "unit": "us", **more})


def copied(
    *tables: Matrix, access: bool | None = True, names: str = "NVIDIA A40"
) -> dict[str, tuple[Measurement, ...]]:
    devices = (Device(0, names), Device(1, names))
    pairs = {} if access is None else {("GPU0", "GPU1"): access, ("GPU1", "GPU0"): access}
    return {
        "p2p": (
            Measurement("p2p", "p2pBandwidthLatencyTest", "ok", 1, devices, access=pairs, results=tables,
                        source="p2p_bandwidth_latency", excerpt="[P2P (Peer-to-Peer) GPU Bandwidth Latency Test]"),
        )
    }  # fmt: skip


def simple(gbps: float | None, verified: bool | None, name: str = "NVIDIA A40") -> Measurement:
    status = {True: "ok", False: "wrong_results", None: "inconclusive"}[verified]
    return Measurement(
        "p2p", "simpleP2P", status, {True: 2, None: 1, False: 1}[verified], (Device(0, name), Device(1, name)),
        results=(Copy(("GPU0", "GPU1"), gbps, verified, {"element": "0", "value": "nan", "expected": "0.0"}
                      if verified is False else {}),), source="simple_p2p", excerpt="a line",
    )  # fmt: skip


def collective(
    status: str = "ok", transports: tuple[str, ...] = ("P2P/CUMEM",), wrong: int = 0, off: bool | None = None
):
    row = CollectiveRow(1024, 256, "float", "sum", Timing(9.0, 1.0, 1.0, wrong), Timing(9.0, 1.0, 1.0, 0))
    rung = 3 if status == "ok" and transports == ("P2P/CUMEM",) and not off else None
    return Measurement(
        "allreduce", "nccl-tests", status, rung, (Device(0, host="h"), Device(1, host="h")), results=(row,),
        transports=transports, p2p_off=off, source="nccl_tests", excerpt="# Out of bounds values : ...",
    )  # fmt: skip


def bare(count: int = 2, tests: dict[str, tuple[Measurement, ...]] | None = None, **parts: object) -> Snapshot:
    made = {"pci": b.pci(*b.gpus_on_bus(count, b.RTX_6000_ADA)), "measurements": tests or {}, **parts}
    return b.snapshot("bare_metal", **made)


def linked(gen: int | None = 4, width: int = 16, **parts: object) -> Snapshot:
    return bare(gpus=b.smi_gpus(2, link_gen_max=gen, link_width_max=16, link_width_current=width), **parts)


ISLANDS = table(
    "device_to_device_memcpy_read_ce",
    (None, 26.0, 21.0, 21.1),
    (26.0, None, 21.0, 21.2),
    (21.0, 21.3, None, 26.1),
    (21.0, 21.0, 26.2, None),
)


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        # D7: delivered only where the owner, or a checked collective over a known peer path, saw the data
        ("D7", bare(tests={"p2p": (simple(20.0, True),)}), "pass", "delivered: simpleP2P"),
        ("D7", bare(tests={"allreduce": (collective(),)}), "pass", "reduced: nccl-tests"),
        ("D7", bare(4, tests={"p2p": (simple(20.0, True),)}), "unknown", "1 of 6 pairs"),
        ("D7", bare(tests=copied(*pair(26.0, 11.0))), "unknown", "what the sender saw"),
        ("D7", bare(tests={"p2p": (simple(20.0, None),)}), "unknown", "what the sender saw"),
        ("D7", bare(tests={"allreduce": (collective(transports=()),)}), "unknown", "over which path"),
        ("D7", bare(tests={"allreduce": (collective(transports=("SHM/direct",)),)}), "unknown", "over which path"),
        ("D7", bare(tests={"p2p": (simple(20.0, False),)}), "fail", "nan instead of 0.0"),
        ("D7", bare(tests={"p2p": (simple(20.0, True), simple(20.0, False))}), "fail", "does not arrive"),
        ("D7", bare(tests={"allreduce": (collective("wrong_results", wrong=3),)}), "fail", "3 wrong values over P2P"),
        # Wrong values over another path are no fault of the peer path, and with a bad control nothing is known.
        ("D7", bare(tests={"allreduce": (collective("wrong_results", (), 3),)}), "unknown", "no test of delivery"),
        (
            "D7",
            bare(
                tests={
                    "allreduce": (collective("wrong_results", wrong=3), collective("wrong_results", (), 3, off=True))
                }
            ),
            "unknown",
            "control",
        ),
        ("D7", b.guest(p2p=b.granted(2)), "unknown", "no test of delivery"),
        ("D7", b.guest(p2p=b.granted(2, "NS")), "not_applicable", "no pair"),
        ("D7", b.guest(1), "not_applicable", "1 GPU"),
        # D8
        ("D8", bare(tests=copied(latency(1.1))), "pass", "1.10 us"),
        ("D8", bare(tests=copied(latency(14.0))), "fail", "goes through host memory"),
        ("D8", bare(tests=copied(latency(14.0), access=False)), "pass", "as expected without P2P"),
        ("D8", bare(tests=copied(latency(14.0), access=None), p2p=b.granted(2)), "fail", "14.0 us"),
        ("D8", bare(tests=copied(latency(14.0), access=None)), "unknown", "whether P2P is granted"),
        ("D8", bare(tests=copied(latency(4.0))), "warn", "more than 2.5 us"),
        ("D8", bare(tests=copied(latency(900.0, unit="ns"))), "pass", "0.90 us"),
        ("D8", bare(tests=copied(latency(1.1, complete=False))), "unknown", "in part"),
        ("D8", bare(), "unknown", "not measured"),
        ("D8", bare(p2p=b.granted(2, "NS")), "not_applicable", "no pair"),
        # D9
        ("D9", bare(tests=copied(*pair(26.0, 22.0))), "pass", "26.0 GB/s"),
        ("D9", bare(tests=copied(*pair(9.9, 22.0), access=None)), "fail", "slower with P2P than without"),
        ("D9", bare(tests=copied(*pair(21.5, 22.0))), "pass", "21.5"),
        ("D9", bare(tests=copied(*pair(9.9, 22.0), access=False)), "pass", "9.9"),
        ("D9", linked(5, tests=copied(*pair(26.0))), "warn", "of what their links usually give"),
        ("D9", linked(5, tests=copied(*pair(12.0))), "fail", "of what their links usually give"),
        ("D9", linked(4, tests=copied(*pair(24.0))), "pass", "24.0"),
        ("D9", linked(4, 8, tests=copied(*pair(12.5))), "pass", "12.5"),
        ("D9", linked(4, 4, tests={"p2p": (simple(6.3, True),)}), "pass", "6.3"),
        ("D9", linked(4, tests=copied(*pair(50.0, 17.0, "both_ways"), *pair(25.0))), "pass", "25.0"),
        ("D9", linked(4, tests=copied(*pair(20.0, 17.0, "both_ways"), *pair(25.0))), "fail", "20.0 GB/s"),
        ("D9", bare(tests={"p2p": (simple(6.3, True),)}), "warn", "only 6.30 GB/s"),
        ("D9", bare(tests={"p2p": (simple(103.0, None, "NVIDIA RTX PRO 6000"),)}), "warn", "no such transfer"),
        ("D9", bare(tests={"p2p": (simple(103.0, True),)}, topology=b.topology(2, "NV4")), "pass", "103.0"),
        ("D9", bare(tests={"p2p": (simple(103.0, True),)}), "unknown", "whether NVLink"),
        ("D9", bare(tests=copied(*pair(26.0, complete=False))), "unknown", "in part"),
        ("D9", bare(), "unknown", "not measured"),
        ("D9", b.guest(1), "not_applicable", "1 GPU"),
        # D10
        ("D10", bare(topology=b.topology(2, "SYS")), "warn", "cross sockets"),
        ("D10", bare(4, topology=b.topology(4, "SYS", g0_1="NODE", g2_3="NODE")), "info", "{GPU0, GPU1}; {GPU2, GPU3}"),
        ("D10", bare(topology=b.topology(2, "SYS"), tests={"p2p": (simple(19.5, True),)}), "info", "19.50 GB/s"),
        ("D10", bare(topology=b.topology(2, "PHB")), "pass", "No pair"),
        ("D10", b.guest(topology=b.topology(2, "SYS")), "info", "emulated ports"),
        ("D10", bare(topology=b.topology(1)), "not_applicable", "one"),
        ("D10", bare(), "unknown", "not collected"),
    ],
)
def test_paths(rule: str, judged: Snapshot, state: str, words: str) -> None:
    found = [one for one in b.findings(rule, judged) if one.subject not in ("numa", "nics", "islands")]
    assert [one.state for one in found] == [state]
    assert words in f"{found[0].title} {found[0].reason}"


def test_no_copy_is_ever_called_more_than_copied() -> None:
    for rule in ("D7", "D8", "D9"):
        for found in b.findings(rule, bare(tests=copied(*pair(26.0, 11.0), latency(1.1)))):
            assert found.rung in (None, 0, 1)
            assert found.state in ("pass", "unknown")
            assert "deliver" not in found.title


def test_a_failed_delivery_explains_what_follows_from_it() -> None:
    judged = b.guest(p2p=b.granted(2), nccl=b.settings(NCCL_P2P_LEVEL="SYS"), measurements=b.not_delivered())
    (found,) = b.findings("D7", judged)
    assert set(found.explains) == {"D11", "D12"}
    steps = "\n".join(found.fix.steps)
    assert "NCCL_P2P_DISABLE=1" in steps
    assert "--disable-custom-all-reduce" in steps


def test_islands_by_speed_need_a_whole_table() -> None:
    run = copied(ISLANDS)["p2p"][0]
    four = replace(run, devices=tuple(Device(one) for one in range(4)), access={})
    (found,) = [one for one in b.findings("D9", bare(4, tests={"p2p": (four,)})) if one.subject == "islands"]
    assert "{GPU0, GPU1}; {GPU2, GPU3}" in found.title
    assert "19% slower" in found.title
    cut = replace(four, results=(replace(ISLANDS, complete=False),))
    assert not [one for one in b.findings("D9", bare(4, tests={"p2p": (cut,)})) if one.subject == "islands"]


def test_gpus_on_two_nodes_are_pinned_apart_and_a_missing_node_is_said() -> None:
    judged = bare(topology=b.topology(2, "SYS", numa={"GPU0": "0", "GPU1": "2"}))
    (found,) = [one for one in b.findings("D10", judged) if one.subject == "numa"]
    assert "GPU0 on node 0 and GPU1 on node 2" in found.title
    judged = bare(topology=b.topology(2, "SYS", numa={"GPU0": None, "GPU1": "1"}))
    (found,) = [one for one in b.findings("D10", judged) if one.subject == "numa"]
    assert "numactl --cpunodebind" in found.title


def test_the_network_card_beside_each_gpu_is_named() -> None:
    topology = b.topology(2, "NODE").value
    links = {**topology.links}
    for gpu, nics in (("GPU0", ("PIX", "SYS", "NODE")), ("GPU1", ("SYS", "PIX", "NODE"))):
        links.update({(gpu, f"NIC{at}"): code for at, code in enumerate(nics)})
    made = replace(topology, nics=("NIC0", "NIC1", "NIC2"), links=links)
    (found,) = [one for one in b.findings("D10", bare(topology=b.fact(made))) if one.subject == "nics"]
    assert "GPU0: NIC0 and GPU1: NIC1" in found.title
    assert "leave NIC2 out" in found.title


def test_claims_of_cuda_stand_in_where_the_drivers_matrix_is_missing() -> None:
    devices = tuple(Device(at, name) for at, name in enumerate(("RTX 4090", "RTX 4090", "RTX 5090", "RTX 5090")))
    pairs = {(f"GPU{x}", f"GPU{y}"): x // 2 == y // 2 for x in range(4) for y in range(4) if x != y}
    run = Measurement("p2p", "p2pBandwidthLatencyTest", "inconclusive", 0, devices, pairs, source="x", excerpt="y")
    (found,) = [one for one in b.findings("D5", bare(4, tests={"p2p": (run,)})) if one.subject == "cuda"]
    assert (found.state, found.rung) == ("warn", 0)
    assert "{GPU0, GPU1}; {GPU2, GPU3}, none across" in found.title
    same = replace(run, devices=tuple(replace(one, name="GTX 1080 Ti") for one in devices))
    (found,) = [one for one in b.findings("D5", bare(4, tests={"p2p": (same,)})) if one.subject == "cuda"]
    assert (found.state, "only inside islands" in found.title) == ("info", True)
    # Before its first refusal a cut output claims no island.
    cut = replace(same, access={pair: may for pair, may in pairs.items() if may})
    assert not [one for one in b.findings("D5", bare(4, tests={"p2p": (cut,)})) if one.subject == "cuda"]
