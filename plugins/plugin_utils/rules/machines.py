"""The virtual machines of a hypervisor: their passed-through devices, and commands to copy."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..core.finding import Excerpt
from ..core.snapshot import HostPci, PciFunction, Snapshot, VmConfig
from ..core.values import fast_init
from .knowledge import number
from .registry import Fleet, Judge, Verdict, verdict
from .views import view

_SMALL_VM_KEYS = ("smbios1", "vmgenid", "meta")
_DISK_KEY = re.compile(r"(?:scsi|virtio|sata|ide)\d+")


@fast_init
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
        """Return the key of the line: hostpci0, or the alias of a libvirt device: hostdev0."""
        return self.line.name

    @functools.cached_property
    def display(self) -> PciFunction | None:
        """Return the GPU function of this line, where it is known."""
        return next((one for one in self.functions if one.is_gpu), None)


def full_bdf(path: str) -> str:
    """Return a PCI path as sysfs writes it: ``01:00`` is ``0000:01:00``."""
    path = path.strip().lower()
    return path if path.count(":") >= 2 else f"0000:{path}"


@view
def passed(snapshot: Snapshot, config: VmConfig) -> tuple[Passed, ...]:
    """Return the hostpci lines of a VM, resolved as far as the evidence goes."""
    return tuple(_resolve(snapshot, line) for line in config.hostpci)


def _resolve(snapshot: Snapshot, line: HostPci) -> Passed:
    if not line.mapping:
        return _located(snapshot, line, line.paths)
    claims = [one for one in snapshot.vm.mapping_claims.value or () if one.mapping == line.mapping]
    if not claims:
        return _located(snapshot, line, (snapshot.vm.mappings.value or {}).get(line.mapping, ()))
    # Alternatives: the VM gets the first that is free. What holds for all of them holds for the one that it gets.
    found = [_located(snapshot, line, one.bdfs) for one in claims]
    gpus, counts = {one.gpu for one in found}, {one.function_count for one in found}
    return Passed(
        line,
        found[0].functions,
        gpus.pop() if len(gpus) == 1 else None,
        counts.pop() if len(counts) == 1 else None,
    )


def _located(snapshot: Snapshot, line: HostPci, paths: Sequence[str]) -> Passed:
    known = snapshot.pci.functions.value or {}
    functions: list[PciFunction] = []
    count: int | None = 0
    for path in paths:
        bdf = full_bdf(path)
        if "." in bdf:
            functions += [known[bdf]] if bdf in known else []
            count = None if count is None else count + 1
            continue
        slot = [known[name] for name in (f"{bdf}.{one}" for one in range(8)) if name in known]
        slot = [one for one in slot if not one.physfn]
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


@view
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


@view
def gpu_vms(snapshot: Snapshot) -> tuple[tuple[VmConfig, tuple[Passed, ...]], ...]:
    """Return each VM that has GPUs passed through (or devices that may be GPUs), with those lines."""
    configs = snapshot.vm.configs.value or {}
    found = ((configs[vmid], gpu_lines(snapshot, configs[vmid])) for vmid in sorted(configs, key=_as_number))
    return tuple((config, lines) for config, lines in found if lines)


def _as_number(vmid: str) -> tuple[int, str]:
    return len(vmid), vmid


def config_is_whole(config: VmConfig, key: str = "") -> bool:
    """Whether this is a whole file, not an excerpt: Proxmox writes an id line into each one.

    With a ``key``: whether that key would stand in what is there. A file is sorted, so one that was cut proves
    nothing about the keys behind its last line.
    """
    if config.whole:
        return True
    keys = config.settings
    if key and not any(other > key for other in keys):
        return False
    if any(key in keys for key in _SMALL_VM_KEYS):
        return True
    return "memory" in keys and any(_DISK_KEY.fullmatch(key) for key in keys)


def conf_line(config: VmConfig, *keys: str) -> Excerpt:
    """Return lines of a VM's file as an excerpt; a key that is absent is said to be."""
    nothing = "(no element for {0})" if config.manager == "libvirt" else "(no line {0}:)"
    lines = [config.lines.get(key) or nothing.format(key) for key in keys]
    return Excerpt(config.source or f"pve.conf.{config.vmid}", "\n".join(lines))


def vm(config: VmConfig) -> str:
    """Return the subject of a VM: ``vm 101``."""
    return f"vm {config.vmid}"


def vmid(config: VmConfig) -> str:
    """Return the id for commands, quoted where a shell needs it; a placeholder where no file told it."""
    if config.manager == "libvirt":
        return shlex.quote(config.vmid)
    return config.vmid if config.vmid.isdigit() else "VMID"


def change_vm(rule: str, config: VmConfig, *commands: str, libvirt: str | Sequence[str] = ()) -> tuple[str, ...]:
    """Return commands around a change of a VM: backup first, then the new start, then the way back.

    Each rule keeps a backup of its own, so that a second fix does not overwrite the first one's way back. ``libvirt``
    says what to change in the XML of a domain, one piece of advice each; ``commands`` are for Proxmox.
    """
    number = vmid(config)
    if config.manager == "libvirt":
        backup = f"/root/{re.sub(r'[^A-Za-z0-9_.-]', '_', config.vmid)}.xml.before-{rule}"
        advice = [libvirt] if isinstance(libvirt, str) else libvirt
        return (
            f"(umask 077; virsh dumpxml --inactive --security-info {number} > {backup})",
            *(f"# {one}" for one in advice),
            f"virsh edit {number}",
            restart_vm(config),
            f"# way back: virsh define {backup} && {restart_vm(config)}",
        )
    conf = f"/etc/pve/qemu-server/{number}.conf"
    backup = f"/root/{number}.conf.before-{rule}"
    return (
        f"cp -a {conf} {backup}",
        *commands,
        f"qm showcmd {number} --pretty",
        restart_vm(config),
        f"# way back: cp {backup} {conf} && {restart_vm(config)}",
    )


