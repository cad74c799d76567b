"""The snapshot: everything known about one host, typed, each value with the source it came from.

A value that could not be read is a ``Fact`` without a value and with a reason. Nothing here has a default that
could be taken for a reading.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from .measurement import Measurement
from .plain import plain
from .runtime import Engine, EngineLog, NcclLog, NcclTopology, P2pCache
from .values import by_identity, fast_init

SNAPSHOT_SCHEMA = "peerlane.snapshot/1"

T = TypeVar("T")
Role = Literal["bare_metal", "hypervisor", "guest"]


@fast_init
@dataclass(frozen=True)
class Fact(Generic[T]):
    """A value that was read, or the reason why it was not.

    ``source`` is the evidence source; ``excerpt`` the line or lines that say it, verbatim.
    """

    value: T | None = None
    source: str = ""
    excerpt: str = ""
    reason: str = ""

    @property
    def known(self) -> bool:
        """Whether there is a value."""
        return self.value is not None


@functools.lru_cache(maxsize=4096)
def unknown(reason: str, source: str = "") -> Fact[Any]:
    """Return a fact without a value. Two with the same words are one object: hosts lack much the same."""
    return Fact(None, source=source, reason=reason)


NOT_READ: Fact[Any] = unknown("not collected")


# --- machine, cpu, kernel -------------------------------------------------------------------------------------------


@fast_init
@dataclass(frozen=True)
class Machine:
    """What the machine says it is (``systemd-detect-virt``, DMI)."""

    virt: Fact[str] = NOT_READ  # systemd-detect-virt: none, kvm, qemu, vmware, microsoft ...
    container: Fact[str] = NOT_READ  # systemd-detect-virt -c: none, lxc, docker, systemd-nspawn ...
    product_name: Fact[str] = NOT_READ
    sys_vendor: Fact[str] = NOT_READ
    board_name: Fact[str] = NOT_READ
    bios_version: Fact[str] = NOT_READ  # the firmware's; in a guest that of SeaBIOS or OVMF
    smbios_uuid: Fact[str] = NOT_READ  # lower case
    os_id: Fact[str] = NOT_READ  # debian, ubuntu, fedora ...
    os_version: Fact[str] = NOT_READ  # 13, 24.04 ...
    is_proxmox: Fact[bool] = NOT_READ
    systemd: Fact[str] = NOT_READ  # 255
    macs: Fact[tuple[str, ...]] = NOT_READ  # of real (also paravirtual) network cards, lower case
    booted_at: Fact[int] = NOT_READ  # seconds since 1970, as /proc/stat tells it
    steal_percent: Fact[float] = NOT_READ  # of all CPU time since boot, /proc/stat


@dataclass(frozen=True)
class Cpu:
    """``/proc/cpuinfo`` of the first processor."""

    vendor: Fact[str] = NOT_READ  # GenuineIntel, AuthenticAMD
    model_name: Fact[str] = NOT_READ
    flags: Fact[frozenset[str]] = NOT_READ
    physical_bits: Fact[int] = NOT_READ
    virtual_bits: Fact[int] = NOT_READ
    threads: Fact[int] = NOT_READ


@dataclass(frozen=True)
class HugePages:
    """The pool of one huge page size."""

    total: int
    free: int


@fast_init
@dataclass(frozen=True)
class Memory:
    """The machine's memory, and what shares or reserves it."""

    total_kib: Fact[int] = NOT_READ  # MemTotal
    available_kib: Fact[int] = NOT_READ  # MemAvailable
    huge_pages: Fact[Mapping[int, HugePages]] = NOT_READ  # page size in KiB -> pool of all nodes together
    ksm_run: Fact[int] = NOT_READ  # /sys/kernel/mm/ksm/run: 0 stopped, 1 runs, 2 stopped and unmerged
    ksm_pages_sharing: Fact[int] = NOT_READ
    transparent: Fact[str] = NOT_READ  # always, madvise, never
    node_cpus: Fact[Mapping[int, str]] = NOT_READ  # NUMA node -> its CPUs as the kernel lists them: 0-31,64-95
    zfs_arc_max_bytes: Fact[int] = NOT_READ  # 0: ZFS takes its own default


