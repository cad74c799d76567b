"""What the judges share: passed-through devices, commands to copy, the join of a guest with its hypervisor."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..core.finding import Excerpt, Gain
from ..core.snapshot import CommandLine, Fact, HostPci, LogLine, PciFunction, Snapshot, VmConfig
from .knowledge import gpu_model, version_tuple
from .registry import Fleet

# What a remediation puts at stake beyond its own purpose. A rule appends the notes that touch it to its risk.
SECURITY_NOTES: Mapping[str, str] = {
    "acs_override": "pcie_acs_override and allow_unsafe_interrupts weaken the isolation of guests.",
    "iommu": "iommu=pt or an IOMMU switched off removes the DMA protection of host drivers.",
    "acs": "Without ACS, devices below one switch reach each other unchecked.",
    "forced_p2p": "ForceP2P and the clique only tell software that an untested path works.",
    "mitigations": "mitigations=off is never needed.",
}

RISK_STOP = "Stops the virtual machine; a reboot from inside the guest is not enough."
RISK_RESET = (
    "An RTX 5090 or RTX PRO 6000 Blackwell may not answer after a VM stop until its host is power-cycled (rule C19)."
)

# What a grant that really delivers brought elsewhere.
MENLO_GAIN = Gain("14 -> 0.45", "us copy latency", "Menlo, 8x RTX PRO 6000 in a KVM guest: one site, not repeated here")

VGPU_MODES = ("VGPU", "VF")
FOREIGN_DRIVERS = ("nouveau", "nova_core", "nova", "nova_drm", "nvidiafb")

_SMALL_VM_KEYS = ("smbios1", "vmgenid", "meta")
_DISK_KEY = re.compile(r"(?:scsi|virtio|sata|ide)\d+")


# --- small things ---------------------------------------------------------------------------------------------------


def listed(names: Sequence[str], most: int = 6) -> str:
    """Return ``a, b and c``; past ``most`` names, the rest as a count."""
    shown = list(names[:most])
    if len(names) > most:
        return f"{', '.join(shown)} and {len(names) - most} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown)


def log_excerpt(snapshot: Snapshot, lines: Sequence[LogLine], most: int = 3) -> Excerpt:
    """Return the first of these kernel messages as an excerpt, with the count of the others."""
    shown = [f"{line.stamp} {line.text}".strip() for line in lines[:most]]
    if len(lines) > most:
        shown.append(f"... and {len(lines) - most} more such lines")
    return Excerpt(snapshot.kernel.log.source or "kernel_log", "\n".join(shown))


def log_lines(snapshot: Snapshot, pattern: str) -> tuple[LogLine, ...]:
    """Return the kernel messages that match, or nothing where the log is not known."""
    log = snapshot.kernel.log.value
    return log.matching(pattern) if log else ()


def kernel_version(snapshot: Snapshot) -> tuple[int, ...]:
    """Return the running kernel's version as numbers, empty where it is not known."""
    return version_tuple(snapshot.kernel.release.value or "")


def is_pve_kernel(release: str) -> bool:
    """Whether this kernel release was built by Proxmox."""
    return release.endswith("-pve")


def token(name: str, value: str | None) -> str:
    """Return a kernel command line token as it is written."""
    return name if value is None else f"{name}={value}"


def listed_items(line: CommandLine, key: str) -> tuple[str, ...]:
    """Return all items of a comma list that may be given several times (``pci=a,b pci=c``)."""
    return tuple(item for value in line.all(key) if value for item in value.split(","))


# --- GPUs -----------------------------------------------------------------------------------------------------------


def gpu_count(snapshot: Snapshot) -> Fact[int]:
    """Return how many GPUs the machine surely has, or why that is not known. A cut paste proves no count."""
    if snapshot.pci.functions.known and snapshot.pci.complete:
        return Fact(len(snapshot.pci.gpus()), snapshot.pci.functions.source)
    smi = snapshot.driver.smi.value
    if snapshot.gpus.known and smi is not None and smi.state == "ok":
        return Fact(len(snapshot.gpus.value or ()), snapshot.gpus.source)
    for matrix in snapshot.p2p.values():
        if matrix.value is not None and not matrix.value.truncated:
            return Fact(len(matrix.value.gpus), matrix.source)
    topology = snapshot.topology.value
    if topology is not None and topology.gpus:
        # The header names every GPU, also where rows below it were cut.
        return Fact(len(topology.gpus), snapshot.topology.source)
    reason = snapshot.pci.functions.reason or "the list of PCI devices is only a part"
    return Fact(reason=f"the number of GPUs is not known: {reason}")


def has_no_gpu(snapshot: Snapshot) -> bool:
    """Whether a complete list of PCI functions holds no NVIDIA GPU."""
    return snapshot.pci.functions.known and snapshot.pci.complete and not snapshot.pci.gpus()


