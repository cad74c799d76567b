"""How each known output shows itself: patterns over the cleaned text, in the order in which they are tried.

To teach Peerlane a new output, add a row here, its parser in this room, and a fact in ``snapshot``. Patterns are
searched line by line (``^`` and ``$`` match at every line); ``\\A`` is the very start.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .nvidia_query import is_query_header
from .proxmox import KNOWN_KEYS


def is_query_csv(text: str) -> bool:
    """Whether the first line is a header of ``nvidia-smi --query-gpu``."""
    head = text.lstrip().partition("\n")[0]
    # The first fields do: a line with all of them is longer than what recognition looks at.
    return "," in head and is_query_header(head.split(",")[:8])


def is_pve_conf(text: str) -> bool:
    """Whether this is a Proxmox VM configuration or part of one: two settings of it, or one passed device."""
    if re.search(r"^hostpci\d+: \S*[0-9a-f]{2}:[0-9a-f]{2}", text, re.MULTILINE):
        return True
    keys = set(re.findall(r"^([a-z][a-z0-9]*):(?: |$)", text, re.MULTILINE))
    device = re.compile(r"(?:hostpci|scsi|net|numa|virtio|ide|usb|serial|efidisk)\d+")
    return len(keys & KNOWN_KEYS) + sum(1 for key in keys if device.fullmatch(key)) >= 2


def is_modprobe(text: str) -> bool:
    """Whether every line that says something is a modprobe directive."""
    rows = [row for row in text.split("\n") if row.strip() and not row.lstrip().startswith("#")]
    directive = re.compile(r"\s*(?:options|blacklist|softdep|install|alias|remove)\s+[\w-]+")
    return bool(rows) and all(directive.match(row) for row in rows)


def is_command_line(text: str) -> bool:
    """Whether this is one kernel command line: it starts with what boot loaders put first, or names a root device."""
    words = text.split()
    if not words or len(words) > 300 or ":" in words[0].partition("=")[0]:
        return False
    if re.match(r"BOOT_IMAGE=|initrd=\S+|root=(?:UUID|PARTUUID|LABEL|ZFS|/dev/)", words[0]):
        return True
    return any(re.match(r"root=(?:UUID=|PARTUUID=|ZFS=|/dev/\S)", word) for word in words)


_LONGEST_ROW = 500

_LINK_CODE = r"(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS)"
_BDF = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"

# What quotes other outputs (engine logs, composed sources) stands before what it quotes.
SIGNATURES: tuple[tuple[str, str | Callable[[str], bool]], ...] = (
    # composed by Peerlane's collector
    ("pve.running", r"^# ==> vm \d+ pid \d+(?: \w+ \S+)* <=="),
    ("libvirt.running", r"^# ==> vm \S+ pid \d+(?: \w+ \S+)* <=="),
    ("libvirt.domains", r"^# ==> /etc/libvirt/qemu/\S+ <==|^[ \t]*<domain(?:status)?\b[^>]*\b(?:type|state)="),
    # QEMU's command line: of the next start, or one a line, or as ps prints it
    ("pve.showcmd", r"\A\s*/usr/bin/kvm \\?$|\A\s*/usr/bin/kvm -id \d+ -name '"),
    ("pve.running", r"^(?:/usr/bin/)?kvm\n-id\n\d+$|^(?:\S+ .{0,200})?/usr/bin/kvm -id \d+ "),
    ("libvirt.running", r"^(?:\S+ .{0,200})?/usr/bin/qemu-system-x86_64 -name guest="),
    ("pve.reservations", r"\A\s*[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] \d+ (?:pid|time):\d+$"),
    ("memory", r"^hugepages \d+ total=|^node \d+ cpus=\S* mem_kib="),
    ("net.cards", r"\A\s*\S+ (?:[0-9a-f]{2}:){5}[0-9a-f]{2}$|^[ \t]+link/ether [0-9a-f:]{17} "),
    ("proc.stat", r"^cpu +\d+ \d+ \d+ \d+|^btime \d+$"),
    ("pve.start_log", r"^# ==> vm \S+ task \d+ <=="),
    ("pve.qemu_binaries", r"^vm \S+ pid \d+ replaced=(?:yes|no)$"),
    ("proc.interrupts", r"\A\s*(?:[A-Z][\w-]* \d+\n)*(?:IR-)?(?:IO-APIC|PCI-MSIX?) \d+(?:\n|\Z)"),
    ("proc.interrupts", r"\A\s*CPU0(?:\s+CPU\d+)*\s*\n\s*\d+:(?:\s+\d+)+\s"),
    ("module_parameters", r"^/sys/module/(?:vfio\w*|iommufd|pcie_aspm)/parameters/\w+:"),
    ("module_parameters", r"^(?:vfio\w*|iommufd|pcie_aspm)\.\w+ \S"),
    ("initramfs", r"^image /boot/\S+ modified \d+$|^(?:usr/)?lib/modules/\S+\.ko(?:\.\w+)?$"),
    ("pve.qm_pending", r"^# ==> qm pending \d+ <=="),
    ("pve.qm_pending", r"^(?:new|del) (?:cpu|machine|args|hostpci\d+|memory|numa\d*|bios|balloon|hugepages)\b"),
    ("pve.qm_pending", r"^cur (?:bios|boot|cores|cpu|machine|memory|meta|ostype|scsihw|smbios1|vmgenid): "),
    ("peerlane.services", r"^# ==> unit \S+ <=="),
    ("etc.default.grub", r"^# ==> /etc/default/grub\S* <=="),
    ("modprobe.d", r"^# ==> /etc/modprobe\.d/\S+ <=="),
    ("modules_load.d", r"^# ==> /etc/modules-load\.d/\S+ <=="),
    ("proc.driver.nvidia.power", r"^# ==> /proc/driver/nvidia/gpus/\S+/power <==|^Runtime D3 status:\s"),
    ("proc.driver.nvidia.gpus", r"^# ==> /proc/driver/nvidia/gpus/"),
    ("nvidia_uvm.parameters", r"^# ==> /sys/module/nvidia_uvm/parameters/"),
    ("clocksource", r"^# ==> /sys/devices/system/clocksource/"),
    ("systemctl.nvidia_units", r"^Id=nvidia-(?:persistenced|fabricmanager)\.service$"),
    ("nvidia_devices", r"\A(?:/dev/nvidia\S+\n)*/dev/nvidia\S+\s*\Z"),
    ("proc.driver.nvidia.gpus", r"^Model:\s.*\n(?:.*\n){0,4}GPU UUID:"),
    ("sysfs.pci", r"^\[[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\]$"),
    ("sysfs.pci", r"^(?:current|max)_link_(?:speed|width):"),
    # nvidia-smi with options
    ("nvidia_smi.qx", r"<nvidia_smi_log\b|<!DOCTYPE nvidia_smi_log"),
    ("nvidia_smi.topo_p2p", r"^[ \t]*GPU\d+[ \t]+(?:.*[ \t])?(?:OK|CNS|GNS|TNS|NS|DR)(?:[ \t]|$)"),
    ("nvidia_smi.topo_m", rf"^[ \t]*GPU\d+[ \t]+{_LINK_CODE}(?:[ \t]|$)"),
    ("nvidia_smi.topo_m", r"^[ \t]*GPU0\b.*CPU Affinity"),
    ("nvidia_smi.compute_apps", r"\A\s*[\w., \[\]]*\b(?:used_gpu_memory|used_memory|process_name)\b.*,"),
    ("nvidia_smi.query_gpu", is_query_csv),
    ("nvidia_smi.q", r"^=+NVSMI LOG=+|^Attached GPUs\s+:"),
    ("nvidia_smi.q", r"^GPU [0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]$"),
    ("nvidia_smi.nvlink_s", r"^[ \t]*Link \d+: (?:[\d.]+ GB/s|<inactive>)|^[ \t]*Nvlink queries are not"),
    ("nvidia_smi.nvlink_s", r"Unable to retrieve N[Vv][Ll]ink information"),
    ("nvidia_smi.dmon", r"^# gpu\s+pwr\s"),
    # engines, their limits and what they stored
    ("engines", r"^# ==> engine pid \d+ <=="),
    ("p2p_caches", r'^# ==> \S*gpu_p2p_access_cache\S* modified \d+ <==|^\s*\{?\s*"\d+->\d+": (?:true|false)'),
    ("docker.inspect", r'"HostConfig": ?\{'),
    ("nccl.topology", r"\A\s*(?:# ==> .*\n)?\s*<system version=|^\s*<cpu numaid="),
    ("proc.limits", r"^Limit\s+Soft Limit\s+Hard Limit|^Max locked memory\s+\S|^max locked memory\s+\("),
    ("df.shm", r"^(?:shm|tmpfs|none)\s+\d\S*\s+\d\S*\s+\d\S*\s+\d+%\s+/dev/shm$"),
    # benchmarks and logs
    ("nccl_tests.json", r'"nccl_version": ?\d+'),
    ("nvbandwidth.json", r'"nvbandwidth" ?: ?\{'),
    ("nccl_tests", r"^# (?:nThread|nccl-tests version|Collective test)|out-of-place\s+in-place"),
    ("p2p_bandwidth_latency", r"P2P Connectivity Matrix|Bandwidth Matrix \(GB/s\)|^Device=\d+ CAN|pciBusID: "),
    ("p2p_bandwidth_latency", r"\bP2P=(?:Disabled|Enabled) .*Matrix|Peer-to-Peer\) GPU Bandwidth Latency Test"),
    ("simple_p2p", r"simpleP2P\b.*Starting|^> Peer access from|^Verification error @|cudaMemcpyPeer / cudaMemcpy"),
    ("simple_p2p", r"^Run kernel on GPU\d, taking source data from GPU\d"),
    ("cuda_samples", r"^Ran \d+ test runs for \d+ executables"),
    ("nvbandwidth", r"^nvbandwidth Version|^memcpy (?:CE|SM) |^SUM \w+_memcpy_"),
    ("systemctl.fabricmanager", r"nv-fabricmanager|nvidia-fabricmanager\.service|fabric manager NVIDIA GPU driver"),
    ("engine.log", r"\bvllm\b.*(?:ERROR|INFO|WARNING|error:)|\b(?:vllm|sglang)\[\d+\]: "),
    ("engine.log", r"\b(?:ERROR|INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d "),
    ("engine.log", r"\[(?:core|engine|launcher)\.py:\d+\]|EngineCore|Application startup|ProcessGroupNCCL|\bTP\d+\]"),
    ("nccl.log", r"\bNCCL (?:INFO|WARN|TRACE|VERSION)\b|^NCCL version \d"),
    ("engine.log", r"^Traceback \(most recent call last\)|^[ \t]*(?:RuntimeError|ValueError): "),
    ("engine.log", r"torch[/.]cuda|^usage: vllm"),
    # kernel and QEMU
    ("kernel_log", r"^\[\s*\d{1,9}\.\d{4,6}\]\s|^<\d>\["),
    ("kernel_log", r"^\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\]"),
    ("kernel_log", r"^(?:[A-Z][a-z]{2} +\d|\d{4}-\d\d).{5,60} kernel: |^NVRM: (?!version)"),
    ("kernel_log", r"\bNVRM: Xid \("),
    ("kernel_log", r"^Kernel is locked down|^modprobe: (?:ERROR|FATAL)"),
    ("kernel_log", r"^dmesg: (?:read kernel buffer|klogctl)|^(?:kern|daemon)\s*:\w+\s*: \["),
    ("kernel_log", r"^\d{4}-\d\d-\d\dT\S+ (?:NVRM|nvidia|pci|vfio|Linux version)"),
    ("qemu.log", r"vfio error: |\bgroup \d+ is not viable|^(?:kvm|qemu-system-\w+): "),
    ("qemu.log", r"\bvfio_(?:container_)?dma_map\("),
    # nvidia-smi without options
    ("nvidia_smi.L", r"^GPU \d+: .* \(UUID: "),
    ("nvidia_smi", r"NVIDIA-SMI \d|^(?:NVIDIA-SMI has failed|Failed to initialize NVML|No devices were found)"),
    ("nvidia_smi", r"^Unable to determine the device handle|nvidia-smi: (?:command )?not found|^\|\s+Processes:"),
    # PCI and IOMMU
    ("iommu.groups", rf"^(?:IOMMU|Iommu|iommu)[ _][Gg][Rr][Oo][Uu][Pp]:? \d+|^\d+\t{_BDF}\t"),
    ("iommu.groups", rf"/iommu_groups/\d+/devices/|^[Gg]roup:? \d+:?(?:$|\s+{_BDF})"),
    ("sysfs.iommu", r"^unit (?:dmar|ivhd|smmu|virtio)\S*$|^group \d+ type \S+ devices"),
    ("lspci.t", r"^[ \t|]*-?\+?-?\[[0-9a-f]{4}:[0-9a-f]{2}\]|^[ \t|]*[+\\]-[0-9a-f]{2}\.[0-7]"),
    ("lspci.vvv", rf"^{_BDF} [A-Z0-9][^:]{{2,60}}: \S"),
    ("lspci.vvv", r"^[ \t]*(?:ACSCtl:\s|LnkSta:\s+Speed|LnkCap:\s|Capabilities: \[)|Physical Resizable BAR"),
    # packages
    ("dkms.status", r"^[\w.+-]+(?:/|, )[\w.+~:-]+, [\w.+~-]+, (?:x86_64|aarch64): (?:built|installed|broken)\b"),
    ("dkms.status", r"^[\w.+-]+(?:/|, )[\w.+~:-]+: (?:added|broken)\b"),
    ("dkms.log", r"kernel headers for kernel \S+ cannot be found|Bad return status for module build"),
    ("dkms.log", r"dkms build -m|^DKMS make\.log for |^Error! .*[Dd][Kk][Mm][Ss]"),
    ("apt.history", r"^Start-Date: "),
    ("apt.output", r"^Reading package lists|^The following .*packages|^E: (?:Unable|Unmet|Package|Sub)"),
    ("apt.output", r" : (?:Pre)?Depends: "),
    ("dpkg", r"^\|\|/ Name\b|^[hi][iFU][ R]{0,2}\s+[a-z0-9][a-z0-9+.-]+(?::\w+)?\s+\d"),
    ("pve.version", r"^(?:proxmox-ve|pve-manager): \d|^pve-manager/\d"),
    ("kvm.version", r"^QEMU emulator version "),
    ("proxmox_boot_tool.status", r"is configured with: (?:uefi|grub)|^System currently booted with"),
    ("mokutil.sb_state", r"^SecureBoot (?:enabled|disabled)|support Secure Boot$|^EFI variables are not supported"),
    # identity, driver files
    ("os_release", r"^(?:PRETTY_NAME|VERSION_ID|VERSION_CODENAME)="),
    ("hostnamectl", r"^[ \t]*Operating System: \S"),
    ("proc.cpuinfo", r"^vendor_id\s*: |^processor\s*: \d+$|^Vendor ID:\s|^Architecture:\s+x86"),
    ("dmi", r"^product_name: |^sys_vendor: "),
    ("proc.driver.nvidia.version", r"^NVRM version: "),
    ("proc.driver.nvidia.params", r"^(?:ResmanDebugLevel|RegistryDwords|EnableGpuFirmware): "),
    ("modinfo.nvidia", r"^filename:\s+\S*/nvidia\S*\.ko|^modinfo: ERROR: Module nvidia"),
    ("proc.version", r"^Linux version \d"),
    ("uname", r"\ALinux \S+ \d+\.\d+\S* "),
    ("boot", r"^efi: (?:yes|no)$"),
    ("kernels", r"^release \S+ \w+="),
    ("nvidia_libraries", r"^\S*/lib(?:nvidia-ml|cuda)\.so\.\d"),
    ("proc.modules", r"^Module\s+Size\s+Used by|^\w+ \d+ \d+ \S+ (?:Live|Loading|Unloading) 0x"),
    # configuration files
    ("etc.default.grub", r"^(?:export )?GRUB_[A-Z_]+\+?="),
    ("pve.mapping.pci", r"^[ \t]+map (?:id|node|path)="),
    ("pve.cpu_models", r"^cpu-model: \S"),
    ("pve.conf", is_pve_conf),
    ("etc.nccl.conf", r"\A(?:#.*\n)*[ \t]*NCCL_[A-Z0-9_]+ ?="),
    ("modprobe.d", is_modprobe),
    ("proc.cmdline", is_command_line),
    ("systemd.unit", r"^\[(?:Service|Unit|Install)\]$"),
    ("launch.script", r"\bvllm serve \S|-m (?:vllm\.entrypoints|sglang\.launch_server)|\bllama-server \S"),
    ("proc.meminfo", r"^MemTotal:\s"),
    ("numactl", r"^available: \d+ nodes"),
    ("cgroup.devices", r"^[abc] \d+:(?:\d+|\*) [rwm]+$"),
    # recognised so that they are not called unknown; no rule reads them yet
    ("proc.iomem", r"^[ \t]*[0-9a-f]{4,16}-[0-9a-f]{4,16} : "),
    ("initramfs.log", r"^update-initramfs: "),
    ("lockdown", r"\A\s*(?:\[none\]|none) (?:\[integrity\]|integrity) "),
)

_MATCHERS = tuple(
    (source, re.compile(how, re.MULTILINE).search if isinstance(how, str) else how) for source, how in SIGNATURES
)


# Outputs that people copy behind each other without a prompt between, as `collect_env` scripts print them too. Their
# parsers find their own part of a text, so one text may serve several. Patterns are strict: none matches a quotation.
_BESIDE = tuple(
    (source, re.compile(pattern, re.MULTILINE))
    for source, pattern in (
        ("nvidia_smi.topo_m", r"^[ \t]*GPU0\b.*CPU Affinity"),
        ("nvidia_smi", r"^\| NVIDIA-SMI \d"),
        ("nvidia_smi.L", r"^GPU \d+: .* \(UUID: GPU-[^)]*\)$(?!\n[ \t]+Link)"),
        ("hostnamectl", r"^[ \t]*Operating System: \S"),
        ("proc.cpuinfo", r"^Vendor ID:\s"),
        ("kernel_log", r"^\[\s*\d{1,9}\.\d{6}\] "),
    )
)


def by_content(rows: list[str]) -> tuple[str, ...]:
    """Return the ids of the sources that these lines show: the first that matches, and what may stand beside it."""
    # Clipped and without blank lines, so that no odd file can make a pattern search for long.
    clean = "\n".join(row[:_LONGEST_ROW] for row in rows if row)
    first = next((source for source, matches in _MATCHERS if matches(clean)), "")
    if first != "nvidia_smi.topo_p2p" and first not in dict(_BESIDE):
        return (first,) if first else ()
    return (first, *(source for source, pattern in _BESIDE if source != first and pattern.search(clean)))