@dataclass(frozen=True)
class CommandLine:
    """A kernel command line: tokens in order; a key may repeat (the last wins for ``iommu``, ``pci`` lists)."""

    tokens: tuple[tuple[str, str | None], ...] = ()

    def all(self, key: str) -> tuple[str | None, ...]:
        """Return every value of this key, in order."""
        return tuple(value for name, value in self.tokens if name == key)

    def last(self, key: str) -> str | None:
        """Return the value that wins, or None where the key is absent or has no value."""
        values = self.all(key)
        return values[-1] if values else None

    def has(self, key: str) -> bool:
        """Whether the key occurs at all."""
        return any(name == key for name, _ in self.tokens)


@fast_init
@dataclass(frozen=True)
class LogLine:
    """One kernel message: the time as printed (may be empty), the text without time and host name."""

    stamp: str
    text: str
    uptime: str = ""  # seconds since boot as printed, where they stand beside another stamp or alone


@dataclass(frozen=True)
class Xid:
    """An NVIDIA driver error event."""

    pci: str  # normalised: 0000:9b:00 (function left out where the log leaves it out)
    code: int
    detail: str
    stamp: str
    pid: int | None = None
    process: str = ""
    time: str = ""  # ISO 8601 without a zone, where the stamp tells the year; else ""


@dataclass(frozen=True)
class AerEvent:
    """One PCIe error that a port or a device reported (Advanced Error Reporting).

    ``bdf`` is the function that reports, never the source id in ``message received from``, which may be empty.
    """

    bdf: str
    severity: str  # correctable, nonfatal, fatal
    layer: str = ""  # Physical Layer, Data Link Layer, Transaction Layer
    agent: str = ""  # Receiver, Transmitter, Requester, Completer
    device_id: str = ""  # 1022:1453
    bits: tuple[str, ...] = ()  # RxErr, BadTLP, Timeout ...
    stamp: str = ""
    complete: bool = True  # False where the log was cut before the bits


@dataclass(frozen=True)
class IommuFault:
    """One access that the IOMMU refused (``IO_PAGE_FAULT`` of AMD-Vi, DMAR fault of Intel)."""

    bdf: str  # "" where the line was cut before it
    kind: str  # IO_PAGE_FAULT, DMA Read, DMA Write ...
    driver: str = ""  # the driver that the line names: nvidia, vfio-pci
    address: str = ""
    domain: str = ""
    flags: str = ""
    reason: str = ""
    stamp: str = ""


@dataclass(frozen=True)
class KernelLog:
    """What the kernel said: all lines, and the ones that parsers understood.

    ``notes`` holds the other telling lines by kind (``parse.kernel_log.NOTES`` lists the kinds), in their order.
    """

    lines: tuple[LogLine, ...] = ()
    xids: tuple[Xid, ...] = ()
    aer: tuple[AerEvent, ...] = ()
    faults: tuple[IommuFault, ...] = ()
    notes: Mapping[str, tuple[LogLine, ...]] = field(default_factory=dict)
    formats: tuple[str, ...] = ()  # of the time stamps: monotonic, ctime, iso, syslog, none
    from_boot: bool = False  # the first lines of the boot are there: what is missing was not said
    suppressed: int = 0  # "N callbacks suppressed": counts are lower bounds

    def matching(self, pattern: str, *words: str) -> tuple[LogLine, ...]:
        """Return the lines that a regular expression (ignoring case) finds.

        ``words``: in lower case, those of which one stands in every such line. Most logs hold none of them, and then
        no line is looked at.
        """
        if words:
            whole = _lower_text(self)
            if not any(word in whole for word in words):
                return ()
        wanted = re.compile(pattern, re.IGNORECASE)
        return tuple(line for line in self.lines if wanted.search(line.text))

    def plain_shape(self) -> dict[str, Any]:
        """Return what becomes of a log in JSON: what was understood, and counts of the rest."""
        return {
            "line_count": len(self.lines),
            "xids": self.xids,
            "suppressed": self.suppressed,
            "aer": dict(Counter(f"{one.bdf} {one.severity}" for one in self.aer)),
            "faults": dict(Counter(f"{one.bdf} {one.kind}" for one in self.faults)),
            "notes": {kind: len(lines) for kind, lines in self.notes.items()},
            "formats": self.formats,
        }


@by_identity(4)
def _lower_text(log: KernelLog) -> str:
    return "\n".join([line.text for line in log.lines]).lower()


