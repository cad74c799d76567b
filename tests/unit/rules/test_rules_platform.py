"""Rules C, E, H below the drivers: interrupts, VFIO, bars, links, errors, faults, QEMU, bare metal, the kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rule_builders as b
from rule_builders import GIB, TWO

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core import snapshot as s
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import platform

ON = dict.fromkeys(("SrcValid", "ReqRedir", "CmpltRedir", "UpstreamFwd"), True)
OFF = dict.fromkeys(ON, False)
CLIQUES = " ".join(f"-set device.hostpci{at}.x-nv-gpudirect-clique=0" for at in (0, 1))
GPU, SECOND, PORT = "0000:01:00.0", "0000:02:00.0", "0000:00:01.0"


def kernel(line: str | None = "quiet", release: str = "6.14.8-2-pve", **more: object) -> b.Kernel:
    told = b.fact(b.line(line), line, "proc.cmdline") if line is not None else b.unknown("cmdline not read")
    return b.Kernel(command_line=told, release=b.fact(release, release, "uname"), **more)


def node(*configs: object, **parts: object) -> Snapshot:
    return b.hypervisor(*(configs or (b.vm_config(*TWO),)), **parts)


def spoken(*texts: str, gap_s: float = 0, line: str | None = "quiet") -> b.Kernel:
    return kernel(line, log=b.log(*texts, gap_s=gap_s))


def whole(told: b.Kernel) -> b.Kernel:
    """The same with a log that starts with the boot and was not cut."""
    return replace(told, log=replace(told.log, value=replace(told.log.value, from_boot=True)))


def set_up(*modprobe: str, loaded: tuple[str, ...] = (), line: str = "quiet", **more: object) -> b.Kernel:
    return kernel(
        line,
        modprobe=b.fact(modprobe, "\n".join(modprobe) or "(empty)", "modprobe.d"),
        modules=b.fact(dict.fromkeys(loaded, 1), " ".join(loaded) or "(none)", "proc.modules"),
        **more,
    )


def parameters(**given: str) -> s.Fact[dict[str, str]]:
    named = {name.replace("__", "."): value for name, value in given.items()}
    return b.fact(named, str(named), "module_parameters")


def iommu(units: tuple[str, ...] | None = ("ivhd0",), **more: object) -> b.Iommu:
    told = b.fact(units, "unit " + " ".join(units), "sysfs.iommu") if units is not None else b.unknown("no /sys")
    return b.Iommu(units=told, **more)


def remapped(on: bool | None, **more: object) -> b.Iommu:
    told = b.unknown("nothing read") if on is None else b.fact(on, "IR-PCI-MSI 24", "proc.interrupts")
    return iommu(interrupt_remapping=told, **more)


WHOLE_BOOT = ("Linux version 6.14.8-2-pve", "AMD-Vi: Extended features (0x1): PPR NX", "Run /init as init process")
IR_ON, IR_OFF, IR_UNKNOWN = (node(iommu=remapped(on)) for on in (True, False, None))


def card(*others: s.PciFunction, driver: str | None = "vfio-pci", **more: object) -> list[s.PciFunction]:
    return [b.gpu_function(GPU, b.RTX_3090, driver=driver, **more), *others]


def sibling(driver: str | None, function: int = 1) -> s.PciFunction:
    return b.audio(f"0000:01:00.{function}", driver=driver)


ONE = b.vm_config("0000:01:00.0,pcie=1")
WHOLE_SLOT = b.vm_config("0000:01:00,pcie=1", running=b.fact(False))


def disk(image: int = 200, config: int = 100, modules: tuple[str, ...] | None = ("vfio_pci",)) -> s.Fact[s.Initramfs]:
    path = "/etc/modprobe.d/vfio.conf"
    return b.fact(s.Initramfs("/boot/initrd.img", image, modules, path, config), "image /boot/initrd.img", "initramfs")


IDS = "options vfio-pci ids=10de:2bb5"


def early(
    *modules: str, modprobe: tuple[str, ...] = (IDS,), ram: object = None, release: str = "6.14.8-2-pve"
) -> Snapshot:
    made = set_up(*modprobe, modules_load=b.fact(modules, "vfio", "modules_load.d"), initramfs=ram or b.unknown("no"))
    return node(kernel=replace(made, release=b.fact(release)))


def memory_map(text: str) -> s.Fact[tuple[s.MemoryRange, ...]]:
    return b.fact(platform.memory_map(text), text.strip(), "proc.iomem")


def with_map(text: str | None, *functions: s.PciFunction, **more: object) -> Snapshot:
    pci = replace(b.pci(*functions), memory_map=memory_map(text) if text else b.unknown("iomem not read"))
    return node(ONE, pci=pci, **more)


BOOT_GPU = b.gpu_function(GPU, regions=b.bars(16 << 20, 256 << 20, at=0xD0000000), driver="vfio-pci", boot_vga=True)
RESERVED = "vfio-pci 0000:01:00.0: BAR 1: can't reserve [mem 0xd0000000-0xdfffffff 64bit pref]"
GAVE_UP = "vfio-pci 0000:01:00.0: not ready 65535ms after FLR; giving up"
SLOW = "vfio-pci 0000:01:00.0: timed out waiting for pending transaction; performing function level reset anyway"
MAP = "kvm: warning: vfio_container_dma_map(0x55, 0x380000000000, 0x2000000000, 0x7f) = -22 (Invalid argument)"
SMALL_MAP = "kvm: warning: vfio_container_dma_map(0x55, 0x380000000000, 0x4000, 0x7f) = -22 (Invalid argument)"
NO_P2P = "0000:01:00.0: PCI peer-to-peer transactions on BARs are not supported."


def started(*rows: str, **more: object) -> Snapshot:
    config = b.vm_config(*TWO)
    logs = b.fact({"101": rows}, "log", "pve.start_log")
    return node(vm=b.Vm(configs=b.fact({"101": config}, "conf", "pve.conf"), start_logs=logs), **more)


def qemu(version: str | None, *functions: s.PciFunction, replaced: bool = False, args: str = CLIQUES) -> Snapshot:
    config = b.vm_config(*TWO, args=args)
    return node(
        functions=functions or None,
        vm=b.Vm(
            configs=b.fact({"101": config}, "conf", "pve.conf"),
            qemu_version=b.fact(version, f"QEMU emulator version {version}", "kvm.version")
            if version
            else b.unknown("kvm not run"),
            qemu_replaced=b.fact({"101": replaced}, "vm 101 pid 7 replaced=yes", "pve.qemu_binaries"),
        ),
    )


def config_with(*places: int) -> str:
    """A configuration space whose capabilities stand at these places, in a chain."""
    config = bytearray(256)
    config[0:2], config[0x06], config[0x0B], config[0x34] = b"\xde\x10", 0x10, 0x03, places[0]
    for place, following in zip(places, (*places[1:], 0), strict=True):
        config[place], config[place + 1] = 0x11, following
    return config.hex()


def chained(*places: int) -> list[s.PciFunction]:
    return b.gpus_on_bus(2, config_hex=config_with(*places))


def rdma(ats: bool | None = None, **more: object) -> s.PciFunction:
    return s.PciFunction("0000:05:00.0", "15b3", "1021", "0207", source="sysfs.pci", ats=ats, **more)


def with_card(one: s.PciFunction, line: str = "quiet") -> Snapshot:
    config = b.vm_config(*TWO, "0000:05:00.0,pcie=1")
    return node(config, functions=[*b.gpus_on_bus(2), one], kernel=kernel(line))


def bare(*functions: s.PciFunction, complete: bool = True, **parts: object) -> Snapshot:
    return b.snapshot("bare_metal", **{"pci": b.pci(*functions, complete=complete), "kernel": kernel(), **parts})


def gpus(count: int = 2, **more: object) -> list[s.PciFunction]:
    return b.gpus_on_bus(count, **more)


def rebar(current: str, *supported: str) -> dict[int, tuple[str, tuple[str, ...]]]:
    return {0: ("64MB", ("64MB",)), 2: (current, supported or (current,))}


def unnamed(*functions: s.PciFunction) -> Snapshot:
    pci = b.Pci(unnamed=b.fact(functions, "BAR 1: current size", "lspci.vvv"))
    return b.snapshot("bare_metal", pci=pci)


def below(
    width: int = 16, speed: float = 32.0, port: dict[str, object] | None = None, **more: object
) -> list[s.PciFunction]:
    ends = {"link_max_speed_gt": 32.0, "link_max_width": 16}
    return [
        b.port(PORT, **{**ends, "port_type": "root port", **(port or {})}),
        b.gpu_function(GPU, **{**ends, "link_speed_gt": speed, "link_width": width, "parent": PORT, **more}),
    ]


def loaded(pstate: str = "P0", utilization: int = 90) -> s.Fact[tuple[s.Gpu, ...]]:
    return b.smi_gpus(1, pstate=pstate, utilization_percent=utilization)


def window(size: int, at: int = 0x20_0000_0000) -> s.Window:
    return s.Window(at, at + size - 1)


ERROR = "pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)"
BIT = "pcieport 0000:00:01.0:    [ 0] RxErr                  (First)"
FATAL = "pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Requester ID)"
FAULT = "AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x001c address=0xd0826240 flags=0x0020]"
INTEL_FAULT = "DMAR: [DMA Read NO_PASID] Request device [01:00.0] fault addr 0xdead000 [fault reason 0x06] PTE Read"
NO_ERRORS = {
    "correctable": {"TOTAL_ERR_COR": 0},
    "nonfatal": {"TOTAL_ERR_NONFATAL": 0},
    "fatal": {"TOTAL_ERR_FATAL": 0},
}


def counted(**totals: int) -> list[s.PciFunction]:
    counts = {name: {"RxErr": count, "TOTAL": count} for name, count in totals.items()}
    port, gpu = below(aer={**NO_ERRORS, **counts})
    return [replace(port, aer=NO_ERRORS), gpu]


def grouped(kind: str | None, units: tuple[str, ...] | None = ("ivhd0",), default: str | None = None) -> b.Iommu:
    return iommu(
        units,
        groups=b.fact({"14": (GPU,), "15": (SECOND,)}, "groups", "sysfs.iommu") if kind else b.unknown("no groups"),
        group_types=b.fact({"14": kind, "15": kind}, f"group 14 type {kind}", "sysfs.iommu")
        if kind
        else b.unknown("no"),
        default_domain=b.fact(default, f"iommu: Default domain type: {default}", "kernel_log")
        if default
        else b.unknown("no log"),
    )


def ports(acs: dict[str, bool] | None, **more: object) -> list[s.PciFunction]:
    made = [b.port(PORT, acs_ctl=acs, port_type="root port", **more)]
    return [*made, *(replace(gpu, parent=PORT) for gpu in gpus())]


def numa(*nodes: int | None, count: int | None = 2) -> Snapshot:
    functions = [replace(gpu, numa_node=node) for gpu, node in zip(gpus(len(nodes)), nodes, strict=True)]
    cpus = b.fact(dict.fromkeys(range(count), "0-7"), "node 0", "memory") if count else b.unknown("memory not read")
    return bare(*functions, memory=s.Memory(node_cpus=cpus))


NVME = s.PciFunction("0000:03:00.0", "144d", "a80a", "0108", parent=PORT, source="sysfs.pci")


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        # C3
        ("C3", IR_ON, "pass", "on"),
        ("C3", IR_OFF, "fail", "refuses"),
        ("C3", IR_UNKNOWN, "unknown", ""),
        ("C3", node(iommu=remapped(None, technology=b.fact("AMD-Vi")), kernel=spoken(*WHOLE_BOOT)), "fail", "off"),
        ("C3", node(iommu=remapped(None, technology=b.fact("AMD-Vi")), kernel=spoken(*WHOLE_BOOT[1:])), "unknown", ""),
        ("C3", node(iommu=iommu(())), "not_applicable", "off"),
        # C4
        ("C4", node(kernel=set_up(parameters=parameters(vfio_pci__disable_idle_d3="N"))), "pass", "Nothing asks"),
        ("C4", node(kernel=kernel(parameters=parameters(vfio_iommu_type1__allow_unsafe_interrupts="N"))), "pass", ""),
        (
            "C4",
            node(
                kernel=kernel(parameters=parameters(vfio_iommu_type1__allow_unsafe_interrupts="Y")),
                iommu=remapped(True),
            ),
            "fail",
            "not needed",
        ),
        (
            "C4",
            node(kernel=set_up("options vfio_iommu_type1 allow_unsafe_interrupts=1"), iommu=remapped(False)),
            "warn",
            "From the next boot",
        ),
        ("C4", node(kernel=set_up(line="vfio_iommu_type1.allow_unsafe_interrupts=1")), "warn", "not known"),
        ("C4", node(kernel=kernel()), "unknown", ""),
        # C6
        ("C6", node(ONE, functions=card(sibling("snd_hda_intel"))), "fail", "snd_hda_intel"),
        ("C6", node(WHOLE_SLOT, functions=card(sibling("snd_hda_intel"), driver="")), "warn", "until the VM starts"),
        ("C6", node(ONE, functions=card(sibling("vfio-pci"), sibling("", 2))), "pass", "No host driver"),
        ("C6", node(ONE, functions=card(sibling("vfio-pci"), sibling(None, 2))), "info", "0000:01:00.2"),
        ("C6", node(ONE, functions=card(sibling(None), driver=None)), "unknown", ""),
        ("C6", node(ONE, functions=card()), "not_applicable", "only function"),
        ("C6", node(ONE, pci=b.pci(*card(), complete=False)), "unknown", "more functions"),
        # C8
        ("C8", node(kernel=set_up(loaded=("nouveau",))), "fail", "nouveau"),
        ("C8", node(kernel=set_up("blacklist nouveau", loaded=("nouveau",))), "pass", "nouveau kept off"),
        ("C8", node(kernel=set_up("softdep nvidia pre: vfio-pci", loaded=("nvidia",))), "pass", ""),
        ("C8", node(kernel=set_up(loaded=("nova_core",), line="modprobe.blacklist=nova-core")), "pass", ""),
        (
            "C8",
            node(ONE, functions=card(modules=("nvidiafb", "nouveau")), kernel=set_up()),
            "warn",
            "nouveau and nvidiafb",
        ),
        (
            "C8",
            node(
                kernel=set_up(loaded=("nvidia",)), functions=[*gpus(2), b.gpu_function("0000:09:00.0", driver="nvidia")]
            ),
            "pass",
            "",
        ),
        ("C8", node(), "unknown", ""),
        # C9
        ("C9", early(ram=disk()), "pass", "newer"),
        ("C9", early(ram=disk(image=50)), "warn", "does not count yet"),
        ("C9", early(ram=disk(modules=("nouveau",))), "warn", "nouveau"),
        ("C9", early(), "unknown", ""),
        ("C9", early(modprobe=()), "not_applicable", "No VFIO module"),
        ("C9", early("vfio_virqfd", modprobe=(), ram=disk()), "info", "harmless"),
        # C11
        ("C11", node(ONE, kernel=spoken(RESERVED, RESERVED)), "fail", "at least 2 messages"),
        ("C11", with_map("d0000000-d07fffff : BOOTFB\n", BOOT_GPU), "fail", "BOOTFB"),
        ("C11", with_map("e0000000-e07fffff : BOOTFB\n", BOOT_GPU), "pass", "No boot framebuffer"),
        ("C11", with_map(None, BOOT_GPU), "unknown", "not known"),
        # C14
        ("C14", with_card(rdma(ats=True)), "pass", "uses ATS"),
        ("C14", with_card(rdma(ats=False)), "warn", "off"),
        ("C14", with_card(rdma(), line="pci=noats,realloc"), "fail", "noats"),
        ("C14", with_card(rdma()), "unknown", ""),
        ("C14", node(), "not_applicable", "No RDMA"),
        # C15
        ("C15", bare(*gpus(1, rebar=rebar("128GB", "64MB", "128GB"))), "pass", "largest size"),
        ("C15", bare(*gpus(1, rebar=rebar("256MB", "64MB", "256MB", "128GB"))), "fail", "256MB of 128GB"),
        ("C15", bare(*gpus(1, regions=b.bars(256 << 20))), "fail", "256 MiB"),
        ("C15", bare(*gpus(1, regions=b.bars(128 * GIB))), "info", "more than without"),
        ("C15", bare(*gpus(1, regions=b.bars(64 * GIB)), gpus=b.smi_gpus(1, memory_total_mib=97887)), "fail", "97887"),
        (
            "C15",
            bare(*gpus(1, regions=b.bars(128 * GIB)), gpus=b.smi_gpus(1, memory_total_mib=97887)),
            "pass",
            "covers",
        ),
        ("C15", bare(*gpus(1, device="1b06", regions=b.bars(256 << 20))), "unknown", "could be larger"),
        ("C15", bare(*gpus(1)), "unknown", ""),
        ("C15", bare(b.port(PORT)), "not_applicable", "no NVIDIA GPU"),
        ("C15", unnamed(s.PciFunction("", rebar={1: ("32GB", ("64MB", "32GB"))})), "pass", "unnamed"),
        ("C15", unnamed(s.PciFunction("", rebar={1: ("256MB", ("256MB", "32GB"))})), "fail", "256MB of 32GB"),
        # C16
        (
            "C16",
            bare(*below(port={"prefetchable_window": window(130 * GIB)}, rebar=rebar("128GB"))),
            "pass",
            "has room",
        ),
        (
            "C16",
            bare(*below(port={"prefetchable_window": window(288 << 20)}, rebar=rebar("256MB", "256MB", "32GB"))),
            "warn",
            "cannot grow to 32GB",
        ),
        ("C16", bare(*below(port={"prefetchable_window": window(1 * GIB)})), "info", "not known"),
        ("C16", bare(*below()), "unknown", ""),
        (
            "C16",
            bare(
                *below(), kernel=spoken("pcieport 0000:00:01.0: BAR 15: no space for [mem size 0xc00000000 64bit pref]")
            ),
            "warn",
            "no place for a window of 48 GiB",
        ),
        (
            "C16",
            bare(
                *below(),
                kernel=spoken("pci 0000:01:00.0: BAR 1 [mem size 0x800000000 64bit pref]: can't assign; no space"),
            ),
            "warn",
            "BAR 1 (32 GiB)",
        ),
        # C17
        ("C17", bare(*below()), "pass", "all 16 lanes at 32 GT/s"),
        ("C17", bare(*below(width=8)), "fail", "8 of 16 lanes"),
        ("C17", bare(*below(width=8, port={"link_max_width": 8})), "pass", "all 8 lanes"),
        ("C17", bare(*below(speed=2.5)), "pass", "not judged"),
        ("C17", bare(*below(speed=16.0), gpus=loaded()), "fail", "under load"),
        ("C17", bare(*below(speed=2.5), gpus=loaded("P8", 0)), "pass", "not judged"),
        ("C17", bare(*below(off_bus=True, link_raw_width=63)), "fail", "off the bus"),
        ("C17", bare(*gpus(1)), "unknown", ""),
        ("C17", bare(kernel=spoken("pcieport 0000:00:01.3: retraining failed")), "warn", "train again"),
        # C18
        ("C18", bare(*counted()), "pass", "no PCIe error"),
        ("C18", bare(*counted(correctable=12)), "info", "12 PCIe errors"),
        ("C18", bare(*counted(nonfatal=1)), "fail", "1 uncorrectable"),
        ("C18", bare(*below(aer={}), kernel=kernel()), "info", "no error counters"),
        ("C18", bare(*below(aer_status=("CESta.RxErr",), lane_errors=(0, 1))), "info", "2 lanes"),
        ("C18", bare(*below()), "unknown", ""),
        ("C18", bare(*below(), kernel=spoken(ERROR, BIT)), "warn", "above 0000:01:00.0 (Physical Layer, RxErr)"),
        ("C18", bare(*below(), kernel=spoken(*[ERROR] * 200, gap_s=0.01)), "fail", "200 PCIe errors"),
        ("C18", bare(*below(), kernel=spoken(*[ERROR] * 25, gap_s=30)), "warn", "25 PCIe errors"),
        ("C18", bare(*below(), kernel=spoken(FATAL)), "fail", "fatal"),
        ("C18", bare(*counted(), kernel=kernel("pci=noaer")), "warn", "hides"),
        ("C18", bare(kernel=spoken(ERROR), complete=False), "warn", "corrected 1 PCIe error"),
        # C19
        ("C19", node(ONE, kernel=spoken(GAVE_UP)), "fail", "power cycle"),
        ("C19", node(ONE, kernel=spoken(SLOW)), "warn", "open"),
        ("C19", node(kernel=spoken("quiet")), "info", "seen not to come back"),
        ("C19", node(ONE, functions=card(), kernel=whole(spoken("quiet"))), "pass", "no failed reset"),
        ("C19", node(ONE, functions=card(), kernel=spoken("quiet")), "info", "no failed reset"),
        ("C19", node(ONE, functions=card()), "unknown", ""),
        # C20
        (
            "C20",
            node(kernel=replace(spoken(GAVE_UP), parameters=parameters(vfio_pci__disable_idle_d3="N"))),
            "warn",
            "D3",
        ),
        (
            "C20",
            node(kernel=replace(spoken("x"), parameters=parameters(vfio_pci__disable_idle_d3="N"))),
            "pass",
            "sleep",
        ),
        (
            "C20",
            node(kernel=replace(spoken(GAVE_UP), parameters=parameters(vfio_pci__disable_idle_d3="Y"))),
            "pass",
            "",
        ),
        ("C20", node(kernel=kernel(parameters=parameters())), "not_applicable", ""),
        ("C20", node(), "unknown", ""),
        # C21
        ("C21", started(MAP, NO_P2P, "TASK OK"), "fail", "BARs of 0000:01:00.0"),
        ("C21", started("TASK OK"), "pass", "names no BAR"),
        ("C21", started(SMALL_MAP, "TASK OK"), "pass", "names no BAR"),
        ("C21", node(kernel=spoken(NO_P2P)), "fail", "cannot work"),
        ("C21", node(kernel=spoken("IOMMU_IOAS_MAP failed: Bad address, PCI BAR?")), "fail", "a BAR"),
        ("C21", node(), "unknown", ""),
        ("C21", node(ONE), "not_applicable", "two GPUs"),
        # C22
        (
            "C22",
            bare(*gpus(), kernel=spoken(*[f"nvidia 0000:81:00.0: {FAULT}"] * 3)),
            "fail",
            "refused 3 accesses of GPU",
        ),
        ("C22", bare(*gpus(), kernel=spoken(INTEL_FAULT)), "fail", "GPU 0000:01:00.0 (DMA Read NO_PASID)"),
        ("C22", bare(kernel=spoken(f"vfio-pci 0000:81:00.0: {FAULT}"), complete=False), "warn", "whether it is a GPU"),
        ("C22", bare(*gpus(), b.port("0000:81:00.0"), kernel=whole(spoken(f"xhci 0000:81:00.0: {FAULT}"))), "pass", ""),
        ("C22", bare(*gpus(), b.port("0000:81:00.0"), kernel=spoken(f"xhci 0000:81:00.0: {FAULT}")), "info", ""),
        ("C22", bare(*gpus()), "unknown", ""),
        # C23
        ("C23", qemu("10.1.2"), "pass", "can give"),
        ("C23", qemu("10.1.2", replaced=True), "unknown", "older QEMU"),
        ("C23", qemu("2.10.0"), "fail", "does not know"),
        ("C23", qemu("8.0.2", *chained(0x40, 0xC8)), "fail", "C8h"),
        ("C23", qemu("8.0.2", *chained(0x40, 0xB0)), "pass", "at C8h"),
        ("C23", qemu("8.0.2"), "unknown", "place"),
        ("C23", qemu(None), "unknown", ""),
        ("C23", qemu("10.1.2", args=""), "not_applicable", "No VM asks"),
        ("C23", started("kvm: NVIDIA GPUDirect Clique ID: invalid config space"), "fail", "invalid config space"),
        # C24
        ("C24", bare(*gpus(), kernel=kernel("pcie_aspm=off")), "pass", "off"),
        (
            "C24",
            bare(*gpus(), kernel=kernel(parameters=parameters(pcie_aspm__policy="[default] powersave"))),
            "pass",
            "",
        ),
        (
            "C24",
            bare(*gpus(), kernel=kernel(parameters=parameters(pcie_aspm__policy="default [powersave]"))),
            "warn",
            "",
        ),
        ("C24", bare(*gpus()), "unknown", ""),
        # C25
        ("C25", numa(0, 0), "pass", "node 0"),
        ("C25", numa(0, 1), "info", "node 1: 0000:02:00.0"),
        ("C25", numa(-1, -1), "warn", "does not tell"),
        ("C25", numa(-1, -1, count=1), "pass", ""),
        ("C25", numa(None, 0), "unknown", "0000:01:00.0"),
        # E1
        ("E1", bare(*gpus(), iommu=grouped("DMA-FQ")), "fail", "translates"),
        ("E1", bare(*gpus(), iommu=grouped("identity")), "pass", "identity"),
        ("E1", bare(*gpus(), iommu=iommu(())), "pass", "off"),
        ("E1", bare(*gpus(), kernel=kernel("iommu=off"), iommu=grouped(None, None, "Translated")), "pass", "off"),
        ("E1", bare(*gpus(), kernel=kernel("iommu=pt"), iommu=grouped(None, None)), "pass", "iommu=pt"),
        ("E1", bare(*gpus(), iommu=grouped(None, default="Translated")), "fail", "translates"),
        ("E1", bare(*gpus(), iommu=grouped(None, None, "Translated")), "unknown", ""),
        ("E1", bare(*gpus(1)), "not_applicable", "do not matter"),
        # E2
        ("E2", bare(*ports(ON)), "fail", "redirects"),
        ("E2", bare(*ports(OFF)), "pass", "does not redirect"),
        ("E2", bare(*ports(None)), "unknown", ""),
        ("E2", bare(*ports(None, config_hex="00" * 4096)), "pass", "no port"),
        ("E2", bare(*ports(None, access_denied=True)), "unknown", ""),
        ("E2", unnamed(s.PciFunction("", acs_ctl=OFF)), "pass", "None of 1"),
        ("E2", unnamed(s.PciFunction("", acs_ctl=ON)), "unknown", "1 of 1"),
        # E3
        ("E3", node(kernel=kernel("iommu=off")), "fail", "iommu=off"),
        ("E3", bare(*gpus(), kernel=kernel("iommu=off")), "pass", "nothing is meant"),
        ("E3", node(kernel=kernel()), "pass", ""),
        ("E3", node(kernel=kernel(None)), "unknown", ""),
        # E4
        ("E4", bare(*below(speed=2.5), gpus=loaded("P8", 0)), "info", "at P8"),
        ("E4", bare(*below(speed=2.5)), "info", "unknown load"),
        ("E4", bare(*below()), "pass", "full speed"),
        ("E4", bare(*below(speed=16.0), gpus=loaded()), "pass", "C17"),
        ("E4", bare(*gpus(1)), "unknown", ""),
        ("E4", b.guest(), "not_applicable", "guest"),
        # H2
        ("H2", bare(*gpus(), kernel=kernel(release="7.0.0-3-pve")), "warn", "nova_core"),
        ("H2", bare(*gpus(), kernel=kernel(release="7.0.2-1-pve")), "warn", "hard locks"),
        ("H2", bare(*gpus(), kernel=kernel(release="6.1.0-9-rt-amd64")), "warn", "real-time"),
        ("H2", bare(*gpus(), kernel=kernel(release="6.17.13-6-pve")), "pass", "no list"),
        ("H2", bare(*gpus(), kernel=b.Kernel()), "unknown", ""),
        # H3
        ("H3", bare(*gpus(), kernel=kernel(lockdown=b.fact("integrity"))), "info", "integrity"),
        ("H3", bare(*gpus(), kernel=kernel(lockdown=b.fact("none"))), "pass", "not locked"),
        ("H3", bare(*gpus()), "unknown", ""),
        # H7
        ("H7", bare(*ports(None), NVME), "info", "share the uplink 0000:00:01.0"),
        ("H7", bare(*ports(None)), "pass", "No NVMe"),
        ("H7", bare(*gpus()), "unknown", ""),
    ],
)
def test_platform(rule: str, judged: Snapshot, state: str, words: str) -> None:
    found = [one for one in b.findings(rule, judged) if one.state == state and words.lower() in one.title.lower()]

    assert found, [(one.state, one.title) for one in b.findings(rule, judged)]
    assert all(one.reason for one in found if state in ("unknown", "not_applicable"))


def test_a_dead_card_is_told_once_and_not_judged_by_its_garbage() -> None:
    dead = b.snapshot(
        "hypervisor", pci=b.pci(*below(off_bus=True, link_raw_width=63, aer=NO_ERRORS)), kernel=spoken("quiet")
    )

    assert [(one.state, one.severity) for one in b.findings("C17", dead)] == [("fail", "critical")]
    assert not [one for one in b.findings("C18", dead) if one.state == "pass" and one.subject == GPU]
    assert b.verdicts("C15", dead) == ["not_applicable"]


def test_one_small_window_among_large_ones_is_the_odd_one() -> None:
    windows = "".join(
        f"  {(at << 40):x}-{(at << 40) + size - 1:x} : PCI Bus 0000:{at:02x}\n"
        for at, size in ((1, 48 * GIB), (2, 48 * GIB), (3, 12 * GIB))
    )
    pci = replace(b.pci(*gpus(3)), memory_map=memory_map(windows))
    told = [one for one in b.findings("C16", b.snapshot("bare_metal", pci=pci)) if one.state == "warn"]

    assert [one.subject for one in told] == ["bus 0000:03"]
    assert "12 GiB, the others 48 GiB" in told[0].title


def test_windows_that_are_all_alike_are_no_finding() -> None:
    windows = "".join(f"  {(at << 40):x}-{(at << 40) + 48 * GIB - 1:x} : PCI Bus 0000:{at:02x}\n" for at in (1, 2, 3))
    pci = replace(b.pci(*gpus(3)), memory_map=memory_map(windows))

    assert set(b.verdicts("C16", b.snapshot("bare_metal", pci=pci))) == {"info"}


def test_a_window_that_the_kernel_placed_in_the_end_is_no_finding() -> None:
    log = spoken(
        "pcieport 0000:00:01.0: bridge window [mem size 0xc00000000 64bit pref]: can't assign; no space",
        "pcieport 0000:00:01.0: bridge window [mem size 0xc00000000 64bit pref]: failed to assign",
        "pcieport 0000:00:01.0: bridge window [mem 0x4000000000-0x4bffffffff 64bit pref]: assigned",
    )

    assert b.verdicts("C16", bare(*below(), kernel=log)) == ["unknown"]


def test_an_error_elsewhere_is_none_of_the_gpus_where_the_tree_is_known() -> None:
    elsewhere = ERROR.replace("0000:00:01.0", "0000:00:1c.0")

    assert "warn" not in b.verdicts("C18", bare(*counted(), kernel=spoken(elsewhere)))


def test_a_source_id_is_not_the_faulty_device() -> None:
    log = spoken("pcieport 0000:00:01.0: AER: Correctable error message received from 0000:00:00.0", ERROR, BIT)

    assert [one.subject for one in b.findings("C18", bare(*below(), kernel=log)) if one.bad] == ["0000:00:01.0"]


def test_suppressed_messages_make_the_count_a_lower_bound() -> None:
    log = spoken("amd_iommu_report_page_fault: 6 callbacks suppressed", f"nvidia 0000:81:00.0: {FAULT}")

    assert "at least 1 accesses" in b.findings("C22", bare(*gpus(), kernel=log))[0].title


@pytest.mark.parametrize(
    ("role", "words", "never"),
    [("bare_metal", "iommu=pt", "Hypervisor"), ("hypervisor", "leave the IOMMU", "iommu=pt"), (None, "First tell", "")],
)
def test_the_cure_for_faults_depends_on_the_role(role: str | None, words: str, never: str) -> None:
    judged = b.snapshot(role, pci=b.pci(*gpus()), kernel=spoken(f"nvidia 0000:81:00.0: {FAULT}"))
    fix = b.findings("C22", judged)[0].fix

    assert fix is not None
    told = " ".join([fix.summary, *fix.steps])
    assert words in told
    assert not never or never not in told


@pytest.mark.parametrize("rule", ["E1", "E2"])
def test_advice_for_bare_metal_is_never_given_to_a_hypervisor(rule: str) -> None:
    judged = node(pci=b.pci(*ports(ON)), iommu=grouped("DMA-FQ"))

    assert b.verdicts(rule, judged) == ["not_applicable"]


def test_a_translating_iommu_leads_the_faults_that_it_causes() -> None:
    judged = bare(*gpus(), iommu=grouped("DMA-FQ"), kernel=spoken(f"nvidia 0000:01:00.0: {FAULT}"))

    assert "C22" in b.findings("E1", judged)[0].explains


def test_a_dead_card_of_a_hypervisor_explains_what_its_guest_misses() -> None:
    functions = b.gpus_on_bus(2, driver="vfio-pci", regions=b.bars(128 * GIB, 64 << 20))
    functions[1] = replace(functions[1], off_bus=True, link_raw_width=63)
    uuid = "aaaaaaaa-0000-0000-0000-000000000001"
    host = node(b.vm_config(*TWO, smbios1=f"uuid={uuid}"), functions=functions)
    guest = b.guest(
        2,
        machine=b.Machine(virt=b.fact("kvm"), smbios_uuid=b.fact(uuid)),
        gpus=b.smi_gpus(1, virtualization_mode="Pass-Through"),
    )

    assert "guest/A5" in b.findings("C17", host, guest)[0].explains
