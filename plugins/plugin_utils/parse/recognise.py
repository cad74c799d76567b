"""Loose text to evidence: which output is this, as people paste it?

Content decides; the command of a shell prompt or the name of the file helps where the content can't tell (the mode of
a peer-to-peer matrix, which file a lone command line came from).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .signatures import by_content
from .text import lines

# Recognition looks at the head of a text; every known output shows itself there.
_HEAD_CHARACTERS = 64 * 1024

# Files that describe other files; their words would pass for outputs.
_SILENT = re.compile(r"readme.*|case\.ya?ml|.*\.(?:ya?ml|json|toml|py|rst)|license.*|changelog.*", re.IGNORECASE)

_FENCE = re.compile(r"\s{0,8}(```+|~~~+)\s*([\w-]*)\s*$")
# user@host:~# command, [user@host ~]$ command
_PROMPT = re.compile(r"\s{0,8}[\[(]?[\w.-]{1,40}@[\w.-]{1,60}[^#$%>\n]{0,80}[#$%>]\s+(\S.*)$")
_BARE_PROMPT = re.compile(r"\s{0,8}[$#]\s+(?:sudo\s+)?(?:LC_ALL=\S+\s+)?((\S+).*)$")
_TAIL_HEADER = re.compile(r"==> (/\S+) <==$")
# Behind a bare `#` only these words make a command: it may as well start a comment.
_COMMANDS = frozenset(
    {
        "apt",
        "apt-get",
        "apt-mark",
        "cat",
        "dkms",
        "dmesg",
        "dpkg",
        "find",
        "grep",
        "head",
        "hostnamectl",
        "journalctl",
        "kvm",
        "ls",
        "lscpu",
        "lsmod",
        "lspci",
        "modinfo",
        "modprobe",
        "mokutil",
        "numactl",
        "nvidia-smi",
        "proxmox-boot-tool",
        "ps",
        "pveversion",
        "qm",
        "systemctl",
        "systemd-detect-virt",
        "tail",
        "uname",
        "update-initramfs",
    }
)


@dataclass(frozen=True)
class Segment:
    """One output: its text, and the command that a prompt in front of it names ("" where none does)."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class Recognised:
    """A segment with its source id, or with the reason why it has none."""

    segment: Segment
    source: str = ""
    reason: str = ""


def is_silent(name: str) -> bool:
    """Whether a file of this name describes others and is passed over without a word."""
    return bool(_SILENT.fullmatch(name))


def recognise(text: str, name: str) -> list[Recognised]:
    """Split a text at prompts, fences and file headers, and name each output in it.

    ``name`` is the file's name ("" for standard input). Prose between Markdown fences is dropped.
    """
    found = []
    for segment in split(text):
        if not segment.text.strip() and not segment.command:
            continue
        sources = sources_of(segment, name)
        if not sources and segment.text.strip():
            found.append(Recognised(segment, reason="no output that Peerlane knows"))
        for source in sources:
            if source == "nvidia_smi.topo_p2p":
                reason = "a peer-to-peer matrix without its mode: put `$ nvidia-smi topo -p2p r` (or w) above it"
                found.append(Recognised(segment, reason=reason))
            else:
                found.append(Recognised(segment, source))
    return found


def split(text: str) -> list[Segment]:
    """Cut a text where a new output starts for certain."""
    rows = text.replace("\r\n", "\n").split("\n")
    fences = [at for at, row in enumerate(rows) if _FENCE.match(row)]
    if len(fences) >= 2:
        blocks = (rows[start + 1 : end] for start, end in zip(fences[::2], fences[1::2], strict=False))
        return [segment for block in blocks for segment in _split_prompts(block)]
    return _split_prompts(rows)


def _split_prompts(rows: list[str]) -> list[Segment]:
    segments: list[tuple[str, list[str]]] = [("", [])]
    for at, row in enumerate(rows):
        command = _prompt(row)
        if command is not None and row.lstrip().startswith("#") and _in_comments(rows, at):
            command = None
        if command is None:
            segments[-1][1].append(row)
        else:
            segments.append((command, []))
    return [Segment("\n".join(part), command) for command, part in segments if command or any(map(str.strip, part))]


def _in_comments(rows: list[str], at: int) -> bool:
    """Whether a line above or below starts with ``#`` too: then this is a comment, not root's prompt."""
    return any(row.lstrip().startswith("#") for row in [*rows[max(at - 1, 0) : at], *rows[at + 1 : at + 2]])