@dataclass(frozen=True)
class Initramfs:
    """The initial RAM disk of the running kernel."""

    image: str
    modified_at: int | None = None  # seconds since 1970
    modules: tuple[str, ...] | None = None  # vfio, GPU and sound modules in it; None: it was not listed
    newest_config: str = ""  # the modprobe or modules file that changed last
    config_modified_at: int | None = None


@dataclass(frozen=True)
class BootTool:
    """``proxmox-boot-tool status``: how the machine was booted, and what each EFI system partition is set up for."""

    booted: str = ""  # uefi, legacy bios
    partitions: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)  # id -> uefi|grub -> kernels


@fast_init
@dataclass(frozen=True)
class Kernel:
    """The running kernel and how it is booted."""

    release: Fact[str] = NOT_READ  # uname -r
    command_line: Fact[CommandLine] = NOT_READ  # /proc/cmdline
    boot_loader: Fact[str] = NOT_READ  # grub, systemd-boot
    grub_default: Fact[CommandLine] = NOT_READ  # GRUB_CMDLINE_LINUX + _DEFAULT of /etc/default/grub
    grub_settings: Fact[Mapping[str, str]] = NOT_READ  # GRUB_* keys of /etc/default/grub
    etc_kernel_cmdline: Fact[CommandLine] = NOT_READ  # /etc/kernel/cmdline
    log: Fact[KernelLog] = NOT_READ
    modules: Fact[Mapping[str, int]] = NOT_READ  # lsmod: name -> use count
    modprobe: Fact[tuple[str, ...]] = NOT_READ  # lines of /etc/modprobe.d and modprobe -c, comments dropped
    installed: Fact[tuple[str, ...]] = NOT_READ  # releases with a /lib/modules or /boot/vmlinuz entry
    headers: Fact[tuple[str, ...]] = NOT_READ  # releases whose /lib/modules/R/build exists
    lockdown: Fact[str] = NOT_READ  # none, integrity, confidentiality
    clocksource: Fact[str] = NOT_READ  # tsc, kvm-clock, hpet, acpi_pm ...
    clocksources: Fact[tuple[str, ...]] = NOT_READ  # those that could be chosen
    modules_load: Fact[tuple[str, ...]] = NOT_READ  # names in /etc/modules and modules-load.d
    parameters: Fact[Mapping[str, str]] = NOT_READ  # vfio_pci.disable_idle_d3 -> N, of loaded modules
    initramfs: Fact[Initramfs] = NOT_READ
    boot_tool: Fact[BootTool] = NOT_READ  # proxmox-boot-tool status
    interrupt_chips: Fact[Mapping[str, int]] = NOT_READ  # /proc/interrupts: IR-PCI-MSI -> lines


# --- PCI ------------------------------------------------------------------------------------------------------------


@fast_init
@dataclass(frozen=True)
class Region:
    """One BAR. ``address`` is None where it is unassigned, ignored or virtual."""

    index: int
    size_bytes: int | None
    address: int | None
    prefetchable: bool | None = None


@dataclass(frozen=True)
class MemoryRange:
    """One line of ``/proc/iomem``. Ends are inclusive; ``depth`` is the nesting."""

    start: int
    end: int
    name: str
    depth: int = 0

    @property
    def size_bytes(self) -> int:
        """Return the size of the range."""
        return self.end - self.start + 1


