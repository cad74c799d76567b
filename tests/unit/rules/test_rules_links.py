"""Rules F9 to F12, and F21, F22, F23, F26: links, modules, and what a guest sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import (
    FabricReport,
    Gpu,
    Memory,
    NvLinks,
    Package,
    PciFunction,
    Topology,
)

SWITCH = PciFunction(bdf="0000:05:00.0", vendor="10de", device="22a3", class_code="0680", source="sysfs.pci")
NIC = PciFunction(bdf="0000:31:00.0", vendor="15b3", device="101d", class_code="0207", source="sysfs.pci")
BOARD = b.pci(*b.gpus_on_bus(2), SWITCH)
PLAIN = b.pci(*b.gpus_on_bus(2))
EMPTY = b.pci()


def manager(*ones: FabricReport, **more: Any) -> object:
    return b.Driver(fabric_manager=b.fact(ones, "fabric manager says", "systemctl.fabricmanager"), **more)


def bare(role: str | None = "bare_metal", **parts: Any) -> object:
    return b.snapshot(role, **{"pci": PLAIN, **parts})


def links(*ones: NvLinks, **parts: Any) -> object:
    return bare(driver=b.Driver(nvlinks=b.fact(ones, "links", "nvidia_smi.nvlink_s")), **parts)


def gpu(index: int, *rates: float | None, name: str = "NVIDIA GeForce RTX 3090", note: str = "") -> NvLinks:
    return NvLinks(index, name, dict(enumerate(rates)), note)


def told(role: str = "guest", **fields: Any) -> object:
    made = Gpu(**{"index": 0, "bus_id": "0000:01:00.0", **fields})
    return b.snapshot(role, gpus=b.fact((made,), "gpus", "nvidia_smi.q"), driver=b.Driver(attached_gpus=b.fact(1)))


def modules(*names: str, **parts: Any) -> object:
    return bare(kernel=b.Kernel(modules=b.fact(dict.fromkeys(names, 0)), **parts.pop("kernel", {})), **parts)


def on_nodes(*nodes: int | None, count: int = 2) -> object:
    made = [b.gpu_function(f"0000:{at + 1:02x}:00.0", numa_node=node) for at, node in enumerate(nodes)]
    return b.snapshot("guest", pci=b.pci(*made), memory=Memory(node_cpus=b.fact(dict.fromkeys(range(count), "0-3"))))


def clock(name: str, *others: str, role: str = "guest") -> object:
    return b.snapshot(role, kernel=b.Kernel(clocksource=b.fact(name), clocksources=b.fact(others)))


INACTIVE = "Unable to retrieve NVLink information as all links are inActive"
OPEN = b.Driver(loaded_flavour=b.fact("open"))
CLOSED = b.Driver(loaded_flavour=b.fact("proprietary"))
READY = {"gpus": b.smi_gpus(2, fabric_state="Completed", fabric_status="Success")}
UNREADY = {"gpus": b.smi_gpus(2, fabric_state="In Progress")}
RDMA = b.pci(*b.gpus_on_bus(2), NIC)
ROWS = [
    # F9
    ("F9", bare(driver=manager(FabricReport("550.1.2", "550.1.1"))), "fail", "550.1.2 with driver 550.1.1"),
    (
        "F9",
        bare(pci=BOARD, driver=manager(FabricReport("590.2.1", state="active"), loaded_version=b.fact("590.2.2"))),
        "fail",
        "590.2.1 with driver 590.2.2",
    ),
    (
        "F9",
        bare(
            pci=BOARD,
            driver=b.Driver(
                loaded_version=b.fact("590.2.2"),
                packages=b.fact({"nvidia-fabricmanager-590": Package("nvidia-fabricmanager-590", "590.2.1-1", "ii")}),
            ),
        ),
        "fail",
        "590.2.1 with driver 590.2.2",
    ),
    ("F9", bare(pci=BOARD, driver=manager(FabricReport(state="failed"))), "fail", "1 NVSwitch on the bus, but"),
    ("F9", bare(pci=BOARD, driver=manager(FabricReport(state="not-found"))), "fail", "is not installed"),
    ("F9", bare(pci=BOARD, driver=manager(FabricReport(state="exited 1"))), "fail", "exited 1"),
    ("F9", bare(pci=BOARD, driver=manager(FabricReport(state="active")), **READY), "pass", "runs"),
    ("F9", bare(pci=BOARD, driver=manager(FabricReport(state="active")), **UNREADY), "fail", "not ready"),
    ("F9", bare(pci=BOARD, **READY), "pass", "Completed"),
    ("F9", bare(pci=BOARD), "unknown", "Whether the fabric manager runs"),
    ("F9", bare(pci=replace(PLAIN, complete=False), **UNREADY), "fail", "In Progress"),
    ("F9", b.snapshot("bare_metal", driver=b.Driver(not_ready=b.fact("Error 802"))), "fail", "CUDA says 802"),
    ("F9", bare(driver=manager(FabricReport(state="failed", nothing_to_do=True))), "info", "not needed"),
    ("F9", bare(driver=manager(FabricReport(state="inactive"))), "not_applicable", "no NVSwitch"),
    ("F9", bare(pci=EMPTY), "not_applicable", "no NVIDIA GPU"),
    ("F9", b.snapshot("bare_metal"), "unknown", "Whether the machine has NVSwitches"),
    # F10
    ("F10", links(gpu(0, 14.062, 14.062), gpu(1, 14.062, 14.062)), "pass", "2 a GPU at 14.062 GB/s"),
    ("F10", links(gpu(0, 14.0, None), gpu(1, 14.0, None)), "fail", "GPU 0: 1 of 2"),
    ("F10", links(gpu(0, 25.0), gpu(1, note=INACTIVE)), "fail", "GPU 1 has no active NVLink"),
    (
        "F10",
        links(gpu(0, 25.0, None, name="NVIDIA A100 80GB PCIe"), gpu(1, 25.0, None, name="NVIDIA A100 80GB PCIe")),
        "info",
        "one bridge may be left out",
    ),
    ("F10", links(gpu(0, note=INACTIVE), gpu(1, note=INACTIVE)), "info", "can be bridged"),
    (
        "F10",
        links(gpu(0, name="H100 SXM5", note=INACTIVE), gpu(1, name="H100 SXM5", note=INACTIVE)),
        "fail",
        "No NVLink is active",
    ),
    ("F10", links(gpu(0, note=INACTIVE), pci=BOARD), "fail", "No NVLink is active"),
    ("F10", links(), "not_applicable", "lists no link"),
    ("F10", links(gpu(0, note="Nvlink queries are not supported for Devices in MIG mode")), "not_applicable", "MIG"),
    (
        "F10",
        links(
            gpu(0, 25.0),
            gpu(1, 25.0),
            topology=b.fact(Topology(("GPU0", "GPU1"), links={("GPU0", "GPU1"): "NV4"}), "topo", "nvidia_smi.topo_m"),
        ),
        "warn",
        "NV4, but a GPU has 1",
    ),
    ("F10", bare(), "unknown", "nvidia_smi.nvlink_s"),
    ("F10", bare(pci=EMPTY), "not_applicable", "no NVIDIA GPU"),
    # F11
    ("F11", modules("nvidia", "nvidia_peermem", pci=RDMA), "pass", "nvidia_peermem is loaded"),
    (
        "F11",
        modules("nvidia", pci=RDMA, driver=OPEN, kernel={"release": b.fact("6.8.0-60-generic")}),
        "pass",
        "dma-buf",
    ),
    ("F11", modules("nvidia", pci=RDMA, driver=CLOSED), "warn", "neither nvidia_peermem nor dma-buf"),
    (
        "F11",
        modules("nvidia", pci=RDMA, driver=OPEN, kernel={"release": b.fact("5.4.0-200-generic")}),
        "warn",
        "host memory",
    ),
    ("F11", modules("nvidia", pci=RDMA), "unknown", "dma-buf"),
    ("F11", bare(pci=RDMA), "unknown", "nvidia_peermem"),
    ("F11", modules("ext4", pci=RDMA, driver=CLOSED), "unknown", "does not reach nvidia"),
    ("F11", bare(), "not_applicable", "No RDMA card"),
    ("F11", b.snapshot("bare_metal"), "unknown", "RDMA card"),
    # F12
    ("F12", modules("nvidia", "nvidia_uvm"), "pass", "is there"),
    ("F12", modules("nvidia"), "fail", "not loaded"),
    ("F12", bare(driver=b.Driver(device_nodes=b.fact(("nvidia0", "nvidiactl")))), "fail", "/dev/nvidia-uvm"),
    ("F12", bare(driver=b.Driver(device_nodes=b.fact(("nvidia-uvm", "nvidia0")))), "pass", "is there"),
    ("F12", modules("ext4"), "not_applicable", "driver is not loaded"),
    ("F12", modules("nvidia", machine=b.Machine(container=b.fact("lxc"))), "unknown", "unified memory"),
    ("F12", bare(), "unknown", "proc.modules"),
    # F21
    ("F21", told(bar1_total_mib=131072, memory_total_mib=97887), "pass", "covers"),
    ("F21", told(bar1_total_mib=256, memory_total_mib=32607), "fail", "256 MiB"),
    ("F21", told(bar1_total_mib=16384, memory_total_mib=24564), "warn", "BAR1 16384 MiB, memory 24564 MiB"),
    ("F21", told(memory_total_mib=32607, blank=frozenset({"bar1_total_mib"})), "unknown", "not known"),
    (
        "F21",
        b.snapshot("guest", pci=b.pci(b.gpu_function(regions=b.bars(64 << 20, 256 << 20)))),
        "warn",
        "256 MiB",
    ),
    ("F21", b.snapshot("guest", pci=EMPTY), "not_applicable", "no NVIDIA GPU"),
    ("F21", told("bare_metal", bar1_total_mib=256, memory_total_mib=32607), "not_applicable", "bare metal"),
    # F22
    ("F22", told(link_gen_current=4, link_width_current=16), "info", "emulated ports"),
    ("F22", told(blank=frozenset({"link_gen_host_max"})), "info", "no host side"),
    ("F22", told(), "unknown", "no GPU told its link"),
    ("F22", b.snapshot("guest", pci=EMPTY), "not_applicable", "no NVIDIA GPU"),
    # F23
    ("F23", on_nodes(-1, -1), "warn", "2 NUMA nodes, but does not know the one of 0000:01:00.0 and 0000:02:00.0"),
    ("F23", on_nodes(0, 1), "pass", "knows"),
    ("F23", on_nodes(-1, -1, count=1), "pass", "one NUMA node"),
    ("F23", on_nodes(None, None), "unknown", "no NUMA node is told"),
    ("F23", b.snapshot("guest", pci=PLAIN), "unknown", "How many"),
    ("F23", b.snapshot("guest", pci=EMPTY), "not_applicable", "no NVIDIA GPU"),
    # F26
    ("F26", clock("kvm-clock"), "pass", "kvm-clock"),
    ("F26", clock("hpet", "tsc", "hpet"), "fail", "slow clock hpet, though tsc is there"),
    ("F26", clock("acpi_pm"), "fail", "acpi_pm"),
    ("F26", clock("quartz"), "info", "quartz"),
    ("F26", b.snapshot("guest"), "unknown", "Which clock"),
    ("F26", clock("hpet", role="bare_metal"), "not_applicable", "bare metal"),
]


@pytest.mark.parametrize(("rule", "judged", "state", "words"), ROWS)
def test_links(rule: str, judged: object, state: str, words: str) -> None:
    found = b.findings(rule, judged)
    assert state in [one.state for one in found], found
    chosen = next(one for one in found if one.state == state)
    assert words in f"{chosen.title} {chosen.reason}"
    assert state in ("fail", "warn") or not any(one.bad for one in found)


def test_nvswitches_without_any_word_of_a_fabric_manager_are_told_and_not_called_wrong() -> None:
    found = b.findings("F9", bare(pci=BOARD))
    assert [one.state for one in found] == ["unknown", "info"]
    assert "to the last digit" in found[1].title


def test_one_branch_is_not_enough_and_the_pin_is_named() -> None:
    same, other = (manager(FabricReport("550.1.2", driver)) for driver in ("550.1.1", "560.1.1"))
    assert [one.state for one in b.findings("F9", bare(driver=same))] == ["fail", "info"]
    assert [one.state for one in b.findings("F9", bare(driver=other))] == ["fail"]
    assert any("nvidia-fabricmanager-*" in step for step in b.findings("F9", bare(driver=same))[0].fix.steps)


def test_hmm_is_told_for_several_cards_of_the_model_that_was_seen_to_hang() -> None:
    two = b.smi_gpus(2, name="NVIDIA RTX PRO 6000 Blackwell Server Edition")
    driver = b.Driver(uvm_hmm_disabled=b.fact(False), device_nodes=b.fact(("nvidia-uvm",)))
    assert [one.state for one in b.findings("F12", bare(driver=driver, gpus=two))] == ["info", "pass"]
    off = replace(driver, uvm_hmm_disabled=b.fact(True))
    assert [one.state for one in b.findings("F12", bare(driver=off, gpus=two))] == ["pass"]
