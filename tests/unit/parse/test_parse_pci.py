"""PCI: lspci in every shape, sysfs, the tree, raw configuration space, IOMMU groups."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Approval, PciFunction
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import (
    iommu,
    kernel_log,
    lspci,
    pci,
    pci_config,
    pci_sysfs,
    pci_tree,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError, address, size_bytes

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("01:00.0", "0000:01:00.0"),
        ("00000000:C1:00.0", "0000:c1:00.0"),
        ("10000:e1:00.0", "10000:e1:00.0"),
        ("0000:9b:00", "0000:9b:00"),
        ("000:BA:80.0", None),
        ("01:00.8", None),
        ("nonsense", None),
    ],
)
def test_addresses_are_written_as_sysfs_writes_them(text, normal):
    assert address(text) == normal


@pytest.mark.parametrize(
    ("text", "size"), [("128G", 128 * GIB), ("64MB", 64 * 1024**2), ("8EB", 8 * 1024**6), ("128", 128), ("x", None)]
)
def test_sizes_are_powers_of_1024(text, size):
    assert size_bytes(text) == size


def test_lspci_reads_a_gpu_with_an_unassigned_bar(recorded):
    gpu = lspci.functions(recorded("lspci.vvv.switch.txt"))["0000:41:00.0"]

    assert (gpu.vendor, gpu.device, gpu.class_code, gpu.name) == (
        "10de",
        "20b7",
        "0302",
        "NVIDIA Corporation GA100 [A30 PCIe]",
    )
    assert (gpu.numa_node, gpu.iommu_group, gpu.bus_master) == (0, 14, False)
    assert gpu.modules == ("nvidiafb", "nouveau", "nvidia")
    # Modules without a driver line: read, and none bound.
    assert gpu.driver == ""
    assert {index: (one.size_bytes, one.address) for index, one in gpu.regions.items()} == {
        0: (16 * 1024**2, 0xB4000000),
        1: (32 * GIB, None),
        3: (32 * 1024**2, None),
    }
    assert (gpu.regions[0].prefetchable, gpu.regions[1].prefetchable) == (False, True)


def test_lspci_keeps_the_physical_resizable_bar_and_drops_the_virtual_one(recorded):
    gpu = lspci.functions(recorded("lspci.vvv.switch.txt"))["0000:41:00.0"]

    current, supported = gpu.rebar[1]
    assert (current, supported[-1], set(gpu.rebar)) == ("256MB", "32GB", {1})


def test_lspci_reads_links_access_control_and_the_port_above(recorded):
    functions = lspci.functions(recorded("lspci.vvv.switch.txt"))
    port, gpu = functions["0000:40:01.1"], functions["0000:41:00.0"]

    assert (port.link_max_speed_gt, port.link_speed_gt, port.link_width, port.bus_master) == (32.0, 32.0, 16, True)
    assert port.acs_ctl is not None
    assert {name for name, on in port.acs_ctl.items() if on} == {"SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"}
    assert (gpu.parent, gpu.link_max_width, gpu.link_width, gpu.link_speed_gt) == ("0000:40:01.1", 16, 8, 2.5)


def test_a_function_off_the_bus_has_no_link(recorded):
    gone = lspci.functions(recorded("lspci.vvv.switch.txt"))["0000:43:00.0"]

    assert (gone.off_bus, gone.link_width, gone.link_speed_gt, gone.driver) == (True, None, None, "vfio-pci")


def test_lost_indentation_changes_nothing(recorded):
    text = recorded("lspci.vvv.switch.txt")

    assert lspci.functions("\n".join(row.strip() for row in text.split("\n"))) == lspci.functions(text)


@pytest.mark.parametrize(
    ("line", "bdf", "vendor", "device", "class_code"),
    [
        ("06:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)", "0000:06:00.0", "10de", "2bb5", "0302"),
        (
            "81:00.0 VGA compatible controller [0300]: NVIDIA "
            "Corporation GA102 [GeForce RTX 3090] [10de:2204] (rev a1)",
            "0000:81:00.0",
            "10de",
            "2204",
            "0300",
        ),
        ("000b:00:00.0 Bridge [0680]: NVIDIA Corporation Device [10de:1af1]", "000b:00:00.0", "10de", "1af1", "0680"),
        ("00:02.0 VGA compatible controller: Device 1234:1111 (rev 02)", "0000:00:02.0", "1234", "1111", "0300"),
        ("07:00.0 VGA compatible controller: NVIDIA Corporation GM204 [GTX 970]", "0000:07:00.0", "10de", None, "0300"),
        (f"00:00.0 Host bridge: Intel Corporation {lspci.Q35_HOST_BRIDGE}", "0000:00:00.0", "8086", "29c0", "0600"),
    ],
)
def test_one_line_is_enough_for_what_it_says(line, bdf, vendor, device, class_code):
    (function,) = lspci.functions(line).values()

    assert (function.bdf, function.vendor, function.device, function.class_code) == (bdf, vendor, device, class_code)
    assert (function.driver, function.access_denied) == (None, False)


def test_denied_capabilities_are_said_and_not_absent():
    (function,) = lspci.functions(
        "01:00.0 3D controller: NVIDIA Corporation X\n\tCapabilities: <access denied>\n"
    ).values()

    assert (function.access_denied, function.acs_ctl, function.rebar) == (True, None, {})


def test_a_hex_dump_becomes_config_space():
    dump = "01:00.0 3D controller [0302]: NVIDIA Corporation X [10de:2bb5]\n00: de 10 b5 2b\nc0: 00 00\n"

    assert lspci.functions(dump)["0000:01:00.0"].config_hex == "de10b52b0000"


def test_an_excerpt_without_headers_is_read_line_by_line():
    text = "\t\tACSCtl:\tSrcValid- ReqRedir-\n\t\tACSCtl:\tSrcValid+ ReqRedir+\n"

    first, second = lspci.fragments(text)

    assert (first.acs_ctl, second.acs_ctl) == (
        {"SrcValid": False, "ReqRedir": False},
        {"SrcValid": True, "ReqRedir": True},
    )
    assert lspci.functions(text) == {}


def test_the_tree_tells_ports(recorded):
    functions = pci_tree.functions(recorded("lspci.t.txt"))

    assert {bdf: one.parent for bdf, one in functions.items()} == {
        "0000:40:00.0": None,
        "0000:40:01.1": None,
        "0000:41:00.0": "0000:40:01.1",
        "0000:41:00.1": "0000:40:01.1",
        "0000:42:00.0": "0000:41:00.1",
        "0000:40:07.1": None,
        "0000:43:00.0": "0000:40:07.1",
        "0001:00:00.0": None,
    }
    assert (functions["0000:42:00.0"].device, functions["0001:00:00.0"].device) == ("20b7", "2bb5")


# 64 MiB in place, none, 128 GiB without a place, I/O ports.
RESOURCE = ";".join(
    [
        "0x00000000f8000000 0x00000000fbffffff 0x0000000000040200",
        "0x0000000000000000 0x0000000000000000 0x0000000000000000",
        "0x0000000000000000 0x0000001fffffffff 0x000000002014220c",
        "0x0000000000002000 0x000000000000207f 0x0000000000040101",
    ]
)
SYSFS = """[0000:01:00.0]
vendor: 0x10de
device: 0x2bb5
class: 0x030200
current_link_speed: 2.5 GT/s PCIe
current_link_width: 16
max_link_speed: 32.0 GT/s PCIe
max_link_width: 16
numa_node: -1
driver:
iommu_group: 14
parent: 0000:00:1c.0
resource: RESOURCE
config: CONFIG