def restart_vm(config: VmConfig) -> str:
    """Return the command that gives a VM a new QEMU process."""
    number = vmid(config)
    if config.manager == "libvirt":
        down = f"timeout 300 sh -c \"until virsh domstate {number} | grep -q 'shut off'; do sleep 2; done\""
        return f"virsh shutdown {number} && {down} && virsh start {number}"
    return f"qm shutdown {number} && qm start {number}"


def memory_mib(config: VmConfig) -> int | None:
    """Return the memory of a VM: ``131072`` or ``current=131072``; Proxmox's default where a whole file has none."""
    given = config.option("memory", "current", "current")
    if given is not None:
        return int(given) if given.isdigit() else None
    return number("pve.default_memory_mib") if config_is_whole(config, "memory") else None


def vcpu_count(config: VmConfig) -> int:
    """Return the vCPUs of a VM: cores by sockets, one of each by default."""
    cores, sockets = (config.settings.get(key, "1") for key in ("cores", "sockets"))
    return (int(cores) if cores.isdigit() else 1) * (int(sockets) if sockets.isdigit() else 1)


def without_option(raw: str, *names: str) -> str:
    """Return a comma list without these options: ``host,hidden=1`` without ``hidden`` is ``host``."""
    return ",".join(part for part in raw.split(",") if part.partition("=")[0].strip() not in names)


def cpu_type(config: VmConfig) -> str | None:
    """Return the CPU type of a VM, or None where the file has no cpu line."""
    return config.option("cpu", "cputype", "cputype")


def reports_host_cpu(snapshot: Snapshot, config: VmConfig) -> bool | str:
    """Whether the guest sees the host's CPU, or why that is not known."""
    kind = cpu_type(config)
    if kind is None or not kind.startswith("custom-"):
        return kind == "host"
    if not snapshot.vm.cpu_models.known:
        return f"CPU model {kind} is defined in /etc/pve/virtual-guest/cpu-models.conf, which was not read"
    model = (snapshot.vm.cpu_models.value or {}).get(kind)
    if model is None:
        return f"CPU model {kind} is not in /etc/pve/virtual-guest/cpu-models.conf"
    return model.get("reported-model") == "host"


def split_arguments(raw: str) -> list[str] | None:
    """Split an ``args:`` line as a shell does, or return None where a quote is not closed."""
    words = _split(raw)
    return None if words is None else list(words)


@functools.lru_cache(maxsize=1024)
def _split(raw: str) -> tuple[str, ...] | None:
    try:
        return tuple(shlex.split(raw))
    except ValueError:
        return None


@dataclass(frozen=True)
class DeviceSet:
    """One ``-set device.TARGET.NAME=VALUE``. ``suffix`` is ``.0`` where the id was written with a dot."""

    index: int
    suffix: str
    name: str
    value: str


_DEVICE_SET = re.compile(r"device\.(?:hostpci|hostdev)(\d+)(\.\d+)?\.([^=]+)=(.*)")
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


def dotted(one: Passed) -> bool | None:
    """Whether QEMU knows this line's device as ``hostpciN.0``; None where the count of functions is not known."""
    if one.function_count is not None:
        return one.function_count > 1
    return None if one.line.mapping or one.line.all_functions else False


def with_function(one: Passed) -> str:
    """Return the value of a hostpci line that names function 0."""
    head, comma, rest = one.line.line.partition(":")[2].strip().partition(",")
    return f"{head.split(';')[0]}.0{comma}{rest}" if "." not in head else f"{head.split(';')[0]}{comma}{rest}"


def runs_as_asked(config: VmConfig) -> bool:
    """Whether every word of the ``args:`` line is on the command line of the running process, in order."""
    wanted = vm_arguments(config)
    running = list(config.running_arguments.value or ())
    if not wanted:
        return True
    return any(running[start : start + len(wanted)] == wanted for start in range(len(running) - len(wanted) + 1))


VmJudge = Callable[[Snapshot, Fleet, VmConfig, tuple[Passed, ...]], Iterable[Verdict]]


def each_vm(judge_vm: VmJudge) -> Judge:
    """Make a judge of a host from a judge of one VM with GPUs."""

    def judge(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
        configs = snapshot.vm.configs
        if not configs.known:
            yield verdict("unknown", "The VM configurations are not known", reason=configs.reason or "not collected")
            return
        found = False
        for config, lines in gpu_vms(snapshot):
            found = True
            yield from judge_vm(snapshot, fleet, config, lines)
        if not found:
            yield verdict(
                "not_applicable",
                "No VM of this host has a GPU passed through",
                reason="no VM configuration has a hostpci line that is a GPU",
            )

    return judge


def absent(config: VmConfig, key: str, what: str) -> Verdict:
    """Say that a key is not in an excerpt of a file, which proves nothing."""
    return verdict(
        "unknown",
        f"{what} of VM {config.vmid} is not known",
        subject=vm(config),
        reason=f"the configuration is only an excerpt and holds no line {key}:",
    )


def display_functions(lines: Sequence[Passed]) -> list[PciFunction]:
    """Return the GPU functions of these lines, as far as they are known."""
    return [one.display for one in lines if one.display is not None]