@dataclass(frozen=True)
class Window:
    """An address window of a bridge. ``end`` is inclusive; an end below the start means: disabled."""

    start: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Return the size; 0 where the window is disabled."""
        return max(self.end - self.start + 1, 0)


@fast_init
@dataclass(frozen=True)
class PciFunction:
    """One PCI function, from ``lspci`` or sysfs or both. ``bdf`` always carries its domain: ``0000:01:00.0``."""

    bdf: str
    vendor: str | None = None  # four hex digits
    device: str | None = None
    class_code: str | None = None  # four hex digits: 0300, 0302, 0604
    name: str = ""
    driver: str | None = None  # "" means: read, and none bound; None means: not known
    modules: tuple[str, ...] = ()
    regions: Mapping[int, Region] = field(default_factory=dict)
    link_speed_gt: float | None = None
    link_width: int | None = None
    link_max_speed_gt: float | None = None
    link_max_width: int | None = None
    numa_node: int | None = None
    iommu_group: int | None = None
    link_raw_width: int | None = None  # the register as read: 63 where all bits are ones
    link_downgraded: bool | None = None  # lspci's word for speed or width below the maximum
    port_type: str = ""  # root port, upstream port, downstream port, endpoint, legacy endpoint, integrated endpoint
    secondary_bus: int | None = None  # of a bridge
    window: Window | None = None  # of a bridge: non-prefetchable memory
    prefetchable_window: Window | None = None
    ats: bool | None = None  # ATS enabled; None: no such capability, or not read
    msi: bool | None = None  # MSI or MSI-X enabled
    aer: Mapping[str, Mapping[str, int]] | None = None  # correctable, nonfatal, fatal -> error name -> count since boot
    aer_status: tuple[str, ...] | None = None  # bits set in CESta and UESta: CESta.RxErr; None: no AER, or not read
    lane_errors: tuple[int, ...] | None = None
    reset_methods: tuple[str, ...] | None = None  # in their order: flr, bus
    power_state: str | None = None  # D0, D3hot, D3cold
    d3cold_allowed: bool | None = None
    boot_vga: bool | None = None
    header_type: str | None = None  # two hex digits: 00, 01, 7f
    bus_master: bool | None = None
    acs_cap: Mapping[str, bool] | None = None  # what the function could do; acs_ctl: what is switched on
    acs_ctl: Mapping[str, bool] | None = None  # SrcValid, ReqRedir, CmpltRedir, UpstreamFwd, DirectTrans ...
    rebar: Mapping[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)  # BAR -> (current, supported)
    access_denied: bool = False  # lspci could not read the capabilities (not root)
    off_bus: bool = False  # header type 7f, rev ff, config space all ff
    parent: str | None = None  # bdf of the port above, where known
    physfn: bool = False  # a virtual function (has a physfn link)
    config_hex: str = ""  # raw config space as read, hex, no blanks
    source: str = ""

    @property
    def is_gpu(self) -> bool:
        """Whether this is an NVIDIA display controller (class 03)."""
        return self.vendor == "10de" and (self.class_code or "").startswith("03")

    @property
    def is_nvidia(self) -> bool:
        """Whether the vendor is NVIDIA."""
        return self.vendor == "10de"

    @property
    def is_bridge(self) -> bool:
        """Whether this is a PCI-to-PCI bridge (class 0604)."""
        return self.class_code == "0604"


@fast_init
@dataclass(frozen=True)
class Approval:
    """The NVIDIA P2P approval capability in a function's config space.

    ``state``: present, absent, need_root (64 bytes read), device_gone (all ff), not_gpu.
    """

    state: str
    clique: int | None = None
    version: int | None = None
    offset: int | None = None


@dataclass(frozen=True)
class Pci:
    """The PCI functions of the host, keyed by bdf."""

    functions: Fact[Mapping[str, PciFunction]] = NOT_READ
    approvals: Fact[Mapping[str, Approval]] = NOT_READ  # for NVIDIA display functions only
    complete: bool = False  # False for a paste of part of lspci: an absence proves nothing
    unnamed: Fact[tuple[PciFunction, ...]] = NOT_READ  # excerpts of lspci that do not say whose lines they are
    memory_map: Fact[tuple[MemoryRange, ...]] = NOT_READ  # /proc/iomem; without root every address is 0: not read

    def gpus(self) -> tuple[PciFunction, ...]:
        """Return the NVIDIA display functions in bus order."""
        return self._gpus

    @functools.cached_property
    def _gpus(self) -> tuple[PciFunction, ...]:
        functions = self.functions.value or {}
        return tuple(functions[bdf] for bdf in sorted(functions) if functions[bdf].is_gpu)


@dataclass(frozen=True)
class Iommu:
    """IOMMU units, groups and mode."""

    units: Fact[tuple[str, ...]] = NOT_READ  # /sys/class/iommu: dmar0, ivhd0
    groups: Fact[Mapping[str, tuple[str, ...]]] = NOT_READ  # group -> bdfs
    group_types: Fact[Mapping[str, str]] = NOT_READ  # group -> DMA, DMA-FQ, identity
    default_domain: Fact[str] = NOT_READ  # Translated, Passthrough
    technology: Fact[str] = NOT_READ  # DMAR (Intel) or AMD-Vi, as the kernel log announces it
    interrupt_remapping: Fact[bool] = NOT_READ


# --- GPUs, links ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MigInstance:
    """One MIG device. ``profile`` (``3g.40gb``) stands in ``-L``, the memory in ``-q -x``."""

    index: int
    profile: str = ""
    memory_total_mib: int | None = None


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds a GPU. ``gpu``: its bus id, or its index. ``program``: the name without path and arguments.

    ``kind``: C (compute), G (graphics), C+G, M (MPS), or "" where it is not told.
    """

    gpu: str
    pid: int
    kind: str = ""
    program: str = ""
    memory_mib: int | None = None