def virtual_gpus(snapshot: Snapshot) -> tuple[str, ...]:
    """Return the GPUs that are vGPUs or virtual functions: for them P2P over PCIe does not exist."""
    by_mode = [gpu.bus_id for gpu in snapshot.gpus.value or () if (gpu.virtualization_mode or "").upper() in VGPU_MODES]
    return tuple(dict.fromkeys([*by_mode, *(one.bdf for one in snapshot.pci.gpus() if one.physfn)]))


def stop_risk(gpus: Sequence[PciFunction]) -> str:
    """Say what stopping a VM with these GPUs risks. Unknown GPUs get the warning too."""
    models = [gpu_model(one.device) for one in gpus]
    if models and all(model is not None and not model.stop_start_risk for model in models):
        return RISK_STOP
    return f"{RISK_STOP} {RISK_RESET}"


# --- virtual machines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Passed:
    """One hostpci line with what is known of the device behind it.

    ``functions`` holds the PCI functions that the line passes, as far as they are known. ``gpu`` is None where the
    PCI devices of the host are not known. ``function_count`` is None where more functions may exist than are known.
    """

    line: HostPci
    functions: tuple[PciFunction, ...]
    gpu: bool | None
    function_count: int | None

    @property
    def name(self) -> str:
        """Return the key of the line: hostpci0."""
        return f"hostpci{self.line.index}"

    @property
    def display(self) -> PciFunction | None:
        """Return the GPU function of this line, where it is known."""
        return next((one for one in self.functions if one.is_gpu), None)


def full_bdf(path: str) -> str:
    """Return a PCI path as sysfs writes it: ``01:00`` is ``0000:01:00``."""
    path = path.strip().lower()
    return path if path.count(":") >= 2 else f"0000:{path}"


def passed(snapshot: Snapshot, config: VmConfig) -> tuple[Passed, ...]:
    """Return the hostpci lines of a VM, resolved as far as the evidence goes."""
    return tuple(_resolve(snapshot, line) for line in config.hostpci)


def _resolve(snapshot: Snapshot, line: HostPci) -> Passed:
    paths = line.paths
    if line.mapping:
        paths = (snapshot.vm.mappings.value or {}).get(line.mapping, ())
    known = snapshot.pci.functions.value or {}
    functions: list[PciFunction] = []
    count: int | None = 0
    for path in paths:
        bdf = full_bdf(path)
        if "." in bdf:
            functions += [known[bdf]] if bdf in known else []
            count = None if count is None else count + 1
            continue
        slot = [known[one] for one in sorted(known) if one.rpartition(".")[0] == bdf and not known[one].physfn]
        functions += slot
        # Two listed functions are two at least; a single one proves something only in a complete list.
        sure = snapshot.pci.complete or len(slot) > 1
        count = count + len(slot) if count is not None and sure else None
    if not paths:
        count = None
    if any(one.is_gpu for one in functions):
        gpu: bool | None = True
    elif functions or _never_a_gpu(paths):
        gpu = False
    else:
        gpu = None
    if gpu is None and line.flag("x-vga"):
        gpu = True
    return Passed(line, tuple(functions), gpu, count)


def _never_a_gpu(paths: Sequence[str]) -> bool:
    """A physical GPU is function 0 of its slot: ``0e:10.4`` names something else, such as a network VF."""
    return bool(paths) and all("." in path and not path.endswith(".0") for path in paths)


def gpu_lines(snapshot: Snapshot, config: VmConfig) -> tuple[Passed, ...]:
    """Return the hostpci lines of a VM that are GPUs or may be."""
    return tuple(one for one in passed(snapshot, config) if one.gpu is not False)


def peers_wanted(snapshot: Snapshot, config: VmConfig) -> bool | None:
    """Whether this VM has two GPUs or more, so that P2P matters. None: not known."""
    lines = gpu_lines(snapshot, config)
    sure = sum(one.gpu is True for one in lines)
    if sure >= 2 or len(lines) >= 3 or "gpudirect-clique" in config.settings.get("args", ""):
        return True
    if len(lines) <= 1:
        return False
    return True if sure == 0 else None


def gpu_vms(snapshot: Snapshot) -> Iterator[tuple[VmConfig, tuple[Passed, ...]]]:
    """Yield each VM that has GPUs passed through (or devices that may be GPUs), with those lines."""
    for vmid in sorted(snapshot.vm.configs.value or {}, key=lambda one: (len(one), one)):
        config = (snapshot.vm.configs.value or {})[vmid]
        lines = gpu_lines(snapshot, config)
        if lines:
            yield config, lines


def config_is_whole(config: VmConfig) -> bool:
    """Whether this is a whole file, not an excerpt: Proxmox writes an id line into each one."""
    keys = config.settings
    if any(key in keys for key in _SMALL_VM_KEYS):
        return True
    return "memory" in keys and any(_DISK_KEY.fullmatch(key) for key in keys)


def conf_line(config: VmConfig, *keys: str) -> Excerpt:
    """Return lines of a VM's file as an excerpt; a key that is absent is said to be."""
    lines = [config.lines.get(key, f"(no line {key}:)") for key in keys]
    return Excerpt(config.source or f"pve.conf.{config.vmid}", "\n".join(lines))


