"""The platform: memory map, interrupts, initial RAM disk, boot tool, VM starts, PCIe errors, faults, raw registers."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import Evidence, EvidenceSet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import AerEvent, BootTool, IommuFault, Window
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import (
    kernel_log,
    lspci,
    pci_config,
    pci_sysfs,
    platform,
    recognise,
    snapshot,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError

GIB = 1024**3


# --- text of the collector and of files -----------------------------------------------------------------------------


def test_a_memory_map_keeps_nesting_and_sizes():
    found = platform.memory_map(
        "380000000000-387fffffffff : PCI Bus 0000:00\n  380000000000-3802ffffffff : PCI Bus 0000:41\n    x\n"
        "d0000000-dfffffff : PCI Bus 0000:00\n    d0000000-d02fffff : BOOTFB\n"
    )

    assert [(one.name, one.depth) for one in found][1] == ("PCI Bus 0000:41", 1)
    assert (found[1].size_bytes, found[-1].name, found[-1].depth) == (12 * GIB, "BOOTFB", 2)


@pytest.mark.parametrize("text", ["00000000-00000000 : PCI Bus 0000:00\n  00000000-00000000 : BOOTFB\n", "nothing\n"])
def test_a_memory_map_without_addresses_is_refused(text):
    with pytest.raises(RefusedError):
        platform.memory_map(text)


INTERRUPTS = """            CPU0       CPU1
   9:          0          4  IR-IO-APIC    9-fasteoi   acpi
  24:          0          0  IR-PCI-MSIX-0000:01:00.0    0-edge      nvidia
  26:          1          2  PCI-MSI 524288-edge      AMD-Vi
 NMI:          0          0   Non-maskable interrupts