@dataclass(frozen=True)
class GpuSample:
    """What one GPU did at one moment. ``at_s``: seconds after the first sample, None where nothing tells."""

    gpu: str  # bus id, or index
    at_s: float | None = None
    utilization_percent: int | None = None
    power_w: float | None = None
    sm_clock_mhz: int | None = None
    pstate: str | None = None


@fast_init
@dataclass(frozen=True)
class Gpu:
    """One GPU as ``nvidia-smi`` tells it. A cell that holds no value (``[N/A]``, ``ERR!``) is None here."""

    index: int | None = None
    bus_id: str = ""  # as sysfs writes it: 0000:01:00.0; "" where not told
    name: str = ""
    uuid: str = ""
    memory_total_mib: int | None = None
    memory_used_mib: int | None = None
    bar1_total_mib: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_draw_w: float | None = None
    power_limit_w: float | None = None
    pstate: str | None = None
    link_gen_current: int | None = None
    link_gen_max: int | None = None
    link_width_current: int | None = None
    link_width_max: int | None = None
    persistence: str | None = None  # Enabled, Disabled
    mig: str | None = None  # Enabled, Disabled, None where N/A
    mig_devices: int | None = None
    ecc: str | None = None
    compute_mode: str | None = None
    virtualization_mode: str | None = None  # None, Pass-Through, VGPU, Host VGPU, Host VSGA (as text)
    recovery_action: str | None = None  # None, Reset, Reboot ... (as text)
    gsp_firmware: str | None = None
    device_id: str | None = None  # four hex digits
    link_gen_host_max: int | None = None
    mig_pending: str | None = None
    mig_instances: tuple[MigInstance, ...] = ()
    ecc_pending: str | None = None
    ecc_uncorrected_volatile: int | None = None  # since the last driver load; None where not told or N/A
    ecc_uncorrected_aggregate: int | None = None  # over the GPU's life
    sram_threshold_exceeded: str | None = None  # Yes, No
    retired_pending: str | None = None
    remap_pending: str | None = None
    remap_failed: str | None = None
    channel_repair_pending: str | None = None
    tpc_repair_pending: str | None = None
    unrepairable_memory: str | None = None
    power_limit_default_w: float | None = None
    power_limit_min_w: float | None = None
    power_limit_max_w: float | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    # idle, application_clocks, sw_power_cap, hw_slowdown, hw_thermal, hw_power_brake, sync_boost, sw_thermal, display
    clock_reasons: Mapping[str, bool] = field(default_factory=dict)
    conf_compute_mib: int | None = None  # protected memory
    fabric_state: str | None = None  # Completed, In Progress, Not Started
    fabric_status: str | None = None  # Success, or an error's words
    # Fields that were printed without a value (N/A, ERR!, GPU requires reset). A field that is None and not here was
    # not told at all.
    blank: frozenset[str] = frozenset()
    raw: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topology:
    """``nvidia-smi topo -m``. ``links`` maps (row, column), both directions, to X, NV18, PIX, PXB, PHB, NODE, SYS."""

    gpus: tuple[str, ...] = ()  # GPU0, GPU1 ...
    nics: tuple[str, ...] = ()  # NIC0 or mlx5_0, as the header names them
    nic_names: Mapping[str, str] = field(default_factory=dict)  # the legend: NIC0 -> mlx5_0
    links: Mapping[tuple[str, str], str] = field(default_factory=dict)
    cpu_affinity: Mapping[str, str | None] = field(default_factory=dict)
    numa_affinity: Mapping[str, str | None] = field(default_factory=dict)
    gpu_numa_id: Mapping[str, str | None] = field(default_factory=dict)
    truncated: bool = False


@dataclass(frozen=True)
class P2pMatrix:
    """``nvidia-smi topo -p2p MODE``: (row, column) -> X, OK, CNS, GNS, TNS, NS, DR, U. Rung 0: a claim."""

    mode: str  # r, w, n, a, p, or rw
    gpus: tuple[str, ...] = ()
    cells: Mapping[tuple[str, str], str] = field(default_factory=dict)
    legend: tuple[str, ...] = ()
    truncated: bool = False

    def pairs(self) -> dict[tuple[str, str], str]:
        """Return the cells of different GPUs."""
        return {pair: code for pair, code in self.cells.items() if pair[0] != pair[1]}


