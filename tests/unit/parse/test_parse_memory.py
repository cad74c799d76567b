"""Memory, NUMA nodes, CPU time and network cards."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import HugePages
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import memory

OURS = """hugepages 1048576 total=120 free=8
hugepages 2048 total=0 free=0
node 0 cpus=0-31,64-95 mem_kib=263000000
node 1 cpus= mem_kib=
transparent_hugepage: always [madvise] never
ksm_run: 1
ksm_pages_sharing: 42
zfs_arc_max: 17179869184
"""
MEMINFO = (
    "MemTotal:       528223232 kB\nMemAvailable:   31000000 kB\nHugePages_Total:     512\nHugePages_Free:        2\n"
)
MEMINFO += "Hugepagesize:       2048 kB\n"
NUMACTL = "available: 2 nodes (0-1)\nnode 0 cpus: 0 1 2 3\nnode 0 size: 64 MB\nnode 1 cpus: 4 5 7\nnode distances:\n"


def test_the_collectors_memory_is_read():
    assert memory.huge_pages(OURS) == {1048576: HugePages(120, 8), 2048: HugePages(0, 0)}
    assert memory.node_cpus(OURS) == {0: "0-31,64-95", 1: ""}
    assert (memory.transparent(OURS), memory.setting(OURS, "ksm_run")) == ("madvise", 1)
    assert (memory.setting(OURS, "ksm_pages_sharing"), memory.setting(OURS, "zfs_arc_max")) == (42, 17179869184)


def test_what_people_paste_is_read_too():
    assert (memory.amounts(MEMINFO)["MemTotal"], memory.huge_pages(MEMINFO)) == (528223232, {2048: HugePages(512, 2)})
    assert memory.node_cpus(NUMACTL) == {0: "0-3", 1: "4-5,7"}
    assert memory.node_cpus("NUMA node0 CPU(s):   0-15\nNUMA node1 CPU(s):   16-31\n") == {0: "0-15", 1: "16-31"}


@pytest.mark.parametrize(
    ("text", "seconds", "percent"),
    [
        ("cpu  100 0 100 700 50 0 0 50 0 0\nbtime 1700000000\n", 1700000000, 5.0),
        ("cpu  100 0 100 700 50 0 0 0 0 0\n", None, 0.0),
        ("cpu0 1 2 3 4 5 6 7 8 9 10\n", None, None),
        ("cpu  0 0 0 0 0 0 0 0 0 0\n", None, None),
        ("", None, None),
    ],
)
def test_cpu_time(text, seconds, percent):
    assert (memory.booted_at(text), memory.steal_percent(text)) == (seconds, percent)


def test_network_cards_come_from_the_collector_or_from_ip_link():
    assert memory.cards("ens18 BC:24:11:00:00:01\nens19 bc:24:11:00:00:02\n") == (
        "bc:24:11:00:00:01",
        "bc:24:11:00:00:02",
    )
    link = "2: ens18: <BROADCAST> mtu 1500\n    link/ether bc:24:11:00:00:01 brd ff:ff:ff:ff:ff:ff\n"
    assert memory.cards(link) == ("bc:24:11:00:00:01",)
    assert memory.cards("lo: nothing\n") is None


def test_nothing_is_made_of_nothing():
    assert (memory.huge_pages("junk"), memory.node_cpus("junk"), memory.transparent("junk")) == (None, None, None)
    assert (memory.setting("ksm_run: x", "ksm_run"), memory.amounts("a: b")) == (None, {})


def test_facts_tell_their_source(built):
    made = built({"memory": OURS, "proc.meminfo": MEMINFO, "proc.stat": "cpu  1 0 0 99 0 0 0 0 0 0\nbtime 5\n"})

    assert (made.memory.total_kib.value, made.memory.total_kib.source) == (528223232, "proc.meminfo")
    assert made.memory.huge_pages.source == "memory"
    assert (made.memory.ksm_run.excerpt, made.machine.booted_at.value) == ("ksm_run: 1", 5)
    assert made.machine.macs.reason == "net.cards was not collected"