def _prompt(row: str) -> str | None:
    if len(row) > 500:
        return None
    tail = _TAIL_HEADER.match(row)
    if tail:
        return f"cat {tail[1]}"
    full = _PROMPT.match(row)
    if full:
        return full[1].strip().removeprefix("sudo ")
    bare = _BARE_PROMPT.match(row)
    return bare[1].strip() if bare and bare[2] in _COMMANDS else None


def sources_of(segment: Segment, name: str) -> tuple[str, ...]:
    """Return the source ids of an output: none where it is not known, several where several stand in it."""
    rows = lines(segment.text[:_HEAD_CHARACTERS])
    shown = by_content(rows)
    if shown:
        return tuple(_refine(source, segment.command, name.lower()) for source in shown)
    told = _by_command(segment.command) or _by_name(rows, name.lower())
    return (told,) if told else ()


def _refine(source: str, command: str, name: str) -> str:
    """Tell apart what looks alike."""
    if source == "nvidia_smi.topo_p2p":
        asked = re.search(r"-p2p\s+(rw|[rwnap])\b", command)
        named = re.search(r"p2p[-_. ](rw|[rwnap])(?![a-z])", name)
        mode = asked[1] if asked else named[1] if named else ""
        return f"{source}_{mode}" if mode else source
    if source == "proc.cmdline" and (re.search(r"etc[-_. ]kernel", name) or "/etc/kernel/cmdline" in command):
        return "etc.kernel.cmdline"
    if source == "pve.conf":
        stem = name.rpartition(".")[0] or name
        told = re.search(r"/qemu-server/(\d+)\.conf|\bqm config (\d+)", command)
        digits = re.search(r"(?:^|\D)(\d{3,9})(?:\D|$)", stem)
        vmid = (told[1] or told[2]) if told else digits[1] if digits else stem
        return f"pve.conf.{re.sub(r'[^a-z0-9_+-]', '-', vmid).strip('-') or 'pasted'}"
    if source == "modprobe.d" and "modules-load" in name:
        return "modules_load.d"
    return source


# --- by command and by name -----------------------------------------------------------------------------------------

_BY_COMMAND = (
    (r"systemd-detect-virt\s.*(?:-c|--container)\b", "detect_virt.container"),
    (r"systemd-detect-virt\b", "detect_virt.vm"),
    (r"/proc/cmdline\b", "proc.cmdline"),
    (r"/etc/kernel/cmdline\b", "etc.kernel.cmdline"),
    (r"/etc/default/grub\b", "etc.default.grub"),
    (r"/etc/modprobe\.d\b", "modprobe.d"),
    (r"/etc/modules\b", "modules_load.d"),
    (r"/sys/kernel/security/lockdown", "lockdown"),
    (r"apt-mark showhold", "apt.holds"),
    (r"/nccl\.conf\b", "etc.nccl.conf"),
    (r"/sys/class/iommu\b", "sysfs.iommu.units"),
    (r"^(?:dmesg|journalctl -k)\b", "kernel_log"),
    (r"^nvidia-smi topo -m", "nvidia_smi.topo_m"),
    (r"^nvidia-smi nvlink", "nvidia_smi.nvlink_s"),
    (r"^nvidia-smi\b", "nvidia_smi"),
)
_BY_NAME = (
    (r"detect[-_.]?virt.*(?:container|[-_.]c\b)", "detect_virt.container"),
    (r"detect[-_.]?virt", "detect_virt.vm"),
    (r"etc[-_.]kernel[-_.]cmdline", "etc.kernel.cmdline"),
    (r"proc[-_.]cmdline|^cmdline\b", "proc.cmdline"),
    (r"modules[-_.]load|^etc[-_.]modules\b|^modules$", "modules_load.d"),
    (r"nccl\.conf", "etc.nccl.conf"),
    (r"showhold|apt[-_.]holds?", "apt.holds"),
    (r"dmesg|kern(?:el)?[-_.]?log", "kernel_log"),
    (r"(?:nccl|all_?reduce)\S*\.(?:log|txt)$", "nccl.log"),
    (r"(?:vllm|sglang|engine)\S*\.(?:log|txt)$", "engine.log"),
)


def _by_command(command: str) -> str:
    return next((source for pattern, source in _BY_COMMAND if re.search(pattern, command)), "")


def _by_name(rows: list[str], name: str) -> str:
    if not any(rows):
        return ""
    return next((source for pattern, source in _BY_NAME if re.search(pattern, name)), "")