# --- virtual machines of a hypervisor -------------------------------------------------------------------------------


@fast_init
@dataclass(frozen=True)
class HostPci:
    """One ``hostpciN`` line of a Proxmox VM: ``paths`` as written, without ``host=``, or a ``mapping``."""

    index: int
    paths: tuple[str, ...] = ()
    mapping: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    line: str = ""
    alias: str = ""  # what QEMU's id is where it is not hostpciN: hostdev0 of a libvirt domain

    @property
    def name(self) -> str:
        """Return what the device is called: hostpci0, or hostdev0 in a libvirt domain."""
        return self.alias or f"hostpci{self.index}"

    def flag(self, name: str) -> bool | None:
        """Return a boolean option (1, on, yes, true), or None where it is not given."""
        value = self.options.get(name)
        return None if value is None else value.lower() in ("1", "on", "yes", "true")

    @property
    def all_functions(self) -> bool:
        """Whether a path names a whole slot (no ``.F``)."""
        return any("." not in path for path in self.paths)


@fast_init
@dataclass(frozen=True)
class VmConfig:
    """One VM: the active part of its file, and what is only pending, saved or really running.

    A libvirt domain comes in the words of a Proxmox file (``settings``, ``hostpci``), so that one rule judges both;
    ``lines`` then hold its XML, verbatim.
    """

    vmid: str  # the Proxmox id, or the name of a libvirt domain
    manager: Literal["proxmox", "libvirt"] = "proxmox"
    whole: bool = False  # the file itself was read, not a paste of it: what it lacks is not set
    settings: Mapping[str, str] = field(default_factory=dict)  # active keys; the last duplicate wins
    lines: Mapping[str, str] = field(default_factory=dict)  # the same keys: the whole line, verbatim
    duplicates: tuple[str, ...] = ()  # keys that occur more than once in the active part
    hostpci: tuple[HostPci, ...] = ()
    pending: Mapping[str, str] | None = None  # [PENDING] section or qm pending "new"; None: unknown
    pending_deletes: tuple[str, ...] = ()
    snapshots: tuple[str, ...] = ()
    description: str = ""  # percent-decoded
    running: Fact[bool] = NOT_READ
    running_arguments: Fact[tuple[str, ...]] = NOT_READ  # /proc/PID/cmdline of the QEMU process, split at NUL
    running_cpus: Fact[str] = NOT_READ  # the CPUs that the process may use: 0-63
    started_at: Fact[int] = NOT_READ  # of that process, seconds since 1970
    changed_at: Fact[int] = NOT_READ  # of the configuration file, seconds since 1970
    planned_arguments: Fact[tuple[str, ...]] = NOT_READ  # qm showcmd: the next start, never what runs
    source: str = ""

    def option(self, key: str, name: str, default_name: str = "") -> str | None:
        """Return one option of a comma list: ``option("cpu", "hidden")``.

        ``default_name`` is the name that the first element has when it is written without one (``cputype``, ``type``).
        """
        raw = self.settings.get(key)
        if raw is None:
            return None
        for position, part in enumerate(raw.split(",")):
            head, equals, tail = part.strip().partition("=")
            if not equals and position == 0 and name == default_name:
                return head
            if equals and head == name:
                return tail
        return None


@dataclass(frozen=True)
class MappingClaim:
    """One ``map`` line of a PCI mapping for this node: where a device is, and what it was when the line was written."""

    mapping: str
    bdfs: tuple[str, ...]
    vendor_device: str = ""  # 10de:2bb5
    iommu_group: int | None = None
    line: str = ""


