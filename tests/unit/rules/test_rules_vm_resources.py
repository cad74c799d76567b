"""Rules B17 to B21, B23, H5 and H6: memory, CPUs and emulated ports."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rule_builders as b
from rule_builders import TWO

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import HugePages, Memory, VmConfig
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import vm_resources

UNREAD = b.snapshot("hypervisor")
UUID = "aaaaaaaa-0000-0000-0000-000000000001"
SIX = tuple(f"0000:0{one}:00.0,pcie=1" for one in range(1, 7))
KIB_PER_GIB = 1024 * 1024
TWO_NODES = b.fact({0: "0-15", 1: "16-31"}, "node 0 cpus=0-15", "memory")
BOUND = {
    "numa": "1",
    "numa0": "cpus=0-7,hostnodes=0,memory=32768,policy=bind",
    "numa1": "cpus=8-15,hostnodes=1,memory=32768,policy=bind",
}


def cards(*nodes: int | None, **more: object) -> list[object]:
    return [b.gpu_function(f"0000:0{one}:00.0", numa_node=node, **more) for one, node in enumerate(nodes, 1)]


def node(*configs: VmConfig, memory: Memory | None = None, threads: int | None = 32, **parts: object) -> object:
    cpu = b.Cpu(physical_bits=b.fact(46), threads=b.fact(threads) if threads else b.unknown("no cpuinfo"))
    return b.hypervisor(*configs, memory=memory or Memory(node_cpus=TWO_NODES), **{"cpu": cpu, **parts})


def with_vhost(regions: int | None, *devices: str, **parts: object) -> object:
    config = b.vm_config(*devices)
    known = b.fact(regions, str(regions), "vhost.max_mem_regions") if regions else b.unknown("vhost is not loaded")
    vm = b.Vm(configs=b.fact({"101": config}, "conf", "pve.conf"), mappings=b.fact({}), vhost_max_mem_regions=known)
    return b.hypervisor(vm=vm, functions=b.gpus_on_bus(6), **parts)


def memory(total_gib: int, arc_gib: int = 0, **more: object) -> Memory:
    total = b.fact(total_gib * KIB_PER_GIB, f"MemTotal: {total_gib} GiB", "proc.meminfo")
    return Memory(total_kib=total, zfs_arc_max_bytes=b.fact(arc_gib * b.GIB), **more)


def ksm(run: int) -> Memory:
    return Memory(ksm_run=b.fact(run, f"ksm_run: {run}", "memory"))


def pages(total: int, free: int) -> Memory:
    return Memory(huge_pages=b.fact({KIB_PER_GIB: HugePages(total, free)}, f"total={total} free={free}", "memory"))


def ports(own: float, above: float | None) -> object:
    port = b.port("0000:00:1c.0", link_max_speed_gt=above)
    return b.guest(pci=b.pci(port, b.gpu_function(link_max_speed_gt=own, parent="0000:00:1c.0")))


STOPPED = {"running": b.fact(False)}
LARGE = {"memory": "65536"}


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        # B17
        ("B17", b.hypervisor(b.vm_config(*TWO, balloon=0)), "pass", "no balloon"),
        ("B17", b.hypervisor(b.vm_config(*TWO)), "warn", "no balloon: 0"),
        ("B17", b.hypervisor(b.vm_config(*TWO, balloon=65536)), "warn", "no balloon: 0"),
        ("B17", b.hypervisor(b.vm_config(*TWO, balloon=1024)), "fail", "down to 1024 of its 65536 MiB"),
        ("B17", b.hypervisor(b.vm_config(*TWO, balloon=1024, memory="current=2048")), "fail", "of its 2048 MiB"),
        ("B17", b.hypervisor(b.vm_config(*TWO, excerpt=True)), "unknown", "excerpt"),
        ("B17", UNREAD, "unknown", "not collected"),
        # B18
        ("B18", b.hypervisor(b.vm_config(*TWO, hugepages=2)), "fail", "without numa: 1"),
        ("B18", node(b.vm_config(*TWO, hugepages=1024, numa=1), memory=pages(64, 64)), "pass", "its huge pages"),
        ("B18", node(b.vm_config(*TWO, hugepages=1024, numa=1), memory=pages(64, 12)), "warn", "64 pages of 1 GiB"),
        (
            "B18",
            node(b.vm_config(*TWO, hugepages=1024, numa=1, running=b.fact(True)), memory=pages(64, 0)),
            "pass",
            "its huge pages",
        ),
        ("B18", b.hypervisor(b.vm_config(*TWO, hugepages=2, numa=1)), "unknown", "not collected"),
        ("B18", b.hypervisor(b.vm_config(*TWO)), "info", "no huge pages"),
        ("B18", b.hypervisor(b.vm_config(*TWO, excerpt=True)), "unknown", "excerpt"),
        # B19
        (
            "B19",
            node(b.vm_config(*TWO, cores=16, **BOUND), functions=cards(0, 1)),
            "pass",
            "node of its GPUs (0 and 1)",
        ),
        ("B19", node(b.vm_config(*TWO), functions=cards(0, 1)), "warn", "no numaN line"),
        ("B19", node(b.vm_config(*TWO, **{**BOUND, "numa": "0"}), functions=cards(0, 1)), "warn", "no numaN line"),
        (
            "B19",
            node(b.vm_config(*TWO, numa=1, numa0=BOUND["numa0"]), functions=cards(1, 1)),
            "warn",
            "bound to node 0, its GPUs are on 1",
        ),
        ("B19", node(b.vm_config(*TWO, cores=4), functions=cards(1, 1)), "info", "fits into one node"),
        ("B19", node(b.vm_config(*TWO, cores=24), functions=cards(1, 1)), "warn", "no numaN line"),
        ("B19", node(b.vm_config(*TWO), functions=cards(0, -1)), "unknown", "NUMA nodes of its GPUs"),
        ("B19", node(b.vm_config(*TWO, excerpt=True), functions=cards(0, 1)), "unknown", "excerpt"),
        (
            "B19",
            node(b.vm_config(*TWO), memory=Memory(node_cpus=b.fact({0: "0-31"}))),
            "not_applicable",
            "no other node",
        ),
        ("B19", b.hypervisor(b.vm_config(*TWO)), "unknown", "not collected"),
        # B20
        ("B20", node(b.vm_config(*TWO, cores=64)), "fail", "64 vCPUs on a host with 32 threads"),
        ("B20", node(b.vm_config(*TWO, cores=4, sockets=2)), "pass", "8 vCPUs on 32"),
        ("B20", node(b.vm_config(*TWO, cores=8, affinity="0-3")), "warn", "on the 4 CPUs"),
        (
            "B20",
            node(b.vm_config(*TWO, cores=8, affinity="16-31"), functions=cards(0, 0)),
            "warn",
            "pinned to CPUs of another node",
        ),
        ("B20", node(b.vm_config(*TWO, cores=8), functions=cards(0, 0)), "warn", "not pinned to node 0"),
        (
            "B20",
            node(b.vm_config(*TWO, cores=8, running_cpus=b.fact("0-15")), functions=cards(0, 0)),
            "pass",
            "pinned to 0-15",
        ),
        ("B20", node(b.vm_config(*TWO, cores=8), threads=None), "unknown", "no cpuinfo"),
        ("B20", node(b.vm_config(*TWO, excerpt=True)), "unknown", "excerpt"),
        # B21
        ("B21", with_vhost(64, *SIX), "warn", "accepts 64 regions"),
        ("B21", with_vhost(256, *SIX), "pass", "256 memory regions"),
        ("B21", with_vhost(64, *TWO), "pass", "No VM"),
        ("B21", with_vhost(None, *SIX), "unknown", "vhost is not loaded"),
        (
            "B21",
            with_vhost(
                256, *TWO, kernel=b.Kernel(log=b.log("kvm: vhost_set_mem_table failed: Argument list too long (7)"))
            ),
            "fail",
            "vhost refused",
        ),
        ("B21", b.hypervisor(b.vm_config(*TWO, excerpt=True)), "unknown", "only an excerpt"),
        ("B21", UNREAD, "unknown", "not collected"),
        # B23
        ("B23", ports(32, 16), "info", "32 GT/s by its port of 16 GT/s"),
        ("B23", ports(16, 16), "pass", "as fast"),
        ("B23", ports(32, None), "unknown", "was not read"),
        ("B23", b.guest(0), "not_applicable", "no NVIDIA GPU"),
        (
            "B23",
            node(b.vm_config(*TWO), functions=cards(0, 0, link_max_speed_gt=32.0)),
            "info",
            "16 GT/s for GPUs of 32",
        ),
        ("B23", node(b.vm_config(*TWO), functions=cards(0, 0, link_max_speed_gt=16.0)), "pass", "as fast"),
        (
            "B23",
            node(
                b.vm_config(*TWO, args="-set device.ich9-pcie-port-1.x-speed=32"),
                functions=cards(0, 0, link_max_speed_gt=32.0),
            ),
            "pass",
            "raises",
        ),
        ("B23", node(b.vm_config(*TWO), functions=cards(0, 0)), "unknown", "was not read"),
        # H5
        ("H5", node(b.vm_config(*TWO), memory=ksm(1)), "warn", "KSM runs"),
        ("H5", node(b.vm_config(*TWO), memory=ksm(0)), "pass", "does not run"),
        ("H5", node(b.vm_config(*TWO), memory=ksm(2)), "pass", "does not run"),
        ("H5", node(b.vm_config(*TWO)), "unknown", "not collected"),
        ("H5", node(b.vm_config(), memory=ksm(1)), "not_applicable", "no VM configuration"),
        # H6
        ("H6", node(b.vm_config(*TWO, **LARGE), memory=memory(128)), "pass", "64 GiB of 128"),
        ("H6", node(b.vm_config(*TWO, **LARGE), memory=memory(64)), "fail", "64 GiB of the host's 64"),
        ("H6", node(b.vm_config(*TWO, **LARGE), memory=memory(96, arc_gib=32)), "fail", "32 GiB of ZFS cache"),
        (
            "H6",
            node(b.vm_config(*TWO, **LARGE), b.vm_config(*TWO, vmid="102", **LARGE, **STOPPED), memory=memory(96)),
            "info",
            "not all of them can run at a time",
        ),
        (
            "H6",
            node(
                b.vm_config(*TWO, hugepages=1024, numa=1, **LARGE),
                memory=memory(128, huge_pages=b.fact({KIB_PER_GIB: HugePages(126, 0)})),
            ),
            "fail",
            "126 GiB",
        ),
        ("H6", node(b.vm_config(), memory=memory(16)), "not_applicable", "no hostpci line"),
        ("H6", node(b.vm_config(*TWO, excerpt=True), memory=memory(16)), "unknown", "excerpt"),
        ("H6", node(b.vm_config(*TWO)), "unknown", "not collected"),
        ("H6", UNREAD, "unknown", "not collected"),
    ],
)
def test_vm_resources(rule: str, judged: object, state: str, words: str) -> None:
    (found,) = b.findings(rule, judged)
    assert (found.state, words in f"{found.title} {found.reason}") == (state, True), f"{found.title} {found.reason}"


def test_the_guests_stolen_time_speaks_of_its_vm() -> None:
    machine = replace(b.guest().machine, smbios_uuid=b.fact(UUID), steal_percent=b.fact(7.5, "cpu 1 2", "proc.stat"))
    one_node = Memory(node_cpus=b.fact({0: "0-31"}))
    (found,) = b.findings("B20", node(b.vm_config(*TWO, cores=8), memory=one_node), b.guest(machine=machine))
    assert (found.state, "7.5 %" in found.title) == ("warn", True)


def test_numa_cells_share_cores_and_memory_without_a_rest() -> None:
    (found,) = b.findings("B19", node(b.vm_config(*TWO, cores=9, memory=65537), functions=cards(0, 1)))
    command = next(step for step in found.fix.steps if step.startswith("qm set"))
    assert "--numa0 cpus=0-3,hostnodes=0,memory=32769,policy=bind" in command
    assert "--numa1 cpus=4-8,hostnodes=1,memory=32768,policy=bind" in command


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8", {0, 1, 2, 3, 8}), ("0-1;4", {0, 1, 4}), ("", set()), ("x-3,2-,5", {5}), ("0-99999999", set())],
)
def test_lists_of_cpus(text: str, cpus: set[int]) -> None:
    assert vm_resources.cpu_set(text) == cpus
