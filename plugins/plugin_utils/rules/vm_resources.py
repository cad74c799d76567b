"""Rules B17 to B21, B23, H5 and H6: memory, CPUs and emulated ports of a VM that has GPUs passed through."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ..core.finding import Excerpt, Fix
from ..core.snapshot import Fact, Snapshot, VmConfig
from .common import RISK_STOP, counted, has_no_gpu, listed, log_excerpt, log_lines
from .join import guest_of
from .knowledge import number
from .machines import (
    Passed,
    absent,
    change_vm,
    conf_line,
    config_is_whole,
    each_vm,
    gpu_lines,
    gpu_vms,
    memory_mib,
    vcpu_count,
    vm,
    vm_arguments,
    vmid,
)
from .registry import Fleet, Verdict, rule, verdict
from .vm_settings import stop_fix

_GIB = 1 << 30
_MIB_PER_GIB = 1024
_NO_GPU_VM = "no VM configuration has a hostpci line that is a GPU"


def cpu_set(text: str) -> frozenset[int]:
    """Return the CPUs of a list as the kernel and Proxmox write it: ``0-3,8`` or ``0-3;8``. Odd parts are left out."""
    found: set[int] = set()
    for part in text.replace(";", ",").split(","):
        first, dash, last = part.strip().partition("-")
        if first.isdigit() and (last.isdigit() or not dash) and int(last or first) < 1 << 16:
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


# --- B17, B18, H5, H6: memory ---------------------------------------------------------------------------------------


@rule(
    "B17",
    "pve-balloon",
    title="The VM does not balloon memory that its devices pin",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("pve.conf", "libvirt.domains"),
    why=(
        "VFIO pins all of the guest's memory: ballooning saves nothing, and taking memory from a serving guest can "
        "only hurt. Proxmox switches it on by default."
    ),
    restart="vm_stop_start",
    automation="yes",
    risk=RISK_STOP,
    verify="qm config VMID | grep balloon   # balloon: 0",
    sources=("pve-docs qm", "QEMU hw/vfio"),
    without_role=True,
)
@each_vm
def _balloon(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    given = config.settings.get("balloon")
    memory = memory_mib(config)
    if given is None and not config_is_whole(config, "balloon"):
        yield absent(config, "balloon", "Ballooning")
        return
    target = int(given) if given is not None and given.isdigit() else None
    if target == 0:
        yield verdict("pass", f"VM {config.vmid} has no balloon", conf_line(config, "balloon"), subject=vm(config))
        return
    if config.manager == "libvirt" and (target is None or memory is None or target >= memory):
        # libvirt inflates a balloon only when it is told to.
        title = f"VM {config.vmid} has a balloon device that nothing inflates"
        yield verdict("pass", title, conf_line(config, "balloon"), subject=vm(config))
        return
    smaller = target is not None and memory is not None and target < memory
    yield verdict(
        "fail" if smaller else "warn",
        f"VM {config.vmid} may be ballooned down to {target} of its {memory} MiB, which its devices pin"
        if smaller
        else f"VM {config.vmid} has no balloon: 0, although devices are passed to it",
        conf_line(config, "balloon", "memory"),
        subject=vm(config),
        fix=stop_fix(
            "B17",
            config,
            lines,
            "Switch ballooning off",
            f"qm set {vmid(config)} --balloon 0",
            libvirt="<memballoon model='none'/>, and <currentMemory> as large as <memory>",
        ),
    )


@rule(
    "B18",
    "pve-hugepages",
    title="Huge pages of the VM can be had",
    roles=("hypervisor",),
    severity="low",
    looks_at=("pve.conf", "libvirt.domains", "memory"),
    why=(
        "Huge pages spare TLB misses and make the start of a large VM much faster. Proxmox needs numa: 1 for them, and "
        "1 GiB pages can hardly be found once memory is fragmented. No public number shows a gain for serving."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=f"{RISK_STOP} Reserved pages are lost to the host, and reserving them at boot needs a reboot of it.",
    verify="grep HugePages_ /proc/meminfo   # HugePages_Free falls when the VM starts",
    sources=("qemu-server Memory.pm", "pve-docs qm"),
    without_role=True,
)
@each_vm
def _hugepages(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    size = config.settings.get("hugepages")
    if size is None:
        if not config_is_whole(config, "hugepages"):
            yield absent(config, "hugepages", "Huge pages")
        else:
            yield verdict("info", f"VM {config.vmid} uses no huge pages, which is fine for serving", subject=vm(config))
        return
    evidence = conf_line(config, "hugepages", "numa", "memory")
    if config.manager == "proxmox" and config.settings.get("numa", "0") not in ("1", "on", "yes", "true"):
        if "numa" not in config.settings and not config_is_whole(config, "numa"):
            yield absent(config, "numa", "Whether numa is on, which huge pages need,")
            return
        yield verdict(
            "fail",
            f"VM {config.vmid} has hugepages without numa: 1, so it does not start",
            evidence,
            subject=vm(config),
            severity="high",
            fix=stop_fix(
                "B18",
                config,
                lines,
                "Switch NUMA on, or drop the huge pages",
                f"qm set {vmid(config)} --numa 1   # or: qm set {vmid(config)} --delete hugepages",
                libvirt="",
            ),
        )
        return
    pools, memory = snapshot.memory.huge_pages, memory_mib(config)
    if pools.value is None or memory is None:
        yield verdict(
            "unknown",
            f"Whether the huge pages of VM {config.vmid} can be had is not known",
            evidence,
            subject=vm(config),
            reason=pools.reason or "the memory of the VM is not known",
        )
        return
    pool = pools.value.get(1024 * 1024)
    if size == "1024" and config.running.value is not True and (pool is None or pool.free * 1024 < memory):
        yield verdict(
            "warn",
            f"VM {config.vmid} wants {memory // 1024} pages of 1 GiB, and the host has {pool.free if pool else 0} free",
            evidence,
            pools,
            subject=vm(config),
            fix=Fix(
                "Reserve the pages when the host boots, or use hugepages: 2",
                (
                    f"# the host's kernel command line: default_hugepagesz=1G hugepagesz=1G hugepages={memory // 1024}",
                    f"# or: qm set {vmid(config)} --hugepages 2",
                ),
                restart="reboot",
                risk="Reserved pages are lost to the host.",
            ),
        )
        return
    yield verdict("pass", f"VM {config.vmid} has its huge pages", evidence, pools, subject=vm(config))


@rule(
    "H5",
    "thp-ksm",
    title="The host does not look for equal pages in pinned memory",
    roles=("hypervisor",),
    severity="low",
    looks_at=("memory", "pve.conf"),
    why="Pages that VFIO pinned cannot be merged: KSM only burns CPU time on them.",
    automation="ask",
    risk="Other VMs of this host, without passed devices, lose what merging saved them: look at the free memory first.",
    verify="cat /sys/kernel/mm/ksm/run   # 0 or 2",
    sources=("Linux Documentation/admin-guide/mm/ksm.rst",),
)
def _ksm(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if snapshot.vm.configs.known and not any(True for _ in gpu_vms(snapshot)):
        yield verdict("not_applicable", "No VM of this host has a GPU passed through", reason=_NO_GPU_VM)
        return
    run = snapshot.memory.ksm_run
    if run.value is None:
        yield verdict("unknown", "Whether KSM runs is not known", reason=run.reason)
    elif run.value == 1 and snapshot.vm.configs.known:
        yield verdict(
            "warn",
            "KSM runs on this host, although GPUs pin the memory of its VMs",
            run,
            snapshot.memory.ksm_pages_sharing,
            fix=Fix(
                "Stop KSM and unmerge what it merged",
                ("systemctl disable --now ksmtuned", "echo 2 > /sys/kernel/mm/ksm/run"),
            ),
        )
    elif run.value == 1:
        reason = f"KSM runs; whether a VM has a GPU is not known ({snapshot.vm.configs.reason})"
        yield verdict("unknown", "Whether KSM works on pinned memory is not known", run, reason=reason)
    else:
        yield verdict("pass", "KSM does not run", run)


@rule(
    "H6",
    "host-memory-overcommit",
    title="The host has the memory that its GPU VMs pin",
    roles=("hypervisor",),
    severity="high",
    looks_at=("pve.conf", "libvirt.domains", "proc.meminfo", "memory"),
    why=(
        "All memory of a VM with passed devices is pinned from its start on. What is missing then ends in a failed "
        "start (cannot allocate memory), or in the kernel's OOM killer."
    ),
    restart="vm_stop_start",
    automation="never",
    risk=RISK_STOP,
    verify="free -g   # after the start of all VMs",
    sources=("QEMU hw/vfio", "general practice"),
)
def _overcommit(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    configs = snapshot.vm.configs
    if not configs.known:
        yield verdict("unknown", "The VM configurations are not known", reason=configs.reason)
        return
    vms = [config for config in (configs.value or {}).values() if config.hostpci]
    if not vms:
        yield verdict("not_applicable", "No VM of this host has a passed device", reason="no hostpci line in any VM")
        return
    total = snapshot.memory.total_kib
    sizes = {config.vmid: memory_mib(config) for config in vms}
    if total.value is None or any(size is None for size in sizes.values()):
        excerpts = [config for config in vms if sizes[config.vmid] is None]
        reason = total.reason if total.value is None else f"VM {excerpts[0].vmid} is only an excerpt without memory:"
        yield verdict("unknown", "Whether the host's memory is enough for its GPU VMs is not known", reason=reason)
        return
    now = [config for config in vms if config.running.value is not False]
    arc = snapshot.memory.zfs_arc_max_bytes.value or 0
    have, keep = total.value // 1024, number("memory.host_reserve_mib")
    need, everything = (_pinned_mib(snapshot, ones, sizes) + arc // 1024 // 1024 for ones in (now, vms))
    with_arc = f" and {arc // _GIB} GiB of ZFS cache" if arc else ""
    evidence: list[Fact[Any] | Excerpt] = [total, *(conf_line(config, "memory") for config in vms)]
    if need > have - keep:
        yield verdict(
            "fail",
            f"VMs with passed devices{with_arc} want {need // _MIB_PER_GIB} GiB of the host's {have // _MIB_PER_GIB}",
            *evidence,
            fix=Fix(
                f"Leave the host {keep // _MIB_PER_GIB} GiB: give the VMs less memory, or limit the ZFS cache",
                (
                    *(f"# VM {config.vmid} has {sizes[config.vmid]} MiB" for config in vms),
                    *change_vm(
                        "H6", now[0], f"qm set {vmid(now[0])} --memory MIB", libvirt="<memory> and <currentMemory>"
                    ),
                    *(["echo 17179869184 > /sys/module/zfs/parameters/zfs_arc_max   # 16 GiB"] if arc else []),
                ),
            ),
        )
    elif everything > have - keep:
        yield verdict(
            "info",
            f"All VMs with passed devices together want {everything // _MIB_PER_GIB} GiB of {have // _MIB_PER_GIB}: "
            "not all of them can run at a time",
            *evidence,
        )
    else:
        yield verdict(
            "pass",
            f"VMs with passed devices{with_arc} want {need // _MIB_PER_GIB} GiB of {have // _MIB_PER_GIB}",
            *evidence,
        )


def _pinned_mib(snapshot: Snapshot, vms: Sequence[VmConfig], sizes: dict[str, int | None]) -> int:
    """Return what VMs pin. Those with huge pages take from the pool, which is set aside whether they run or not."""
    pools = snapshot.memory.huge_pages.value or {}
    pool = sum(kib * one.total for kib, one in pools.items()) // 1024
    plain = sum(sizes[one.vmid] or 0 for one in vms if "hugepages" not in one.settings)
    return plain + max(pool, sum(sizes[one.vmid] or 0 for one in vms if "hugepages" in one.settings))


# --- B19, B20: where the VM runs ------------------------------------------------------------------------------------


def _gpu_nodes(lines: Sequence[Passed]) -> frozenset[int] | None:
    """Return the NUMA nodes of a VM's GPUs, or None where one of them is not known."""
    nodes = {one.display.numa_node if one.display else None for one in lines}
    known = {node for node in nodes if node is not None and node >= 0}
    return frozenset(known) if len(known) == len(nodes) else None


