"""Rules F21, F22, F23 and F26: what a guest sees of its GPUs, processors and clocks."""

from __future__ import annotations

from collections.abc import Iterator

from ..core.finding import Fix
from ..core.snapshot import Gpu, PciFunction, Snapshot
from .common import counted, has_no_gpu, listed, log_excerpt
from .gpu_views import clear, excerpt, labels, no_gpu, survey
from .knowledge import number
from .registry import Fleet, Verdict, rule, verdict

_MIB = 1 << 20

# --- F21: BAR1 ------------------------------------------------------------------------------------------------------


@rule(
    "F21",
    "guest-bar1",
    title="The guest can map the whole GPU memory (BAR1)",
    roles=("guest",),
    severity="high",
    looks_at=("nvidia_smi.q", "nvidia_smi.qx", "sysfs.pci", "lspci.vvv"),
    why=(
        "Peers reach a GPU's memory through BAR1; a window smaller than the memory rules out P2P over BAR1. The size "
        "is set on the hypervisor (Resizable BAR in its firmware), not in the guest."
    ),
    restart="reboot",
    automation="never",
    risk="Changes the firmware settings of the hypervisor and restarts it with all its guests.",
    verify="nvidia-smi -q | grep -A1 'BAR1 Memory'",
    sources=("club-3090 pull request 884", "captures of RTX PRO 6000, H100, RTX 5090"),
)
def _bar1(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    found = survey(snapshot, "bar1_total_mib", "memory_total_mib")
    small_mib = number("mmio.smallest_bar1_mib")
    small = [gpu for gpu in found.known if (gpu.bar1_total_mib or 0) <= small_mib]
    short = [gpu for gpu in found.known if gpu not in small and (gpu.bar1_total_mib or 0) < (gpu.memory_total_mib or 0)]
    if small:
        yield verdict(
            "fail",
            f"BAR1 of {labels(small)} has {small[0].bar1_total_mib} MiB: Resizable BAR is off on the hypervisor",
            excerpt(snapshot, small, _bar1_words),
            fix=Fix(
                "Turn on Above 4G Decoding and Resizable BAR in the hypervisor's firmware (no VBIOS update)",
                (
                    "# on the hypervisor, after the change:",
                    "lspci -vvv -d 10de: | grep -A3 'Physical Resizable BAR'   # current size: 32GB and the like",
                ),
            ),
        )
    if short:
        yield verdict(
            "warn",
            f"BAR1 of {labels(short)} is smaller than its memory ({_bar1_words(short[0])})",
            excerpt(snapshot, short, _bar1_words),
            severity="medium",
            fix=Fix(
                "Look at Resizable BAR on the hypervisor: the largest size that the card offers",
                ("lspci -vvv -d 10de: | grep -A3 'Physical Resizable BAR'   # on the hypervisor",),
            ),
        )
    if small or short:
        return
    if found.known:
        yield clear(snapshot, found, "BAR1 covers the whole GPU memory", excerpt(snapshot, found.known, _bar1_words))
    elif has_no_gpu(snapshot):
        yield no_gpu()
    else:
        yield from _bar1_of_bus(snapshot)


def _bar1_of_bus(snapshot: Snapshot) -> Iterator[Verdict]:
    """Judge by the regions on the bus where nvidia-smi did not tell. They hold no memory size to compare with."""
    sizes = {one.bdf: size for one in snapshot.pci.gpus() if (size := _largest_region(one))}
    small = [bdf for bdf, size in sizes.items() if size <= number("mmio.smallest_bar1_mib") * _MIB]
    if small:
        yield verdict(
            "warn",
            f"The largest window of {listed(small)} has {sizes[small[0]] // _MIB} MiB: Resizable BAR seems to be off "
            "on the hypervisor",
            snapshot.pci.functions,
            severity="medium",
            fix=Fix(
                "Turn on Above 4G Decoding and Resizable BAR in the hypervisor's firmware",
                ("lspci -vvv -d 10de: | grep -A3 'Physical Resizable BAR'   # on the hypervisor",),
            ),
        )
    else:
        reason = snapshot.gpus.reason or "nvidia-smi did not tell BAR1 and memory of the GPUs"
        yield verdict("unknown", "Whether BAR1 covers the GPU memory is not known", reason=reason)


def _largest_region(one: PciFunction) -> int:
    sizes = [region.size_bytes or 0 for region in one.regions.values() if region.prefetchable and region.address]
    return max(sizes, default=0)


def _bar1_words(gpu: Gpu) -> str:
    return f"BAR1 {gpu.bar1_total_mib} MiB, memory {gpu.memory_total_mib} MiB"


# --- F22: links -----------------------------------------------------------------------------------------------------


@rule(
    "F22",
    "guest-link-fiction",
    title="PCIe width and speed as a guest sees them",
    roles=("guest",),
    severity="info",
    looks_at=("nvidia_smi.q", "nvidia_smi.query_gpu", "sysfs.pci"),
    why="The port above the GPU is emulated: its width and speed are made up. The real slot is read on the hypervisor.",
    verify="lspci -vvv -s BDF | grep LnkSta   # on the hypervisor, under load (rule C17)",
    sources=("Proxmox qemu-server (x-speed=16)", "HAMi issue 446"),
)
def _link_fiction(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = snapshot.gpus.value or ()
    told = [gpu for gpu in gpus if gpu.link_width_current is not None or gpu.link_gen_current is not None]
    odd = [gpu for gpu in gpus if "link_gen_host_max" in gpu.blank or gpu.link_width_current == 0]
    if told or odd:
        shown = excerpt(snapshot, (told or odd), _link_words)
        why = "; no host side is told" if odd else ""
        yield verdict(
            "info",
            f"Width and speed of {labels(told or odd)} come from emulated ports{why}: read the slots on the hypervisor",
            shown,
        )
    elif has_no_gpu(snapshot):
        yield no_gpu()
    else:
        yield verdict(
            "unknown",
            "What the guest sees of the PCIe links is not known",
            reason=snapshot.gpus.reason or "no GPU told its link",
        )


def _link_words(gpu: Gpu) -> str:
    def shown(value: int | None) -> str:
        return "N/A" if value is None else str(value)

    return (
        f"generation {shown(gpu.link_gen_current)}, host max {shown(gpu.link_gen_host_max)}, "
        f"width {shown(gpu.link_width_current)}"
    )


# --- F23: NUMA ------------------------------------------------------------------------------------------------------


@rule(
    "F23",
    "guest-numa-missing",
    title="A guest with several NUMA nodes knows which one each GPU is on",
    roles=("guest",),
    severity="low",
    looks_at=("sysfs.pci", "lspci.vvv", "numactl"),
    why="Without it an engine cannot keep a GPU's threads and buffers on the GPU's own node.",
    restart="vm_stop_start",
    automation="never",
    risk="Stops the virtual machine; a reboot from inside the guest is not enough.",
    verify="cat /sys/bus/pci/devices/*/numa_node",
    sources=("NCCL issue 1329",),
)
def _numa(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    nodes = snapshot.memory.node_cpus
    gpus = snapshot.pci.gpus()
    if has_no_gpu(snapshot):
        yield no_gpu()
        return
    if nodes.value is None:
        yield verdict("unknown", "How many NUMA nodes the guest has is not known", reason=nodes.reason)
        return
    if len(nodes.value) < 2:
        yield verdict("pass", "The guest has one NUMA node, so no GPU can be far from its processors", nodes)
        return
    told = {gpu.bdf: gpu.numa_node for gpu in gpus if gpu.numa_node is not None}
    lost = [bdf for bdf, node in told.items() if node < 0]
    if lost:
        yield verdict(
            "warn",
            f"The guest has {counted(len(nodes.value), 'NUMA node')}, but does not know the one of {listed(lost)}",
            nodes,
            snapshot.pci.functions,
            fix=Fix(
                "Put each GPU behind a bus of its node (libvirt: pxb-pcie), or pin by what the hypervisor knows",
                (
                    "# Proxmox has no option for it: pin the engine's workers instead, e.g.",
                    "numactl --cpunodebind=N --membind=N ...   # N: the GPU's node on the hypervisor",
                ),
            ),
        )
    elif told and len(told) == len(gpus):
        yield verdict("pass", "The guest knows the NUMA node of each GPU", snapshot.pci.functions)
    else:
        reason = snapshot.pci.functions.reason or "no NUMA node is told for the GPUs"
        yield verdict("unknown", "Which NUMA node the GPUs are on is not known", reason=reason)


# --- F26: clock -----------------------------------------------------------------------------------------------------

_FAST = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen")
_SLOW = ("hpet", "acpi_pm", "jiffies", "pit")


@rule(
    "F26",
    "guest-clock-cpu",
    title="The guest reads a fast clock",
    roles=("guest",),
    severity="low",
    looks_at=("clocksource", "kernel_log"),
    why="hpet and acpi_pm leave the guest at every look at the clock, which engines and NCCL do all the time.",
    restart="reboot",
    automation="never",
    risk="Reboots the guest; a TSC that the kernel called unstable may really be.",
    verify="cat /sys/devices/system/clocksource/clocksource0/current_clocksource",
    sources=("Linux kernel timekeeping documentation",),
)
def _clock(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    clock = snapshot.kernel.clocksource
    if clock.value is None:
        yield verdict("unknown", "Which clock the guest reads is not known", reason=clock.reason)
    elif clock.value in _SLOW:
        yield _slow(snapshot)
    elif clock.value in _FAST:
        yield verdict("pass", f"The guest reads the clock {clock.value}", clock)
    else:
        yield verdict("info", f"The guest reads the clock {clock.value}, which Peerlane has no entry for", clock)


def _slow(snapshot: Snapshot) -> Verdict:
    clock, others = snapshot.kernel.clocksource, snapshot.kernel.clocksources
    fast = [name for name in others.value or () if name in _FAST]
    log = snapshot.kernel.log.value
    said = [line for line in (log.lines if log else ()) if "TSC unstable" in line.text or "tsc unstable" in line.text]
    return verdict(
        "fail",
        f"The guest reads the slow clock {clock.value}" + (f", though {listed(fast)} is there" if fast else ""),
        clock,
        *([log_excerpt(snapshot, said)] if said else []),
        fix=Fix(
            "Choose a fast clock; find out on the hypervisor why the kernel left it",
            (
                f"echo {fast[0] if fast else 'kvm-clock'} > "
                "/sys/devices/system/clocksource/clocksource0/current_clocksource",
                "dmesg | grep -i clocksource",
            ),
        ),
    )
