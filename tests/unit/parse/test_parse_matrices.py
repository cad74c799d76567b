"""topo -m and topo -p2p: whole, cut, shifted, and refused rather than guessed."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import p2p, topology
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError


def test_links_affinity_and_legend_are_read(recorded):
    read = topology.parse(recorded("topo_m.four_gpus.txt"))

    assert read.gpus == ("GPU0", "GPU1", "GPU2", "GPU3")
    assert (read.nics, read.nic_names) == (("NIC0", "NIC1"), {"NIC0": "mlx5_0", "NIC1": "mlx5_3"})
    assert read.links["GPU0", "GPU1"] == "NV4"
    assert (read.links["NIC1", "GPU2"], read.links["GPU2", "NIC1"]) == ("PIX", "PIX")
    assert read.cpu_affinity["GPU2"] == "16-31,80-95"
    assert not read.truncated


def test_an_empty_cell_does_not_shift_the_numa_columns(recorded):
    read = topology.parse(recorded("topo_m.four_gpus.txt"))

    assert read.numa_affinity == {"GPU0": "0", "GPU1": "0", "GPU2": None, "GPU3": "1"}
    assert set(read.gpu_numa_id.values()) == {None}


def test_the_old_header_with_blanks_has_no_numa_columns(recorded):
    read = topology.parse(recorded("topo_m.old_header.txt"))

    assert (read.nics, read.numa_affinity) == (("mlx5_0", "mlx5_10"), {})
    assert (read.links["GPU1", "mlx5_10"], read.cpu_affinity) == ("NODE", {"GPU0": "0-9", "GPU1": "0-9"})
    assert not read.truncated


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "".join(f"    {row}\n" for row in text.split("\n")),
        lambda text: "".join(f"> {row}\n" for row in text.split("\n")),
        lambda text: "\ufeff" + text,
        lambda text: text.replace("\t", "   "),
    ],
)
def test_what_copying_adds_changes_nothing_of_the_links(recorded, change):
    text = recorded("topo_m.four_gpus.txt")

    assert topology.parse(change(text)).links == topology.parse(text).links


@pytest.mark.parametrize(
    ("end", "rows"),
    [("NIC0\t", 4), ("GPU3\tSYS", 3), ("NIC1\tSYS\tSYS\tPIX", 5)],
)
def test_a_cut_matrix_keeps_its_whole_rows_and_says_so(recorded, end, rows):
    text = recorded("topo_m.four_gpus.txt")
    cut = text[: text.index("\n" + end) + 1 + len(end)]

    read = topology.parse(cut)

    assert read.truncated
    assert len([name for name in read.gpus + read.nics if (name, name) in read.links]) == rows
    # The way back is the same path: a row that was cut off is still known from the columns.
    assert read.links["GPU3", "GPU0"] == "SYS"


def test_a_cut_legend_is_a_cut(recorded):
    text = recorded("topo_m.four_gpus.txt")

    assert topology.parse(text[: text.index("  PXB")]).truncated


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no header"),
        ("NVIDIA-SMI has failed", "no header"),
        ("\tGPU0\tGPU1\n", "no complete row"),
        ("\tGPU0\tGPU1\nGPU0\t X \tWARP\nGPU1\tWARP\t X \n", "one known link code"),
        ("\tGPU0\tGPU1\nGPU0\tPHB\t X \nGPU1\t X \tPHB\n", "has PHB in column GPU0"),
        ("\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tSYS\t X \n", "one way"),
        ("\tGPU0\tGPU0\nGPU0\t X \tPHB\n", "twice"),
        ("\tGPU0\tGPU1\tCPU\nAffinity\nGPU0\t X \tPHB\n", "broken over lines"),
    ],
)
def test_a_topology_that_does_not_add_up_is_refused(text, why):
    with pytest.raises(RefusedError, match=why):
        topology.parse(text)


def test_one_gpu_has_one_cell():
    read = topology.parse("\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-19\t0\t\tN/A\n")

    assert (read.links, read.numa_affinity) == ({("GPU0", "GPU0"): "X"}, {"GPU0": "0"})


P2P = " \tGPU0\tGPU1\tGPU2\t\n GPU0\tX\tOK\tCNS\t\n GPU1\tOK\tX\tNS\t\n GPU2\tCNS\tGNS\tX\t\n"
OLD_LEGEND = "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n  U    = Unknown\n"


def test_each_ordered_pair_has_its_own_code():
    read = p2p.parse(P2P, "r")

    assert (read.gpus, read.cells["GPU1", "GPU2"], read.cells["GPU2", "GPU1"]) == (
        ("GPU0", "GPU1", "GPU2"),
        "NS",
        "GNS",
    )
    assert len(read.pairs()) == 6
    assert (read.legend, read.truncated) == ((), False)


def test_the_legend_of_any_age_is_kept():
    assert p2p.parse(P2P + OLD_LEGEND, "w").legend == ("X", "OK", "CNS", "U")


@pytest.mark.parametrize("end", ["GPU2\tCNS", "GPU2", "GPU1\tOK\tX\tNS\t\n"])
def test_cut_rows_are_left_out_and_said(end):
    read = p2p.parse(P2P[: P2P.index(end, 20) + len(end)], "r")

    assert read.truncated
    assert ("GPU2", "GPU0") not in read.cells


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no header"),
        (" GPU0 GPU1\n", "no complete row"),
        (" GPU0 GPU1\n GPU0 X PHB\n GPU1 PHB X\n", "no known code"),
        (" GPU0 GPU1\n GPU0 X\n GPU1 OK X\n", "not a square matrix"),
        (" GPU0 GPU1\n GPU0 OK X\n GPU1 X OK\n", "GPU0-GPU0 is OK"),
        (" GPU0 GPU1\n GPU0 X OK\n GPU0 X OK\n", "comes twice"),
        (" GPU0 GPU1\n GPU0 X OK\n GPU7 OK X\n GPU1 OK X\n", "is no column"),
    ],
)
def test_a_matrix_that_is_not_square_over_known_codes_is_refused(text, why):
    with pytest.raises(RefusedError, match=why):
        p2p.parse(text, "r")


def test_an_unknown_mode_is_refused():
    with pytest.raises(RefusedError, match="no mode"):
        p2p.parse(P2P, "x")
