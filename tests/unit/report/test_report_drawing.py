"""The drawing: what hangs below what, from the bus or from topo -m, and what it cannot show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import report_builders as r
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot, Topology
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import drawing


def draw(snapshot: Snapshot) -> drawing.Drawing:
    made = drawing.draw(snapshot)
    assert made is not None
    return made


def titles(panel: drawing.Panel) -> list[str]:
    return [box.title for box in panel.boxes]


def test_two_sockets_have_a_panel_each_with_ports_switches_gpus_and_cards() -> None:
    made = draw(r.bare())

    assert [panel.title for panel in made.panels] == ["NUMA node 0", "NUMA node 1"]
    assert titles(made.panels[0]) == ["root port", "PCIe switch", "GPU 0", "GPU 1", "GPU 2", "GPU 3", "NIC"]
    assert titles(made.panels[1])[2:6] == ["GPU 4", "GPU 5", "GPU 6", "GPU 7"]
    switch = made.panels[0].boxes[1]
    assert "PEX890xx" in switch.tip
    assert switch.link == "x16 \u00b7 32 GT/s"
    assert made.source == "sysfs.pci"


def test_boxes_neither_overlap_nor_leave_the_panel() -> None:
    for panel in draw(r.bare(per_socket=8)).panels:
        for at, box in enumerate(panel.boxes):
            assert box.x >= 0
            assert box.x + box.width <= panel.width
            assert box.y + box.height <= panel.height
            for other in panel.boxes[at + 1 :]:
                apart = other.y >= box.y + box.height or other.x >= box.x + box.width or box.x >= other.x + other.width
                assert apart, f"{box.title} lies on {other.title}"


def test_texts_fit_their_boxes() -> None:
    for panel in draw(r.bare(extra=" with a name that goes on and on and on and on and on")).panels:
        for box in panel.boxes:
            assert len(box.detail) * drawing._SMALL_CHAR <= box.width
            assert len(box.title) * drawing._CHAR + len(box.link) * drawing._SMALL_CHAR <= box.width


def test_a_narrow_link_is_marked() -> None:
    functions = r.two_sockets()
    at = next(at for at, one in enumerate(functions) if one.is_gpu)
    functions[at] = replace(functions[at], link_width=8)
    box = draw(r.bare(pci=b.pci(*functions))).panels[0].boxes[2]

    assert (box.title, box.link, box.degraded) == ("GPU 0", "x8 of x16 \u00b7 32 GT/s", True)


def test_a_hypervisor_shows_which_vm_has_which_gpu() -> None:
    made = draw(b.hypervisor(b.vm_config(*b.TWO)))

    assert titles(made.panels[0]) == ["GPU \u2192 VM 101", "GPU \u2192 VM 101"]


@pytest.mark.parametrize("below_ports", [False, True])
def test_a_guest_says_that_its_tree_is_not_the_real_one(below_ports: bool) -> None:
    ports = [b.port(f"0000:00:1c.{at}") for at in range(2)] if below_ports else []
    parents = [one.bdf for one in ports] or [None, None]
    cards = [b.gpu_function(f"0000:{at + 1:02x}:00.0", parent=parent) for at, parent in enumerate(parents)]
    made = draw(b.guest(2, pci=b.pci(*ports, *cards)))

    assert any("This is a guest" in note for note in made.notes)
    assert any("root bus" in note for note in made.notes) is not below_ports
    assert ("virtual port" in titles(made.panels[0])) is below_ports


def test_the_tree_of_lspci_without_parents_follows_the_bus_numbers() -> None:
    root = b.port("0000:00:01.0", secondary_bus=1)
    card = b.gpu_function("0000:01:00.0")
    made = draw(b.snapshot("bare_metal", pci=b.pci(root, card)))

    assert titles(made.panels[0]) == ["root port", "GPU"]


def test_a_loop_of_parents_ends() -> None:
    first, second = b.port("0000:00:01.0", parent="0000:00:02.0"), b.port("0000:00:02.0", parent="0000:00:01.0")
    card = b.gpu_function("0000:01:00.0", parent="0000:00:01.0")

    assert "GPU" in titles(draw(b.snapshot("bare_metal", pci=b.pci(first, second, card))).panels[0])


def test_a_heap_of_devices_is_cut_and_says_so() -> None:
    cards = [b.gpu_function(f"{domain:04x}:01:00.0") for domain in range(300)]
    made = draw(b.snapshot("bare_metal", pci=b.pci(*cards)))

    assert sum(len(panel.boxes) for panel in made.panels) < 120
    assert any("more devices are not drawn" in note for note in made.notes)


def test_without_the_bus_topo_m_is_drawn_and_says_what_is_inferred() -> None:
    links = {
        f"g{row}_{column}": "PIX" if row // 2 == column // 2 else "SYS" for row in range(4) for column in range(row)
    }
    made = draw(b.snapshot("bare_metal", topology=b.topology(4, **links)))

    assert len(made.panels) == 2
    assert titles(made.panels[0]) == ["host bridge", "PCIe switch", "GPU 0", "GPU 1"]
    assert any("inferred" in note for note in made.notes)


def test_gpus_on_one_host_bridge_have_no_switch() -> None:
    made = draw(b.snapshot("bare_metal", topology=b.topology(2, "PHB")))

    assert titles(made.panels[0]) == ["host bridge", "GPU 0", "GPU 1"]


def test_nvlink_hides_the_bus_so_the_numa_node_ties() -> None:
    numa = {"GPU0": "0", "GPU1": "0", "GPU2": "1", "GPU3": "1"}
    made = draw(b.snapshot("bare_metal", topology=b.topology(4, "NV18", numa=numa)))

    assert [panel.title for panel in made.panels] == ["NUMA node 0", "NUMA node 1"]
    assert any("NVLink" in note for note in made.notes)


def test_cards_of_topo_m_have_the_names_of_its_legend() -> None:
    names = ("GPU0", "NIC0")
    links = {(one, two): "X" if one == two else "PIX" for one in names for two in names}
    topology = b.fact(Topology(("GPU0",), ("NIC0",), {"NIC0": "mlx5_0"}, links))
    panel = draw(b.snapshot("bare_metal", topology=topology)).panels[0]

    assert [(box.title, box.detail) for box in panel.boxes[-1:]] == [("NIC0", "mlx5_0")]


def test_nothing_known_is_no_drawing() -> None:
    assert drawing.draw(b.snapshot(None)) is None
    assert drawing.draw(b.snapshot("bare_metal", pci=b.pci())) is None


def test_gpus_whose_rows_were_cut_have_no_place() -> None:
    names = tuple(f"GPU{at}" for at in range(4))
    links = {("GPU0", "GPU1"): "PIX", ("GPU1", "GPU0"): "PIX", ("GPU0", "GPU2"): "NV6", ("GPU2", "GPU0"): "NV6"}
    topology = b.fact(Topology(names, links=links, truncated=True))
    made = draw(b.snapshot("bare_metal", topology=topology))

    assert [(panel.title, titles(panel)) for panel in made.panels] == [
        ("NUMA node not told", ["host bridge", "PCIe switch", "GPU 0", "GPU 1"]),
        ("place not told", ["GPU 2", "GPU 3"]),
    ]
    assert any("was cut" in note for note in made.notes)