def _bound_nodes(config: VmConfig) -> frozenset[int]:
    """Return the host nodes that the VM's memory is bound to."""
    cells = [key for key in config.settings if key.startswith("numa") and key[4:].isdigit()]
    return frozenset(itertools.chain.from_iterable(cpu_set(config.option(key, "hostnodes") or "") for key in cells))


@rule(
    "B19",
    "pve-numa",
    title="The VM's memory is on the NUMA nodes of its GPUs",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("pve.conf", "libvirt.domains", "memory", "sysfs.pci"),
    why=(
        "On a host with several NUMA nodes the VM's memory lands anywhere, unless numaN lines bind it. Copies between "
        "a GPU and memory of another node cross the sockets. Proxmox puts all GPUs on one bus, so the guest does not "
        "see their node."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="numastat -p $(cat /run/qemu-server/VMID.pid); numactl -H   # in the guest",
    sources=("qemu-server Memory.pm", "club-3090 discussions 161 and 162"),
    without_role=True,
)
@each_vm
def _numa(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    nodes = snapshot.memory.node_cpus
    if nodes.value is None:
        yield verdict(
            "unknown",
            f"Whether the memory of VM {config.vmid} is near its GPUs is not known",
            subject=vm(config),
            reason=nodes.reason,
        )
        return
    with_cpus = {node: cpu_set(cpus) for node, cpus in nodes.value.items() if cpus}
    if len(with_cpus) < 2:
        yield verdict(
            "not_applicable",
            "The host has a single NUMA node",
            nodes,
            subject=vm(config),
            reason="there is no other node to be far from",
        )
        return
    near = _gpu_nodes(lines)
    if near is None or ("numa" not in config.settings and not config_is_whole(config, "numa")):
        reason = (
            "the NUMA nodes of its GPUs are not known (the firmware may not tell them)"
            if near is None
            else "the configuration is only an excerpt and holds no line numa:"
        )
        title = f"Whether the memory of VM {config.vmid} is near its GPUs is not known"
        yield verdict("unknown", title, nodes, subject=vm(config), reason=reason)
        return
    bound = _bound_nodes(config) if config.settings.get("numa") in ("1", "on", "yes", "true") else frozenset()
    vcpus = vcpu_count(config)
    spans = len(near) > 1 or vcpus > max(len(with_cpus[node]) for node in with_cpus)
    evidence = (conf_line(config, "numa", *sorted(key for key in config.settings if _is_cell(key))), nodes)
    shown = listed([str(node) for node in sorted(near)])
    if bound and near <= bound:
        yield verdict(
            "pass", f"VM {config.vmid} is bound to the node of its GPUs ({shown})", *evidence, subject=vm(config)
        )
    elif bound or spans:
        yield verdict(
            "warn",
            f"The memory of VM {config.vmid} is bound to node {listed([str(one) for one in sorted(bound)])}, its GPUs "
            f"are on {shown}"
            if bound
            else f"VM {config.vmid} has GPUs on node {shown}, and no numaN line binds its memory",
            *evidence,
            subject=vm(config),
            severity="medium",
            fix=stop_fix(
                "B19",
                config,
                lines,
                "Give the VM one NUMA cell for each node of its GPUs",
                *_numa_commands(config, sorted(near)),
                libvirt="a <cell> in <cpu><numa> for each node, and <numatune><memnode cellid='0' nodeset='0'/>",
            ),
        )
    else:
        yield verdict(
            "info",
            f"The memory of VM {config.vmid} is not bound to node {shown} of its GPUs; it fits into one node",
            *evidence,
            subject=vm(config),
        )


def _is_cell(key: str) -> bool:
    return key.startswith("numa") and key[4:].isdigit()


def _numa_commands(config: VmConfig, nodes: Sequence[int]) -> tuple[str, ...]:
    vcpus, memory, count = vcpu_count(config), memory_mib(config), len(nodes)
    if vcpus < count or memory is None:
        return (f"qm set {vmid(config)} --numa 1   # and one numaN line for each of the nodes {nodes}",)
    words = [f"qm set {vmid(config)} --numa 1"]
    for index, node in enumerate(nodes):
        first, last = vcpus * index // count, vcpus * (index + 1) // count - 1
        size = memory // count + (memory % count if index == 0 else 0)
        words.append(f"--numa{index} cpus={first}-{last},hostnodes={node},memory={size},policy=bind")
    return (" ".join(words),)


@rule(
    "B20",
    "pve-vcpu-affinity",
    title="The VM's vCPUs have CPUs of their own, near its GPUs",
    roles=("hypervisor",),
    severity="medium",
    looks_at=("pve.conf", "libvirt.domains", "pve.running", "proc.cpuinfo", "memory", "proc.stat"),
    why=(
        "Each tensor parallel worker spins on a core: a vCPU that has to wait for its turn delays every all-reduce of "
        "all GPUs."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="taskset -pc $(cat /run/qemu-server/VMID.pid)",
    sources=("qemu-server", "club-3090 discussions 161 and 162"),
    without_role=True,
)
@each_vm
def _affinity(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    threads, vcpus = snapshot.cpu.threads, vcpu_count(config)
    guest = guest_of(snapshot, config, fleet)
    steal = guest.machine.steal_percent if guest else None
    evidence = (conf_line(config, "cores", "sockets", "affinity"), threads)
    if threads.value is None or ("cores" not in config.settings and not config_is_whole(config, "cores")):
        yield verdict(
            "unknown",
            f"Whether VM {config.vmid} has CPUs of its own is not known",
            subject=vm(config),
            reason=threads.reason or "the configuration is only an excerpt and holds no line cores:",
        )
        return
    affinity = config.settings.get("affinity") or config.running_cpus.value or ""
    pinned = cpu_set(affinity)
    # A process that may use every CPU is not pinned.
    pinned = pinned if "affinity" in config.settings or len(pinned) < threads.value else frozenset()
    nodes = {node: cpu_set(cpus) for node, cpus in (snapshot.memory.node_cpus.value or {}).items() if cpus}
    near = _gpu_nodes(lines)
    close = frozenset(itertools.chain.from_iterable(nodes.get(node, frozenset()) for node in near or ()))
    suggestion = f"qm set {vmid(config)} --affinity {_ranges(close)}" if close else ""
    problem, state = "", "warn"
    if vcpus > threads.value:
        state, problem = "fail", f"VM {config.vmid} has {vcpus} vCPUs on a host with {threads.value} threads"
        suggestion = f"qm set {vmid(config)} --sockets 1 --cores {max(threads.value - 2, 1)}"
    elif pinned and len(pinned) < vcpus:
        problem = f"VM {config.vmid} has {vcpus} vCPUs on the {len(pinned)} CPUs that its affinity allows"
    elif pinned and close and not pinned & close:
        problem = f"VM {config.vmid} is pinned to CPUs of another node than that of its GPUs"
    elif not pinned and len(nodes) > 1 and close and len(near or ()) == 1 and vcpus <= len(close):
        problem = f"VM {config.vmid} is not pinned to node {next(iter(near or ()))} of its GPUs"
    elif steal is not None and steal.value is not None and steal.value > number("vcpu.steal_percent"):
        problem = f"The vCPUs of VM {config.vmid} waited {steal.value:g} % of the time since its guest booted"
    if problem:
        yield verdict(
            "fail" if state == "fail" else "warn",
            problem,
            *evidence,
            *([config.running_cpus] if config.running_cpus.known else []),
            *([steal] if steal is not None else []),
            subject=vm(config),
            fix=stop_fix(
                "B20",
                config,
                lines,
                "Give the VM no more vCPUs than there are CPUs, near its GPUs",
                suggestion or f"qm set {vmid(config)} --affinity FIRST-LAST   # CPUs near the GPUs, at least {vcpus}",
                libvirt=f"<vcpu>, <cputune><vcpupin vcpu='0' cpuset='...'/>: CPUs {_ranges(close) or 'near the GPUs'}",
            ),
        )
    else:
        yield verdict(
            "pass",
            f"VM {config.vmid} has {vcpus} vCPUs on {threads.value} host threads"
            + (f", pinned to {affinity}" if pinned else ""),
            *evidence,
            subject=vm(config),
        )


def _ranges(cpus: frozenset[int]) -> str:
    ordered = sorted(cpus)
    starts = [one for one in ordered if one - 1 not in cpus]
    ends = [one for one in ordered if one + 1 not in cpus]
    return ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in zip(starts, ends, strict=True)
    )


# --- B21, B23: limits of what is emulated ---------------------------------------------------------------------------


@rule(
    "B21",
    "vhost-regions",
    title="The host's vhost accepts the memory regions of a VM with many GPUs",
    roles=("hypervisor",),
    severity="high",
    looks_at=("vhost.max_mem_regions", "pve.conf", "kernel_log"),
    why=(
        "Each BAR and each memory slot is a region for vhost, which accepts 64 by default. Beyond them the network "
        "card of the VM falls back to slow emulation, or fails."
    ),
    restart="reboot",
    automation="ask",
    risk="Reloading vhost needs all VMs stopped; otherwise reboot the host.",
    verify="cat /sys/module/vhost/parameters/max_mem_regions; journalctl -b | grep vhost_set_mem_table   # none",
    sources=("Linux drivers/vhost/vhost.c", "reports of multi-GPU hosts"),
)
def _vhost(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    refused = log_lines(snapshot, r"vhost_set_mem_table failed: Argument list too long", "vhost_set_mem_table")
    regions, many = snapshot.vm.vhost_max_mem_regions, number("vhost.many_gpus")
    fix = Fix(
        "Raise the limit, and load vhost anew",
        (
            "echo 'options vhost max_mem_regions=256' > /etc/modprobe.d/vhost.conf",
            "# with no VM running: modprobe -r vhost_net vhost && modprobe vhost_net; otherwise reboot the host",
        ),
    )
    if refused:
        yield verdict(
            "fail",
            "vhost refused the memory regions of a VM: its network card is emulated now, or fails",
            log_excerpt(snapshot, refused),
            regions,
            fix=fix,
        )
        return
    if not snapshot.vm.configs.known:
        reason = snapshot.vm.configs.reason or "not collected"
        yield verdict("unknown", "The VM configurations are not known", reason=reason)
        return
    large = [config for config, lines in gpu_vms(snapshot) if len(lines) >= many]
    cut = [one for one in (snapshot.vm.configs.value or {}).values() if not config_is_whole(one, "hostpci~")]
    if not large and cut:
        reason = f"the configuration of VM {cut[0].vmid} is only an excerpt, so hostpci lines may be missing"
        yield verdict("unknown", f"Whether a VM of this host has {many} GPUs or more is not known", reason=reason)
    elif not large:
        yield verdict("pass", f"No VM of this host has {many} GPUs or more", snapshot.vm.configs)
    elif regions.value is None:
        title = "Whether vhost accepts the memory regions of a VM with many GPUs is not known"
        yield verdict("unknown", title, reason=regions.reason)
    elif regions.value <= number("vhost.default_regions"):
        yield verdict(
            "warn",
            f"VM {listed([one.vmid for one in large])} has {many} GPUs or more; vhost accepts {regions.value} regions",
            regions,
            *(conf_line(one, *(line.name for line in gpu_lines(snapshot, one))) for one in large),
            severity="medium",
            fix=fix,
        )
    else:
        yield verdict("pass", f"vhost accepts {regions.value} memory regions", regions)


@rule(
    "B23",
    "pve-port-speed",
    title="The emulated PCIe ports are as fast as the GPUs",
    roles=("hypervisor", "guest"),
    severity="info",
    looks_at=("sysfs.pci", "pve.conf", "pve.running"),
    why=(
        "NCCL takes the smaller of the speeds of device and port. Proxmox gives its ports 16 GT/s, so NCCL rates a "
        "faster GPU as Gen4 when it chooses rings and channels. The physical speed is not touched."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=f"{RISK_STOP} Not tested on GPUs; QEMU 7.2 accepts no more than 16.",
    verify="cat /sys/bus/pci/devices/0000:01:00.0/../max_link_speed   # in the guest",
    sources=("NCCL src/graph/xml.cc", "qemu-server", "measured on QEMU 7.2"),
)
def _port_speed(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if snapshot.role.value == "guest":
        yield _speed_in_guest(snapshot)
    else:
        yield from each_vm(_speed_of_vm)(snapshot, fleet)


def _speed_in_guest(snapshot: Snapshot) -> Verdict:
    functions = snapshot.pci.functions.value or {}
    if has_no_gpu(snapshot):
        return verdict("not_applicable", "This guest has no NVIDIA GPU", reason="no NVIDIA GPU on the PCI bus")
    pairs = [(gpu, functions.get(gpu.parent or "")) for gpu in snapshot.pci.gpus()]
    known = [
        (gpu, gpu.link_max_speed_gt, port.link_max_speed_gt)
        for gpu, port in pairs
        if port is not None and gpu.link_max_speed_gt and port.link_max_speed_gt
    ]
    slow = [(gpu, own, above) for gpu, own, above in known if above < own]
    if slow:
        _, own, above = slow[0]
        return verdict(
            "info",
            f"NCCL rates {counted(len(slow), 'GPU')} of {own:g} GT/s by its port of {above:g} GT/s; the physical "
            "speed is the same",
            Excerpt(
                "sysfs.pci", "\n".join(f"{gpu.bdf} max {own:g}, port {gpu.parent} max {above:g}" for gpu, *_ in slow)
            ),
        )
    if known and len(known) == len(pairs):
        return verdict("pass", "The ports above the GPUs are as fast as they are", snapshot.pci.functions)
    reason = snapshot.pci.functions.reason or "the speed of the GPUs or of the ports above them was not read"
    return verdict("unknown", "Whether the ports slow NCCL's model of the GPUs is not known", reason=reason)


def _speed_of_vm(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    speeds = [one.display.link_max_speed_gt if one.display else None for one in lines]
    known = [speed for speed in speeds if speed is not None]
    words = " ".join([*vm_arguments(config), *(config.running_arguments.value or ())])
    ports = number("pcie.pve_port_gt")
    if "x-speed=32" in words or "x-speed=64" in words:
        yield verdict("pass", f"VM {config.vmid} raises the speed of its ports", subject=vm(config))
    elif config.manager == "libvirt":
        yield verdict(
            "unknown",
            f"The speed of the ports of VM {config.vmid} is not known",
            subject=vm(config),
            reason="libvirt leaves it to QEMU's machine type: read max_link_speed in the guest",
        )
    elif any(speed > ports for speed in known):
        yield verdict(
            "info",
            f"VM {config.vmid} has ports of {ports} GT/s for GPUs of {max(known):g} GT/s: only NCCL's model is slower",
            conf_line(config, *(one.name for one in lines)),
            subject=vm(config),
        )
    elif len(known) == len(lines):
        yield verdict("pass", f"The ports of VM {config.vmid} are as fast as its GPUs", subject=vm(config))
    else:
        yield verdict(
            "unknown",
            f"Whether the ports of VM {config.vmid} are slower than its GPUs is not known",
            subject=vm(config),
            reason=snapshot.pci.functions.reason or "the speed of the passed GPUs was not read",
        )