@fast_init
@dataclass(frozen=True)
class Vm:
    """The virtual machines of a hypervisor, and the files and limits that their settings refer to."""

    configs: Fact[Mapping[str, VmConfig]] = NOT_READ  # vmid -> config
    mappings: Fact[Mapping[str, tuple[str, ...]]] = NOT_READ  # mapping id -> bdfs of this node
    mapping_claims: Fact[tuple[MappingClaim, ...]] = NOT_READ  # what mappings of this node say about their devices
    reservations: Fact[Mapping[str, str]] = NOT_READ  # bdf -> id of the VM that holds it (pci-id-reservations)
    rom_files: Fact[tuple[str, ...]] = NOT_READ  # names in /usr/share/kvm
    vhost_max_mem_regions: Fact[int] = NOT_READ
    start_logs: Fact[Mapping[str, tuple[str, ...]]] = NOT_READ  # vmid -> lines of the newest start's task log
    qemu_replaced: Fact[Mapping[str, bool]] = NOT_READ  # vmid that runs -> QEMU's file changed since its start
    cpu_models: Fact[Mapping[str, Mapping[str, str]]] = NOT_READ  # custom-NAME -> keys of cpu-models.conf
    qemu_version: Fact[str] = NOT_READ
    pve_version: Fact[str] = NOT_READ


# --- driver, packages -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DkmsState:
    """One line of ``dkms status``, or one build failure that a log tells."""

    module: str
    version: str
    kernel: str  # "" where the module is only added
    state: str  # installed, built, added, broken, failed, headers_missing
    note: str = ""  # the WARNING! text, or the log's cause line
    exit_status: int | None = None  # make's, of a failed build
    log: str = ""  # where its make.log lies


@dataclass(frozen=True)
class Package:
    """One installed package (``dpkg``). ``state`` is dpkg's two or three letters: ii, hi, iF, rc."""

    name: str
    version: str
    state: str
    held: bool = False


@dataclass(frozen=True)
class AptChange:
    """One transaction of ``/var/log/apt/history.log`` that touched NVIDIA packages."""

    started: str
    command: str
    changes: tuple[tuple[str, str, str], ...] = ()  # (package, from, to)


@dataclass(frozen=True)
class Unmet:
    """One dependency that apt can't meet: ``package`` needs ``wants`` (``condition``), and gets ``instead``."""

    package: str
    wants: str
    condition: str
    instead: str


@dataclass(frozen=True)
class AptOutput:
    """What runs of apt said: what they can't do, and what they would do by themselves."""

    command: str = ""
    unmet: tuple[Unmet, ...] = ()
    not_found: tuple[str, ...] = ()
    additional: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    new: tuple[str, ...] = ()


@dataclass(frozen=True)
class NvLinks:
    """The NVLinks of one GPU: GB/s by link, None for an inactive one. ``note``: the words that stand there instead."""

    gpu: int
    name: str = ""
    links: Mapping[int, float | None] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class FabricReport:
    """What one piece of text says of the fabric manager. Versions are "" where the text does not name them."""

    version: str = ""
    driver_version: str = ""
    state: str = ""  # active, inactive, failed, not-found, "exited 1"
    nothing_to_do: bool = False  # it found no NVSwitch
    source: str = ""


@fast_init
@dataclass(frozen=True)
class NvidiaSmi:
    """How ``nvidia-smi`` answered.

    ``state``: ok, not_found, no_driver, no_devices, version_mismatch, unknown_error, no_permission, lost_gpu, error.
    """

    state: str
    rc: int | None = None
    message: str = ""
    driver_version: str | None = None
    cuda_version: str | None = None
    library_version: str | None = None
    lost: tuple[str, ...] = ()  # bus ids as printed
    lost_reasons: tuple[str, ...] = ()  # why, one for each of ``lost``


