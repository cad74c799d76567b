"""Rules D: clique, grants, and what NCCL makes of them."""

from __future__ import annotations

from types import MappingProxyType

import pytest
import rule_builders as b
from rule_builders import TWO

CLIQUE = "x-nv-gpudirect-clique"
DELIVERED = MappingProxyType(b.delivered(8))
FAILED = MappingProxyType(b.not_delivered())


def sets(*pairs: tuple[str, int | str]) -> str:
    return " ".join(f"-set device.{name}.{CLIQUE}={value}" for name, value in pairs)


BOTH = sets(("hostpci0", 0), ("hostpci1", 0))


def with_cliques(*ids: int | str | None, **parts: object) -> object:
    return b.guest(len(ids), pci=b.pci(*b.gpus_on_bus(len(ids)), approvals=b.cliques(*ids)), **parts)


def refused(*ids: int | str | None, code: str = "NS", **parts: object) -> object:
    return with_cliques(*ids, p2p=b.granted(len(ids), code), **parts)


def bare(count: int = 2, device: str = b.RTX_6000_ADA, **parts: object) -> object:
    return b.snapshot("bare_metal", pci=b.pci(*b.gpus_on_bus(count, device)), **parts)


def nccl(version: str | None = "2.27.3", **values: str) -> object:
    from dataclasses import replace

    made = b.settings(**values)
    return replace(made, version=b.fact(version) if version else b.unknown("no NCCL library was found"))