def vm(config: VmConfig) -> str:
    """Return the subject of a VM: ``vm 101``."""
    return f"vm {config.vmid}"


def vmid(config: VmConfig) -> str:
    """Return the id for commands; a placeholder where the file name did not tell it."""
    return config.vmid if config.vmid.isdigit() else "VMID"


def change_vm(rule: str, config: VmConfig, *commands: str) -> tuple[str, ...]:
    """Return commands around a change of a VM: backup first, then the new start, then the way back.

    Each rule keeps a backup of its own, so that a second fix does not overwrite the first one's way back.
    """
    number = vmid(config)
    conf = f"/etc/pve/qemu-server/{number}.conf"
    backup = f"/root/{number}.conf.before-{rule}"
    return (
        f"cp -a {conf} {backup}",
        *commands,
        f"qm showcmd {number} --pretty",
        f"qm shutdown {number} && qm start {number}",
        f"# way back: cp {backup} {conf} && qm shutdown {number} && qm start {number}",
    )


def without_option(raw: str, *names: str) -> str:
    """Return a comma list without these options: ``host,hidden=1`` without ``hidden`` is ``host``."""
    return ",".join(part for part in raw.split(",") if part.partition("=")[0].strip() not in names)


def cpu_type(config: VmConfig) -> str | None:
    """Return the CPU type of a VM, or None where the file has no cpu line."""
    return config.option("cpu", "cputype", "cputype")


def split_arguments(raw: str) -> list[str] | None:
    """Split an ``args:`` line as a shell does, or return None where a quote is not closed."""
    try:
        return shlex.split(raw)
    except ValueError:
        return None


@dataclass(frozen=True)
class DeviceSet:
    """One ``-set device.TARGET.NAME=VALUE``. ``suffix`` is ``.0`` where the id was written with a dot."""

    index: int
    suffix: str
    name: str
    value: str


_DEVICE_SET = re.compile(r"device\.hostpci(\d+)(\.\d+)?\.([^=]+)=(.*)")
CLIQUE = "x-nv-gpudirect-clique"


def device_sets(arguments: Sequence[str]) -> tuple[DeviceSet, ...]:
    """Return the ``-set device.hostpciN...`` of QEMU arguments."""
    found = []
    for flag, value in itertools.pairwise(arguments):
        matched = _DEVICE_SET.fullmatch(value) if flag in ("-set", "--set") else None
        if matched:
            found.append(DeviceSet(int(matched[1]), matched[2] or "", matched[3], matched[4]))
    return tuple(found)


def vm_arguments(config: VmConfig) -> list[str]:
    """Return the words of a VM's ``args:`` line; none where it is absent or cannot be split (rule B13 says so)."""
    return split_arguments(config.settings.get("args", "")) or []


def hides_kvm(arguments: Sequence[str]) -> bool:
    """Whether QEMU arguments switch the KVM signature off (``-cpu host,kvm=off``)."""
    return any("kvm=off" in value.split(",") for flag, value in itertools.pairwise(arguments) if flag == "-cpu")


# --- a guest and its hypervisor -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Home:
    """Where a guest runs: the host name of its hypervisor, and its VM there."""

    host: str
    config: VmConfig


def home_of(guest: Snapshot, fleet: Fleet) -> Home | str:
    """Return the hypervisor and VM of a guest, or why they are not known.

    The SMBIOS uuid decides. Without it, a single hypervisor with a single VM that has GPUs is taken.
    """
    hypervisors = [one for one in fleet.values() if one.vm.configs.known and one.host != guest.host]
    if not hypervisors:
        return "its hypervisor is not among the audited hosts"
    uuid = (guest.machine.smbios_uuid.value or "").lower()
    if uuid:
        for host in hypervisors:
            for config in (host.vm.configs.value or {}).values():
                if (config.option("smbios1", "uuid") or "").lower() == uuid:
                    return Home(host.host, config)
    guests = [one for one in fleet.values() if one.role.value == "guest"]
    machines = [(host, config) for host in hypervisors for config, _ in gpu_vms(host)]
    if len(machines) != 1 or len(guests) > 1:
        return "no audited hypervisor has a VM with this guest's SMBIOS uuid"
    host, config = machines[0]
    other = config.option("smbios1", "uuid")
    if uuid and other and other.lower() != uuid:
        return f"VM {config.vmid} of {host.host} has another SMBIOS uuid"
    return Home(host.host, config)


def guest_of(hypervisor: Snapshot, config: VmConfig, fleet: Fleet) -> Snapshot | None:
    """Return the audited guest that runs in this VM, where there is one."""
    for snapshot in fleet.values():
        if snapshot.role.value == "guest":
            home = home_of(snapshot, fleet)
            if isinstance(home, Home) and home.host == hypervisor.host and home.config.vmid == config.vmid:
                return snapshot
    return None