@fast_init
@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver: what runs, what lies on disk, what the packages say."""

    smi: Fact[NvidiaSmi] = NOT_READ
    loaded_version: Fact[str] = NOT_READ  # /proc/driver/nvidia/version
    loaded_flavour: Fact[str] = NOT_READ  # open, proprietary
    module_version: Fact[str] = NOT_READ  # modinfo -F version nvidia
    module_license: Fact[str] = NOT_READ  # modinfo -F license nvidia
    library_version: Fact[str] = NOT_READ  # libnvidia-ml.so.X on disk
    params: Fact[Mapping[str, str]] = NOT_READ  # /proc/driver/nvidia/params
    proc_gpus: Fact[tuple[str, ...]] = NOT_READ  # /proc/driver/nvidia/gpus/*
    dkms: Fact[tuple[DkmsState, ...]] = NOT_READ
    packages: Fact[Mapping[str, Package]] = NOT_READ
    apt_history: Fact[tuple[AptChange, ...]] = NOT_READ
    secure_boot: Fact[str] = NOT_READ  # enabled, disabled, unsupported
    fabric_manager: Fact[tuple[FabricReport, ...]] = NOT_READ
    persistence_daemon: Fact[str] = NOT_READ  # active, inactive, failed, not-found
    attached_gpus: Fact[int] = NOT_READ  # as -q counts them; it may show fewer
    processes: Fact[tuple[GpuProcess, ...]] = NOT_READ
    samples: Fact[tuple[GpuSample, ...]] = NOT_READ  # several readings of one GPU, oldest first
    nvlinks: Fact[tuple[NvLinks, ...]] = NOT_READ
    device_nodes: Fact[tuple[str, ...]] = NOT_READ  # names below /dev
    uvm_hmm_disabled: Fact[bool] = NOT_READ
    runtime_d3: Fact[Mapping[str, str]] = NOT_READ  # bus id -> /proc/driver/nvidia/gpus/*/power
    not_ready: Fact[str] = NOT_READ  # the line in which CUDA says 802, system not yet initialized
    apt: Fact[tuple[AptOutput, ...]] = NOT_READ


@dataclass(frozen=True)
class Setting:
    """One NCCL variable and where it is set."""

    name: str
    value: str
    origin: str  # /etc/nccl.conf, unit NAME, container NAME, process PID


@dataclass(frozen=True)
class Nccl:
    """NCCL settings found, whatever wrote them."""

    settings: Fact[tuple[Setting, ...]] = NOT_READ
    version: Fact[str] = NOT_READ
    logs: Fact[tuple[NcclLog, ...]] = NOT_READ  # NCCL_DEBUG=INFO lines, wherever they stand
    topology: Fact[NcclTopology] = NOT_READ  # what NCCL saw (NCCL_TOPO_DUMP_FILE)
    topology_file: Fact[NcclTopology] = NOT_READ  # what it is told (NCCL_TOPO_FILE, nvidia-topologyd)


# --- services -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Services:
    """The engines of the host: running, configured, or known from their logs."""

    engines: Fact[tuple[Engine, ...]] = NOT_READ
    logs: Fact[tuple[EngineLog, ...]] = NOT_READ
    p2p_caches: Fact[tuple[P2pCache, ...]] = NOT_READ


@dataclass(frozen=True)
class Limits:
    """Limits of the machine itself, or of a shell: what belongs to no engine that is known."""

    values: Fact[Mapping[str, int]] = NOT_READ  # "Max locked memory" ... -> soft limit; -1: unlimited
    shm_bytes: Fact[int] = NOT_READ  # size of /dev/shm
    device_rules: Fact[tuple[str, ...]] = NOT_READ  # a container's cgroup device list


# --- the whole ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Snapshot:
    """One host. ``evidence_index`` maps each source to why it is missing, or to "" where it was read."""

    host: str
    role: Fact[Role] = NOT_READ
    collected_at: str = ""
    privileged: bool | None = None
    machine: Machine = field(default_factory=Machine)
    cpu: Cpu = field(default_factory=Cpu)
    memory: Memory = field(default_factory=Memory)
    kernel: Kernel = field(default_factory=Kernel)
    pci: Pci = field(default_factory=Pci)
    iommu: Iommu = field(default_factory=Iommu)
    gpus: Fact[tuple[Gpu, ...]] = NOT_READ
    topology: Fact[Topology] = NOT_READ
    p2p: Mapping[str, Fact[P2pMatrix]] = field(default_factory=dict)  # by mode: r, w, n, a, p, rw
    vm: Vm = field(default_factory=Vm)
    driver: Driver = field(default_factory=Driver)
    nccl: Nccl = field(default_factory=Nccl)
    services: Services = field(default_factory=Services)
    limits: Limits = field(default_factory=Limits)
    measurements: Mapping[str, tuple[Measurement, ...]] = field(default_factory=dict)  # by kind
    inventory: Mapping[str, str] = field(default_factory=dict)  # what the inventory says: hypervisor, vmid
    evidence_index: Mapping[str, str] = field(default_factory=dict)
    unrecognised: tuple[str, ...] = ()

    def as_dict(self, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return plain JSON types, with the schema name. Kernel log lines are left out: they are in the evidence.

        ``skip``: names of fields, at any depth, that are left out as well.
        """
        shape: dict[str, Any] = {"schema": SNAPSHOT_SCHEMA}
        shape.update(plain(self, skip))
        return shape