def verified(link: str = "PHB", count: int = 4, **parts: object) -> object:
    """A bare metal host whose delivery was verified."""
    return b.snapshot(
        "bare_metal",
        **{
            "pci": b.pci(*b.gpus_on_bus(count)),
            "p2p": b.granted(count),
            "topology": b.topology(count, link),
            "cpu": b.Cpu(vendor=b.fact("AuthenticAMD")),
            "measurements": DELIVERED,
            "nccl": nccl(),
            **parts,
        },
    )


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        # D1
        ("D1", refused(None, None), "fail", "None of the 2 GPUs"),
        ("D1", refused(0, None), "fail", "0000:02:00.0 of this guest carries no"),
        ("D1", with_cliques(None, None, p2p=b.granted(2)), "info", "without a clique"),
        ("D1", with_cliques(1, 1, p2p=b.granted(2)), "info", "with a clique"),
        ("D1", refused(0, 0), "pass", "carry a P2P clique"),
        ("D1", refused("need_root", "need_root"), "unknown", "as root"),
        ("D1", with_cliques("device_gone", 0), "unknown", "ff"),
        ("D1", with_cliques(None, None), "unknown", "were not read"),
        ("D1", b.guest(1), "not_applicable", "1 GPU"),
        ("D1", refused(None, None, gpus=b.smi_gpus(2, virtualization_mode="VGPU")), "not_applicable", "A4"),
        # D2: clique 0 is a clique
        ("D2", with_cliques(0, None), "fail", "0000:02:00.0"),
        ("D2", with_cliques(0, 0), "pass", "clique 0"),
        ("D2", with_cliques(0, 1), "warn", "different cliques"),
        ("D2", with_cliques(0, 1, measurements=DELIVERED), "info", "as measured"),
        ("D2", with_cliques(None, None), "not_applicable", "D1"),
        ("D2", with_cliques("need_root", 0), "unknown", "root"),
        ("D2", b.guest(pci=b.pci(*b.gpus_on_bus(2))), "unknown", "config not read"),
        # D3
        ("D3", b.hypervisor(b.vm_config(*TWO, args=BOTH)), "pass", "2 GPU lines"),
        ("D3", b.hypervisor(b.vm_config(*TWO, args=sets(("hostpci0", 0)))), "fail", "hostpci1 has no clique"),
        ("D3", b.hypervisor(b.vm_config(*TWO, args=f"{BOTH} {sets(('hostpci5', 0))}")), "fail", "no line hostpci5"),
        ("D3", b.hypervisor(b.vm_config(*TWO, args=sets(("hostpci0", 16), ("hostpci1", 16)))), "fail", "0 to 15"),
        ("D3", b.hypervisor(b.vm_config(*TWO, args=sets(("hostpci0", 15), ("hostpci1", 15)))), "pass", "clique"),
        ("D3", b.hypervisor(b.vm_config(*TWO, args=sets(("hostpci0", 0), ("hostpci1", 1)))), "warn", "different"),
        (
            "D3",
            b.hypervisor(
                b.vm_config("0000:01:00.0,pcie=1", "0000:05:00.0,pcie=1", args=f"-global vfio-pci.{CLIQUE}=0"),
                functions=[b.gpu_function(), b.port("0000:05:00.0", class_code="0200")],
            ),
            "fail",
            "-global",
        ),
        (
            "D3",
            b.hypervisor(
                b.vm_config("0000:01:00.0,pcie=1", "0000:05:00.0,pcie=1", args=BOTH),
                functions=[b.gpu_function(), b.port("0000:05:00.0", class_code="0200")],
            ),
            "fail",
            "hostpci1 is no NVIDIA GPU",
        ),
        (
            "D3",
            b.hypervisor(
                b.vm_config("0000:01:00,pcie=1", args=sets(("hostpci0", 0))), functions=[b.gpu_function(), b.audio()]
            ),
            "fail",
            "B8",
        ),
        ("D3", b.hypervisor(b.vm_config(*TWO)), "not_applicable", "args"),
        ("D3", b.snapshot("hypervisor"), "unknown", "not collected"),
        # D4
        ("D4", b.guest(gpus=b.smi_gpus(2, virtualization_mode="None")), "fail", "None"),
        ("D4", b.guest(), "pass", "passed through"),
        ("D4", b.guest(gpus=b.smi_gpus(2)), "unknown", "Virtualization Mode"),
        # D5
        ("D5", b.guest(p2p=b.granted(2)), "pass", "a claim"),
        ("D5", b.guest(p2p=b.granted(2, "NS")), "fail", "no pair"),
        ("D5", b.guest(4, p2p=b.granted(4, "CNS", g0_1="OK", g1_0="OK")), "info", "{GPU0, GPU1}"),
        ("D5", b.snapshot(None, p2p=b.granted(2, "CNS")), "warn", "CNS"),
        ("D5", bare(p2p=b.granted(2, "GNS"), device=b.RTX_5090), "warn", "GNS"),
        ("D5", bare(p2p=b.granted(2), device=b.RTX_3090), "warn", "stock driver"),
        ("D5", bare(p2p=b.granted(2)), "pass", "all pairs"),
        ("D5", b.guest(p2p={"r": b.matrix("r", 2)}), "unknown", "writes were not read"),
        ("D5", b.guest(), "unknown", "were not read"),
        ("D5", b.snapshot("bare_metal", p2p=b.granted(1)), "not_applicable", "one GPU"),
        # D6
        ("D6", b.guest(p2p={"r": b.matrix("r", 2), "w": b.matrix("w", 2, "CNS")}), "fail", "reads and writes"),
        ("D6", b.guest(p2p=b.granted(2, g0_1="NS")), "fail", "directions of GPU0-GPU1"),
        ("D6", b.guest(p2p=b.granted(2, "NS")), "pass", "alike"),
        ("D6", b.guest(p2p={"r": b.matrix("r", 2)}), "unknown", "writes"),
        ("D6", b.guest(), "unknown", "not read"),
        # D11
        ("D11", verified(), "fail", "need PHB"),
        ("D11", verified("SYS"), "fail", "need SYS"),
        ("D11", verified("PIX"), "pass", "own limit"),
        ("D11", verified("NV4"), "pass", "own limit"),
        ("D11", verified(nccl=nccl("2.22.3")), "pass", "by itself"),
        ("D11", verified(count=2), "pass", "AMD"),
        ("D11", verified(nccl=nccl(NCCL_P2P_LEVEL="PHB")), "pass", "fits"),
        ("D11", verified("SYS", nccl=nccl(NCCL_P2P_LEVEL="PHB")), "warn", "need SYS"),
        ("D11", verified(nccl=nccl(NCCL_P2P_LEVEL="NODE")), "fail", "ignored"),
        ("D11", verified(nccl=nccl(NCCL_P2P_LEVEL="phb")), "fail", "ignored"),
        ("D11", verified(nccl=nccl(None)), "unknown", "no NCCL library"),
        ("D11", verified(topology=b.unknown("topo -m was not read")), "unknown", "topo -m"),
        # Never raise before delivery is verified.
        ("D11", b.guest(p2p=b.granted(2), topology=b.topology(2), nccl=nccl()), "unknown", "was not tested"),
        ("D11", b.guest(p2p=b.granted(2), nccl=nccl(NCCL_P2P_LEVEL="SYS")), "warn", "never verified"),
        ("D11", b.guest(p2p=b.granted(2), nccl=nccl(NCCL_P2P_LEVEL="3"), measurements=FAILED), "fail", "failed"),
        ("D11", b.guest(p2p=b.granted(2, "NS"), nccl=nccl()), "not_applicable", "no pair"),
        # D12
        ("D12", verified(nccl=nccl(NCCL_P2P_DISABLE="1")), "warn", "verified"),
        ("D12", verified(nccl=nccl(NCCL_P2P_DISABLE="true")), "fail", "ignored"),
        ("D12", verified(nccl=nccl(NCCL_SHM_DISABLE="1")), "fail", "sockets"),
        ("D12", verified(nccl=nccl(NCCL_IGNORE_DISABLED_P2P="2")), "fail", "own check"),
        ("D12", verified(nccl=nccl(NCCL_P2P_USE_CUDA_MEMCPY="1")), "fail", "wrong values"),
        ("D12", b.guest(nccl=nccl(), measurements=FAILED), "fail", "not set"),
        ("D12", b.guest(nccl=nccl(NCCL_P2P_DISABLE="1"), p2p=b.granted(2)), "pass", "keeps off"),
        ("D12", bare(nccl=nccl()), "pass", "not set"),
        ("D12", b.guest(nccl=nccl(), p2p=b.granted(2)), "unknown", "not tested"),
        ("D12", b.guest(), "unknown", "not collected"),
    ],
)
def test_p2p(rule: str, judged: object, state: str, words: str) -> None:
    found = b.findings(rule, judged)
    assert [one.state for one in found] == [state]
    assert words in f"{found[0].title} {found[0].reason}"