[0000:02:00.0]
vendor: 0x10de
device: 0x2b85
class: 0x030000
current_link_speed: Unknown
current_link_width: 63
driver: vfio-pci
config: ffffffffffffffff
"""


def test_sysfs_tells_bars_links_and_what_is_gone():
    functions = pci_sysfs.functions(SYSFS.replace("CONFIG", "de10b52b0600").replace("RESOURCE", RESOURCE))
    gpu, gone = functions["0000:01:00.0"], functions["0000:02:00.0"]

    assert (gpu.vendor, gpu.class_code, gpu.driver, gpu.numa_node, gpu.parent) == (
        "10de",
        "0302",
        "",
        -1,
        "0000:00:1c.0",
    )
    assert {index: (one.size_bytes, one.address) for index, one in gpu.regions.items()} == {
        0: (64 * 1024**2, 0xF8000000),
        2: (128 * GIB, None),
    }
    assert gpu.regions[2].prefetchable
    assert (gpu.link_speed_gt, gpu.link_max_speed_gt, gpu.bus_master) == (2.5, 32.0, True)
    assert (gone.off_bus, gone.link_width, gone.link_speed_gt, gone.bus_master) == (True, None, None, None)
    assert pci_sysfs.is_complete(functions)


def test_an_operators_own_listing_is_read_and_not_called_complete():
    text = "=== AER ===\n--- 0000:03:00.0 ---\ncurrent_link_width: 63\n--- 0000:00:01.3 ---\ncurrent_link_width: 8\n"

    functions = pci_sysfs.functions(text)

    assert (functions["0000:03:00.0"].off_bus, functions["0000:00:01.3"].link_width) == (True, 8)
    assert not pci_sysfs.is_complete(functions)


def test_sysfs_and_lspci_are_joined():
    sysfs = PciFunction(bdf="0000:01:00.0", driver="", link_width=16, source="sysfs.pci")
    listed = PciFunction(bdf="0000:01:00.0", driver="nvidia", name="A30", link_width=8, acs_ctl={"ReqRedir": True})

    joined = pci.merge({"0000:01:00.0": sysfs}, {"0000:01:00.0": listed})["0000:01:00.0"]

    assert (joined.driver, joined.link_width, joined.name, joined.acs_ctl) == ("", 16, "A30", {"ReqRedir": True})


def space(*capabilities: tuple[int, str], base: int = 0x03, listed: bool = True) -> bytes:
    """Make 256 bytes of configuration space with these capabilities chained in this order."""
    config = bytearray(256)
    config[0:4] = bytes.fromhex("de10b52b")
    config[0x06] = 0x10 if listed else 0
    config[0x0B] = base
    config[0x34] = capabilities[0][0] if capabilities else 0
    for at, (place, text) in enumerate(capabilities):
        body = bytearray.fromhex(text)
        if body[1] == 0:
            body[1] = capabilities[at + 1][0] if at + 1 < len(capabilities) else 0
        config[place : place + len(body)] = body
    return bytes(config)


CHAIN = ((0x40, "0100"), (0x48, "0500"), (0x60, "1000"), (0x9C, "0900140000000000"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (space(*CHAIN, (0xC8, "0900085032500000")), Approval("present", 0, 0, 0xC8)),
        (space(*CHAIN, (0xC8, "0900085032500800")), Approval("present", 1, 0, 0xC8)),
        (space(*CHAIN, (0xC8, "0900085032507800")), Approval("present", 15, 0, 0xC8)),
        (space(*CHAIN, (0xC8, "110000000000"), (0xD4, "0900085032501800")), Approval("present", 3, 0, 0xD4)),
        (space(*CHAIN, (0xC8, "0900085032500100")), Approval("present", 0, 1, 0xC8)),
        (space(*CHAIN, (0xD4, "0900084254530100")), Approval("absent")),
        (space(*CHAIN), Approval("absent")),
        (space((0x40, "0100"), (0xB0, "1140")), Approval("absent")),
        (space(*CHAIN, (0xC8, "0900085032500000"), listed=False), Approval("absent")),
        (space(*CHAIN, (0xC8, "0900085032500000"), base=0x04), Approval("not_gpu")),
        (space(*CHAIN, (0xC8, "0900085032500000"))[:64], Approval("need_root")),
        (b"\xff" * 256, Approval("device_gone")),
        (b"\xff" * 64, Approval("device_gone")),
    ],
)
def test_the_approval_capability_is_decoded_byte_by_byte(config, expected):
    assert pci_config.approval(config) == expected


@pytest.mark.parametrize("length", range(0, 256, 7))
def test_a_config_space_cut_anywhere_needs_root_and_no_more(length):
    assert pci_config.approval(space(*CHAIN, (0xC8, "0900085032500000"))[:length]).state == "need_root"


def test_access_control_is_read_from_extended_space():
    config = bytearray(4096)
    config[0x100:0x108] = (0x0001 | 1 << 16 | 0x170 << 20).to_bytes(4, "little") + bytes(4)
    config[0x170:0x178] = (0x000D | 1 << 16).to_bytes(4, "little") + bytes.fromhex("5f001d00")

    flags = pci_config.acs_control(bytes(config))

    assert flags is not None
    assert {name for name, on in flags.items() if on} == {"SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"}
    assert pci_config.acs_control(bytes(config[:256])) is None


def test_hex_ends_where_it_is_no_hex():
    assert pci_config.read_hex("de10b5z") == b"\xde\x10\xb5"
    assert pci_config.read_hex("de1") == b"\xde"


def test_iommu_of_sysfs_and_its_empty_form():
    on = iommu.sysfs(
        "unit dmar0\nunit dmar1\ngroup 14 type DMA-FQ devices 0000:01:00.0 0000:01:00.1\n"
        "group 2 type identity devices \n"
    )
    off = iommu.sysfs("groups 0\n")

    assert (on.units, on.groups["14"], on.types) == (
        ("dmar0", "dmar1"),
        ("0000:01:00.0", "0000:01:00.1"),
        {"14": "DMA-FQ", "2": "identity"},
    )
    assert (off.units, off.groups) == ((), {})


@pytest.mark.parametrize(
    "text",
    [
        "IOMMU group 7\n\t00:1b.0 Audio device [0403]: Vendor X [8086:8ca0]\n"
        "IOMMU group 1\n\t01:00.0 3D controller [0302]: NVIDIA Y [10de:20b7]\n",
        "IOMMU Group 1 01:00.0 3D controller [0302]: NVIDIA Y [10de:20b7]\n"
        "IOMMU Group 7 00:1b.0 Audio device [0403]: X [8086:8ca0]\n",
        "1\t01:00.0\t3D controller [0302]: NVIDIA Y [10de:20b7]\n7\t00:1b.0\tAudio device [0403]: X [8086:8ca0]\n",
        "IOMMU_GROUP 7:\n  0000:00:1b.0 Audio device [0403]: X [8086:8ca0]\n"
        "IOMMU_GROUP 1:\n  0000:01:00.0 3D controller [0302]: Y [10de:20b7]\n",
    ],
)
def test_peoples_own_listings_are_read_in_any_order(text):
    reading = iommu.listing(text)

    assert reading.groups == {"7": ("0000:00:1b.0",), "1": ("0000:01:00.0",)}
    assert (reading.functions["0000:01:00.0"].class_code, reading.functions["0000:01:00.0"].device) == ("0302", "20b7")


def test_paths_of_find_are_a_listing_too():
    text = "/sys/kernel/iommu_groups/3/devices/0000:02:00.0\n/sys/kernel/iommu_groups/3/devices/0000:02:00.1\n"

    assert iommu.listing(text).groups == {"3": ("0000:02:00.0", "0000:02:00.1")}


def test_other_text_lists_no_group():
    with pytest.raises(RefusedError):
        iommu.listing("00:1b.0 Audio device\n")


def test_the_default_domain_comes_from_the_log():
    log = kernel_log.parse("[    0.5] iommu: Default domain type: Passthrough (set via kernel command line)\n")

    assert iommu.default_domain(log) == ("Passthrough", log.lines[0].text)