"""


def test_modules_parameters_and_interrupts():
    assert platform.modules_load("# a\nvfio\nvfio_pci ids=1\n; b\n\nvfio\n") == ("vfio", "vfio_pci")
    assert platform.parameters("vfio_pci.disable_idle_d3 N\npcie_aspm.policy [default] performance\nx\n") == {
        "vfio_pci.disable_idle_d3": "N",
        "pcie_aspm.policy": "[default] performance",
    }
    assert platform.parameters("/sys/module/vfio_pci/parameters/disable_idle_d3:N\n") == {
        "vfio_pci.disable_idle_d3": "N"
    }
    assert platform.interrupt_chips(INTERRUPTS) == {"IR-IO-APIC": 1, "IR-PCI-MSIX": 1, "PCI-MSI": 1}
    assert platform.interrupt_chips("IR-PCI-MSI 24\nIO-APIC 3\nnoise\n") == {"IR-PCI-MSI": 24, "IO-APIC": 3}


def test_an_initial_ram_disk_of_the_collector_and_of_a_paste():
    told = platform.initramfs(
        "image /boot/initrd.img-6.8 modified 200\nconfig /etc/modprobe.d/vfio.conf modified 100\n"
        "listed yes\nmodule vfio-pci\n"
    )
    pasted = platform.initramfs("usr/lib/modules/6.8/kernel/drivers/vfio/pci/vfio-pci.ko.zst\n")
    unlisted = platform.initramfs("image /boot/initrd.img-6.8 modified 200\n")

    assert (told.modified_at, told.config_modified_at, told.modules) == (200, 100, ("vfio_pci",))
    assert (pasted.modules, pasted.image, unlisted.modules) == (("vfio_pci",), "", None)


def test_the_boot_tool_tells_each_partition():
    told = platform.boot_tool(
        "Re-executing '/usr/sbin/proxmox-boot-tool' in new private mount namespace..\n"
        "System currently booted with uefi\n"
        "AAAA-0001 is configured with: uefi (versions: 6.8.12-4-pve, 6.8.8-2-pve), grub (versions: 6.8.12-4-pve)\n"
        "AAAA-0002 is configured with: grub (versions: 6.8.12-4-pve)\n"
    )

    assert told == BootTool(
        "uefi",
        {
            "AAAA-0001": {"uefi": ("6.8.12-4-pve", "6.8.8-2-pve"), "grub": ("6.8.12-4-pve",)},
            "AAAA-0002": {"grub": ("6.8.12-4-pve",)},
        },
    )
    with pytest.raises(RefusedError):
        platform.boot_tool("E: /etc/kernel/proxmox-boot-uuids does not exist.\n")


def test_start_logs_and_replaced_binaries_are_told_by_vm():
    assert platform.start_logs("# ==> vm 101 task 1700000000 <==\nfirst\n\nTASK OK\n# ==> vm 7 task 1 <==\n") == {
        "101": ("first", "TASK OK"),
        "7": (),
    }
    assert platform.replaced_binaries("vm 101 pid 4711 replaced=yes\nvm 7 pid 2 replaced=no\n") == {
        "101": True,
        "7": False,
    }


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("# ==> vm 101 task 1700000000 <==\nTASK OK\n", "pve.start_log"),
        ("vm 101 pid 4711 replaced=no\n", "pve.qemu_binaries"),
        ("IO-APIC 3\nIR-PCI-MSI 24\n", "proc.interrupts"),
        (INTERRUPTS, "proc.interrupts"),
        ("/sys/module/vfio_pci/parameters/disable_idle_d3:N\n", "module_parameters"),
        ("vfio_iommu_type1.allow_unsafe_interrupts N\n", "module_parameters"),
        ("image /boot/initrd.img-6.8.12-4-pve modified 1700000000\n", "initramfs"),
        ("  4100000000-43ffffffff : PCI Bus 0000:0a\n", "proc.iomem"),
    ],
)
def test_what_the_collector_composes_is_known_again_in_a_paste(text, source):
    assert [one.source for one in recognise.recognise(text, "")] == [source]


IR_FAILED = "[    0.1] DMAR-IR: Failed to enable irq remapping. You are vulnerable to irq-injection attacks.\n"


def read(**texts: str) -> object:
    named = {name.replace("__", "."): text for name, text in texts.items()}
    return snapshot.build(EvidenceSet("h", entries={name: Evidence(name, stdout=text) for name, text in named.items()}))


@pytest.mark.parametrize(
    ("texts", "remapped"),
    [
        ({"proc__interrupts": "IR-IO-APIC 9\nIR-PCI-MSIX 40\nPCI-MSI 1\n"}, True),
        ({"proc__interrupts": "IO-APIC 9\nPCI-MSI 40\n"}, False),
        ({"kernel_log": "[    0.1] AMD-Vi: Interrupt remapping enabled\n"}, True),
        ({"kernel_log": "[    0.1] DMAR-IR: Enabled IRQ remapping in x2apic mode\n"}, True),
        ({"kernel_log": IR_FAILED}, False),
        ({"kernel_log": "[    0.1] something else\n"}, None),
        ({}, None),
    ],
)
def test_interrupt_remapping_is_read_from_the_chips_or_the_log(texts, remapped):
    assert read(**texts).iommu.interrupt_remapping.value is remapped


def test_amds_word_on_an_intel_machine_is_not_its_iommu():
    told = read(
        kernel_log="[ 0.1] DMAR: IOMMU enabled\n[ 0.8] AMD-Vi: AMD IOMMUv2 functionality not available on this system\n"
    )

    assert told.iommu.technology.value == "DMAR"
    only_amds = "[ 0.8] AMD-Vi: AMD IOMMUv2 functionality not available on this system - This is not a bug.\n"
    assert not read(kernel_log=only_amds).iommu.technology.known


# --- the kernel log -------------------------------------------------------------------------------------------------

PORT = "0000:40:01.1"


def test_a_pcie_error_is_one_event_with_its_ids_and_bits():
    log = kernel_log.parse(
        f"[ 10.5] pcieport {PORT}: AER: Multiple Correctable error message received from 0000:40:00.0\n"
        f"[ 10.5] pcieport {PORT}: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Transmitter ID)\n"
        f"[ 10.5] pcieport {PORT}:   device [1022:14a5] error status/mask=00001040/00006000\n"
        f"[ 10.5] pcieport {PORT}:    [ 6] BadTLP                 (First)\n"
        f"[ 10.5] pcieport {PORT}:    [12] Timeout               \n"
        f"[ 11.0] nvidia 0000:41:00.0: AER: PCIe Bus Error: severity=Uncorrected (Non-Fatal), "
        "type=Transaction Layer, (Requester ID)\n"
        f"[ 12.0] pcieport {PORT}: AER: Uncorrected (Fatal) error received: 0000:41:00.0\n"
    )

    assert log.aer == (
        AerEvent(
            PORT, "correctable", "Data Link Layer", "Transmitter", "1022:14a5", ("BadTLP", "Timeout"), "10.5", True
        ),
        AerEvent("0000:41:00.0", "nonfatal", "Transaction Layer", "Requester", stamp="11.0", complete=False),
        AerEvent(PORT, "fatal", stamp="12.0", complete=False),
    )


def test_an_old_error_line_and_one_from_firmware_are_events_too():
    log = kernel_log.parse(
        "[ 1.0] pcieport 0000:00:1c.5: PCIe Bus Error: severity=Corrected, type=Physical Layer, id=00e5(Receiver ID)\n"
        "[ 2.0] {7}[Hardware Error]: event severity: corrected\n"
        "[ 2.0] {7}[Hardware Error]:   section_type: PCIe error\n"
        "[ 2.0] {7}[Hardware Error]:   device_id: 0000:3b:00.0\n"
        "[ 3.0] {8}[Hardware Error]: event severity: fatal\n"
        "[ 3.0] {8}[Hardware Error]:   section_type: memory error\n"
        "[ 3.0] {8}[Hardware Error]:   device_id: 0000:3b:00.0\n"
    )

    assert [(one.bdf, one.severity) for one in log.aer] == [
        ("0000:00:1c.5", "correctable"),
        ("0000:3b:00.0", "correctable"),
    ]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (
            "nvidia 0000:81:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x001c address=0xd08 flags=0x0020]",
            IommuFault("0000:81:00.0", "IO_PAGE_FAULT", "nvidia", "0xd08", "0x001c", "0x0020", stamp="1.5"),
        ),
        (
            "AMD-Vi: Event logged [IO_PAGE_FAULT device=81:00.0 domain=0x001c address=0xd08 flags=0x0020]",
            IommuFault("0000:81:00.0", "IO_PAGE_FAULT", "", "0xd08", "0x001c", "0x0020", stamp="1.5"),
        ),
        (
            "DMAR: [DMA Write] Request device [3b:00.0] fault addr ffe0 [fault reason 05] PTE Write access is not set",
            IommuFault("0000:3b:00.0", "DMA Write", address="ffe0", reason="PTE Write access is not set", stamp="1.5"),
        ),
        (
            "DMAR: [DMA Read NO_PASID] Request device [3b:00.0] fault addr 0xffe0 [fault reason 0x06] PTE Read access",
            IommuFault("0000:3b:00.0", "DMA Read NO_PASID", address="0xffe0", reason="PTE Read access", stamp="1.5"),
        ),
        ("nvidia 0000:81:00.0: AMD-Vi: Event logged [IO", None),
        ("nvidia 0000:81:00.0: AMD-Vi: Event lo", None),
    ],
)
def test_a_fault_is_read_in_every_spelling_and_not_from_a_cut_one(row, fault):
    assert kernel_log.parse(f"[ 1.5] {row}").faults == ((fault,) if fault else ())


@pytest.mark.parametrize(
    ("row", "form", "time"),
    [
        ("[  1.5] x", "monotonic", ""),
        ("[Sun Feb  1 11:43:09 2026] x", "ctime", "2026-02-01T11:43:09"),
        ("2026-02-01T11:43:09+0100 host1 kernel: x", "iso", "2026-02-01T11:43:09"),
        ("2026-02-01T11:43:09,123456+01:00 x", "iso", "2026-02-01T11:43:09"),
        ("Feb  1 11:43:09 host1 kernel: x", "syslog", ""),
        ("NVRM: x", "none", ""),
    ],
)
def test_a_stamp_tells_its_style_and_its_time_where_it_names_a_year(row, form, time):
    log = kernel_log.parse(row)

    assert (log.formats, kernel_log.iso_time(log.lines[0].stamp)) == ((form,), time)


def test_a_journal_line_keeps_the_seconds_since_boot():
    (line,) = kernel_log.parse("Sep 19 16:18:02 host1 kernel: [68183.615810] pcieport 0000:00:03.1: x").lines

    assert (line.stamp, line.uptime, line.text) == ("Sep 19 16:18:02", "68183.615810", "pcieport 0000:00:03.1: x")


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        (
            ["pcieport 0000:00:1d.4: BAR 15: no space for [mem size 0xc00000000 64bit pref]"],
            [("BAR 15", 48 * GIB, True)],
        ),
        (
            ["pci 0000:84:00.0: BAR 1 [mem size 0x800000000 64bit pref]: can't assign; no space"],
            [("BAR 1", 32 * GIB, False)],
        ),
        (["pcieport 0000:00:1d.4: bridge window [io  size 0x1000]: failed to assign"], []),
        (
            [
                "pci 0000:84:00.0: BAR 1 [mem size 0x800000000 64bit pref]: failed to assign",
                "pci 0000:84:00.0: BAR 1 [mem 0x6000000000-0x67ffffffff 64bit pref]: assigned",
            ],
            [],
        ),
        (
            [
                "pcieport 0000:00:1d.4: BAR 15: failed to assign [mem size 0xc00000000 64bit pref]",
                "pcieport 0000:00:1d.4: BAR 14: assigned [mem 0x90000000-0x900fffff]",
            ],
            [("BAR 15", 48 * GIB, True)],
        ),
    ],
)
def test_what_the_kernel_could_not_place_until_the_end(rows, left):
    notes = kernel_log.parse("\n".join(f"[ 1.0] {row}" for row in rows)).notes.get("window", ())

    assert [(one.resource, one.size_bytes, one.is_bridge) for one in kernel_log.unassigned_windows(notes)] == left


@pytest.mark.parametrize(
    ("row", "bar"),
    [
        ("BAR 1: can't reserve [mem 0xd0000000-0xdfffffff 64bit pref]", (1, 0xD0000000, 0xDFFFFFFF)),
        (
            "BAR 1 [mem 0xd0000000-0xdfffffff 64bit pref]: can't reserve [mem 0xd0000000-0xdfffffff 64bit pref]",
            (1, 0xD0000000, 0xDFFFFFFF),
        ),
        ("BAR 3: can't reserve [mem 0xd00", (3, None, None)),
    ],
)
def test_a_bar_that_vfio_could_not_have_is_read_with_its_range(row, bar):
    notes = kernel_log.parse(f"[ 1.0] vfio-pci 0000:07:00.0: {row}").notes["bar_reserved"]

    assert [(one.bdf, one.bar, one.start, one.end) for one in kernel_log.refused_bars(notes)] == [
        ("0000:07:00.0", *bar)
    ]


def test_a_snapshot_as_data_counts_events_and_keeps_no_lines():
    row = "[ 1.0] nvidia 0000:81:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x2 flags=0x3]\n"

    told = read(kernel_log=row * 3 + "[ 2.0] ACS overrides enabled\n").as_dict()["kernel"]["log"]["value"]
    assert (told["faults"], told["notes"], told["formats"]) == (
        {"0000:81:00.0 IO_PAGE_FAULT": 3},
        {"acs_override": 1},
        ["monotonic"],
    )


@pytest.mark.parametrize(
    ("rows", "whole"),
    [
        (["Linux version 6.8", "x", "Run /init as init process"], True),
        (["x", "Run /init as init process"], False),
        (["Linux version 6.8", "x"], False),
    ],
)
def test_only_a_log_with_the_whole_boot_lets_silence_speak(rows, whole):
    assert kernel_log.parse("\n".join(f"[ 1.0] {row}" for row in rows)).from_boot is whole


def test_a_long_log_is_read_in_one_pass():
    text = (
        "[ 1.0] nvidia 0000:81:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1 address=0x2 flags=0x3]\n" * 50_000
    )

    assert len(kernel_log.parse(text).faults) == 50_000


# --- raw registers --------------------------------------------------------------------------------------------------


def registers(
    standard: dict[int, str], extended: dict[int, str] | None = None, kind: int = 0, size: int = 4096
) -> bytes:
    """Configuration space with these capabilities, chained in this order (an extended one without its next pointer)."""
    config = bytearray(size)
    config[0:4], config[0x06], config[0x0B], config[0x0E] = bytes.fromhex("de10b52b"), 0x10, 0x03, kind
    config[0x34] = next(iter(standard), 0)
    for (place, text), following in zip(standard.items(), (*list(standard)[1:], 0), strict=False):
        body = bytearray.fromhex(text)
        body[1] = following
        config[place : place + len(body)] = body
    places = list(extended or {})
    for (place, text), following in zip((extended or {}).items(), (*places[1:], 0), strict=False):
        body = bytearray.fromhex(text)
        head = int.from_bytes(body[:4], "little") | following << 20
        config[place : place + len(body)] = head.to_bytes(4, "little") + body[4:]
    return bytes(config)


# PCI Express: flags 0042 (root port), LnkCap 32 GT/s x16, LnkSta 16 GT/s x8.
EXPRESS = "10004200" + "00" * 8 + "05010000" + "0000" + "8400"


def test_link_registers_tell_both_ends():
    link = pci_config.link(registers({0x40: EXPRESS}))

    assert link == pci_config.Link("root port", 32.0, 16, 16.0, 8)
    assert pci_config.link(registers({0x40: "0100"})) is None
    assert pci_config.link(registers({0x40: EXPRESS})[:64]) is None


@pytest.mark.parametrize(
    ("capability", "control", "expected"),
    [
        # BAR 2 of one, current 128 GB (2^17 MB), supported 64 MB, 256 MB, 128 GB.
        (1 << 10 | 1 << 12 | 1 << 21, 2 | 1 << 5 | 17 << 8, {2: ("128GB", ("64MB", "256MB", "128GB"))}),
        (1 << 12, 1 | 1 << 5 | 8 << 8, {1: ("256MB", ("256MB",))}),
        (1 << 31, 1 | 1 << 5 | 8 << 8 | 1 << 16, {1: ("256MB", ("128TB", "256TB"))}),
    ],
)
def test_resizable_bars_are_named_as_lspci_names_them(capability, control, expected):
    body = "15000100" + capability.to_bytes(4, "little").hex() + control.to_bytes(4, "little").hex()

    assert pci_config.resizable_bars(registers({0x40: "0100"}, {0x100: body})) == expected


def test_access_control_translation_errors_lanes_and_messages():
    config = registers(
        {0x40: "0500" + "0100", 0x50: "1100" + "0000"},
        {
            0x100: "01000200" + "00400000" + "00" * 8 + "41100000",
            0x150: "0d000100" + "7f00" + "1d00",
            0x160: "0f000100" + "0000" + "0080",
            0x170: "19000100" + "00000000" + "03000000",
        },
    )

    assert pci_config.error_status(config) == ("CESta.RxErr", "CESta.BadTLP", "CESta.Timeout", "UESta.CmpltTO")
    assert (pci_config.ats_enabled(config), pci_config.msi_enabled(config)) == (True, True)
    assert pci_config.lane_errors(config) == (0, 1)
    control, capability = pci_config.acs_control(config), pci_config.acs_capability(config)
    assert control is not None
    assert capability is not None
    assert [name for name, on in control.items() if on] == ["SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"]
    assert all(capability.values())


@pytest.mark.parametrize("length", [0, 1, 63, 64, 255, 256, 260, 0x104, 0x10F, 4095])
def test_a_cut_space_tells_less_and_never_wrong(length):
    whole = registers({0x40: EXPRESS}, {0x100: "01000200" + "00" * 12 + "01000000", 0x120: "0f000100" + "00000080"})
    cut = whole[:length]

    assert pci_config.error_status(cut) in (None, pci_config.error_status(whole))
    assert pci_config.ats_enabled(cut) in (None, pci_config.ats_enabled(whole))
    assert pci_config.link(cut) in (None, pci_config.link(whole))
    assert pci_config.resizable_bars(cut) == {}


def test_a_chain_of_extended_capabilities_that_loops_ends():
    looped = registers({}, {0x100: "01000200" + "00" * 16, 0x150: "0d000100" + "00000000"})
    broken = bytearray(looped)
    broken[0x150:0x154] = (0x000D | 1 << 16 | 0x100 << 20).to_bytes(4, "little")

    assert set(pci_config.extended(bytes(broken))) == {0x01, 0x0D}


def test_windows_stand_in_the_first_64_bytes():
    config = bytearray(64)
    config[0x0E], config[0x19] = 0x81, 0x41
    config[0x20:0x24] = bytes.fromhex("00b070b0")
    config[0x24:0x28] = bytes.fromhex("0100f1ff")
    config[0x28:0x30] = bytes.fromhex("00380000" + "1f380000")

    memory, prefetchable = pci_config.windows(bytes(config)) or (None, None)
    assert memory == Window(0xB0000000, 0xB07FFFFF)
    assert prefetchable == Window(0x380000000000, 0x381FFFFFFFFF)
    assert pci_config.secondary_bus(bytes(config)) == 0x41
    config[0x24:0x28] = bytes.fromhex("f1ff0100")
    config[0x28:0x30] = bytes(8)
    disabled = (pci_config.windows(bytes(config)) or (None, None))[1]
    assert disabled is not None
    assert disabled.size_bytes == 0


# --- sysfs and lspci ------------------------------------------------------------------------------------------------


def test_sysfs_tells_errors_resets_sleep_and_windows():
    functions = pci_sysfs.functions(
        "[0000:40:01.1]\nvendor: 0x1022\nclass: 0x060400\naer_dev_correctable: absent\n"
        "resource: " + ";".join(["0x0 0x0 0x0"] * 14) + ";0xb0000000 0xb07fffff 0x200200;"
        "0x380000000000 0x381fffffffff 0x20202201\n\n"
        "[0000:41:00.0]\nvendor: 0x10de\ndevice: 0x2bb5\nclass: 0x030200\nreset_method: flr bus\npower_state: D0\n"
        "d3cold_allowed: 1\nboot_vga: 0\naer_dev_correctable: RxErr 4 BadTLP 1 TOTAL_ERR_COR 5\n"
        "aer_dev_fatal: TOTAL_ERR_FATAL 0\nconfig_bytes: 256\nconfig: de10b52b0600\n"
    )
    port, gpu = functions["0000:40:01.1"], functions["0000:41:00.0"]

    assert (port.aer, port.window) == ({}, Window(0xB0000000, 0xB07FFFFF))
    assert port.prefetchable_window == Window(0x380000000000, 0x381FFFFFFFFF)
    assert gpu.aer == {"correctable": {"RxErr": 4, "BadTLP": 1, "TOTAL_ERR_COR": 5}, "fatal": {"TOTAL_ERR_FATAL": 0}}
    assert (gpu.reset_methods, gpu.power_state, gpu.d3cold_allowed, gpu.boot_vga) == (("flr", "bus"), "D0", True, False)
    assert len(gpu.config_hex) == 512


def test_a_function_that_sleeps_without_power_is_not_dead_and_tells_no_clique():
    text = f"[0000:41:00.0]\nvendor: 0x10de\nclass: 0x030200\npower_state: D3cold\nconfig: {'ff' * 256}\n"

    told = read(sysfs__pci=text)
    assert not told.pci.functions.value["0000:41:00.0"].off_bus
    assert not told.pci.approvals.known
    awake = read(sysfs__pci=text.replace("D3cold", "D0"))
    assert awake.pci.functions.value["0000:41:00.0"].off_bus
    assert awake.pci.approvals.value["0000:41:00.0"].state == "device_gone"


def test_an_operators_heading_says_which_function_is_dead():
    functions = pci_sysfs.functions(
        "=== AER ===\n--- 0000:03:00.0 ---\ncurrent_link_width: 63\ncurrent_link_speed: Unknown\n"
        "--- 0000:00:01.3 ---\naer_dev_fatal: cat: '/sys/x/aer_dev_fatal': No such file or directory\n"
        "=== dead GPU 03:00.0 ===\n\t!!! Unknown header type 7f\n"
    )
    dead, port = functions["0000:03:00.0"], functions["0000:00:01.3"]

    assert (dead.header_type, dead.link_raw_width, dead.link_width, dead.link_speed_gt) == ("7f", 63, None, None)
    assert (dead.off_bus, port.aer, port.off_bus) == (True, {}, False)


LISTED = """40:01.1 PCI bridge [0604]: Advanced Micro Devices, Inc. [AMD] Device [1022:14a5] (rev 01)
\tBus: primary=40, secondary=41, subordinate=41, sec-latency=0
\tMemory behind bridge: b0000000-b07fffff [size=8M] [32-bit]
\tPrefetchable memory behind bridge: 380000000000-381fffffffff [size=128G] [64-bit]
\tCapabilities: [58] Express (v2) Root Port (Slot+), IntMsgNum 0
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1
\t\tLnkSta:\tSpeed 16GT/s (downgraded), Width x16
\tCapabilities: [a0] MSI: Enable+ Count=1/1 Maskable- 64bit+
\tCapabilities: [150 v2] Advanced Error Reporting
\t\tUESta:\tDLP- SDES- TLP-
\t\tCESta:\tRxErr+ BadTLP-
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-
41:00.0 Ethernet controller [0200]: Mellanox Technologies MT2910 Family [ConnectX-7] [15b3:1021]
\tStatus: Cap+ 66MHz- UDF-
\tCapabilities: [40] Power Management version 3
\t\tStatus: D0 NoSoftRst+ PME-Enable-
\tCapabilities: [1c0 v1] Secondary PCI Express
\t\tLaneErrStat: LaneErr at lane: 0 3 15
\tCapabilities: [1d0 v1] Address Translation Service (ATS)
\t\tATSCtl:\tEnable+, Smallest Translation Unit: 00
40:02.0 PCI bridge: Intel Corporation Device 352a
\tPrefetchable memory behind bridge: 00000000fff00000-00000000000fffff [disabled]
"""


def test_lspci_tells_ports_windows_errors_and_translation():
    functions = lspci.functions(LISTED)
    port, card, empty = (functions[f"0000:{name}"] for name in ("40:01.1", "41:00.0", "40:02.0"))

    assert (port.port_type, port.secondary_bus, port.link_downgraded, port.msi) == ("root port", 0x41, True, True)
    assert (port.window, port.prefetchable_window) == (
        Window(0xB0000000, 0xB07FFFFF),
        Window(0x380000000000, 0x381FFFFFFFFF),
    )
    assert (port.aer_status, port.acs_cap["DirectTrans"], port.acs_ctl["DirectTrans"]) == (
        ("CESta.RxErr",),
        True,
        False,
    )
    assert (card.ats, card.lane_errors, card.power_state, card.parent) == (True, (0, 3, 15), "D0", "0000:40:01.1")
    assert empty.prefetchable_window.size_bytes == 0


BARS = (
    "01:00.0 VGA compatible controller: NVIDIA Corporation Device 2204\n"
    "\tCapabilities: [bb0 v1] Physical Resizable BAR\n"
)
ROW = "\t\tBAR 1: current size: 256MB, supported: 64MB 128MB 256MB 512MB 1GB 2GB 4GB 8GB 16GB 32GB"


@pytest.mark.parametrize("cut", range(0, len(ROW), 3))
def test_a_cut_list_of_sizes_claims_no_largest_one(cut):
    found = lspci.functions(BARS + ROW[:cut]).get("0000:01:00.0")

    assert found is not None
    assert found.rebar == {}


@pytest.mark.parametrize("width", range(44, 100, 7))
def test_a_list_of_sizes_that_a_terminal_broke_is_whole(width):
    rows = [ROW[at : at + width] for at in range(0, len(ROW), width)]
    found = lspci.functions(BARS + "\n".join(rows) + "\n\tKernel driver in use: nvidia\n")["0000:01:00.0"]

    assert found.rebar in ({}, {1: ("256MB", tuple(ROW.partition("supported: ")[2].split()))})
    assert found.rebar or width < 50


def test_two_cards_in_an_excerpt_stay_apart():
    found = lspci.fragments(f"{ROW}\n\t\tBAR 3: current size: 32MB, supported: 32MB\n{ROW}\n")

    assert [sorted(one.rebar) for one in found] == [[1, 3], [1]]