def test_a_grant_is_rung_0_and_never_called_verified() -> None:
    for judged in (b.guest(p2p=b.granted(4)), bare(p2p=b.granted(2)), with_cliques(0, 0, p2p=b.granted(2))):
        for rule in ("D1", "D5"):
            for found in b.findings(rule, judged):
                assert found.rung in (0, None)
                assert "verified" not in found.title.lower()


def test_a_clique_is_never_advised_without_the_delivery_test_and_the_way_back() -> None:
    node = b.hypervisor(b.vm_config(*TWO, args="-device ivshmem-plain,memdev=m"))
    for judged, others in ((refused(None, None), ()), (refused(None, None), (node,)), (with_cliques(0, None), ())):
        rule = "D2" if judged is not None and b.verdicts("D2", judged) == ["fail"] else "D1"
        fix = b.findings(rule, judged, *others)[0].fix
        steps = "\n".join(fix.steps)
        assert "NCCL_P2P_DISABLE=1 timeout" in steps  # the control arm
        assert "-c 1" in steps  # values are checked
        assert "# way back" in steps
        assert "cp -a " in steps
        assert "hidden=1" not in steps
        assert "untested path" in fix.risk
        assert fix.automation == "ask"
        assert fix.restart == "vm_stop_start"


def test_the_clique_fix_keeps_the_other_arguments_of_the_known_vm() -> None:
    node = b.hypervisor(b.vm_config(*TWO, args="-device ivshmem-plain,memdev=m"))
    steps = b.findings("D1", refused(None, None), node)[0].fix.steps
    assert f"qm set 101 --args '-device ivshmem-plain,memdev=m {BOTH}'" in steps


def test_a_partial_clique_keeps_its_id() -> None:
    judged = b.hypervisor(b.vm_config(*TWO, args=sets(("hostpci1", 3))))
    steps = "\n".join(b.findings("D3", judged)[0].fix.steps)
    assert f"{CLIQUE}=3" in steps
    assert f"{CLIQUE}=0" not in steps


def test_without_a_role_both_readings_of_a_code_are_given() -> None:
    why = b.findings("D5", b.snapshot(None, p2p=b.granted(2, "CNS")))[0].why
    assert "systemd-detect-virt" in why
    assert "clique" in why
    assert "bare metal" in why
    guest = b.findings("D5", b.guest(p2p=b.granted(2, "CNS")))[0].why
    assert "bare metal" not in guest


def test_a_cut_matrix_refuses_nothing_for_sure() -> None:
    from dataclasses import replace

    whole = b.matrix("r", 4, "NS").value
    cells = {pair: code for pair, code in whole.cells.items() if pair[0] == "GPU0"}
    cut = b.fact(replace(whole, cells=cells, truncated=True), "cut", "nvidia_smi.topo_p2p_r")
    found = b.findings("D5", b.guest(4, p2p={"r": cut}))
    assert [one.state for one in found] == ["unknown"]
    assert "only a part" in found[0].reason


def test_islands_are_connected_components() -> None:
    chain = {f"g{one}_{other}": "OK" for one, other in ((0, 1), (1, 0), (1, 2), (2, 1), (3, 4), (4, 3))}
    title = b.findings("D5", b.guest(6, p2p=b.granted(6, "NS", **chain)))[0].title
    assert "{GPU0, GPU1, GPU2}; {GPU3, GPU4}" in title
    assert "GPU5" not in title


def test_a_pair_granted_in_one_direction_only_is_no_island() -> None:
    title = b.findings("D5", b.guest(2, p2p=b.granted(2, "NS", g0_1="OK")))[0].title
    assert "no pair in both directions" in title


def test_an_approval_of_another_version_is_ignored_by_the_driver() -> None:
    from dataclasses import replace

    approvals = {bdf: replace(one, version=1) for bdf, one in b.cliques(0, 0).items()}
    judged = b.guest(pci=b.pci(*b.gpus_on_bus(2), approvals=approvals), p2p=b.granted(2, "NS"))
    assert b.verdicts("D1", judged) == ["fail"]
    assert "version" in b.findings("D1", judged)[0].title
