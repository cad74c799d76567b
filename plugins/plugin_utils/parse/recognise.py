"""Loose text to evidence: which output is this, as people paste it?

Content decides; the command of a shell prompt or the name of the file helps where the content can't tell (the mode of
a peer-to-peer matrix, which file a lone command line came from).
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass

from .signatures import by_content
from .text import lines

# Recognition looks at the head of a text; every known output shows itself there.
_HEAD_CHARACTERS = 64 * 1024

# A Markdown fence, in a list or a quotation too; its info string holds no backtick.
_FENCE = re.compile(r"[ \t>]{0,12}(`{3,}|~{3,})([^`\n]{0,80})$")
# How forums and HTML mark what a terminal printed: [code], <pre><code class="...">.
_OPENS = re.compile(r"[ \t]{0,8}(?:\[code(?:=\w+)?\]|<pre\b[^>\n]{0,80}>(?:<code\b[^>\n]{0,80}>)?)", re.IGNORECASE)
_CLOSES = re.compile(r"\[/code\][ \t]*$|(?:</code>)?</pre>[ \t]*$", re.IGNORECASE)
_TAG = re.compile(r"[ \t]{0,8}</?(?:details|summary|p|br|div|blockquote)\b[^\n]{0,200}$", re.IGNORECASE)
# The words in front of a block that tell its command: "Output of `nvidia-smi topo -p2p r`:", "### lspci -vvv".
_TOLD = re.compile(
    r"(?:^|[`\s>*(])((?:sudo )?(?:nvidia-smi|lspci|dmesg|journalctl|qm|cat|systemd-detect-virt|dkms|numactl|uname)"
    r"(?: [\w./=,:@-]{1,60}){0,8})"
)
# user@host:~# command, [user@host ~]$ command
_PROMPT = re.compile(r"\s{0,8}[\[(]?[\w.-]{1,40}@([\w.-]{1,60})[^#$%>\n]{0,80}[#$%>]\s+(\S.*)$")
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
    """One output: its text, the command that stands in front of it ("" where none does), and where it starts.

    ``line`` counts from 1; 0 where the output is the whole text. ``host`` is the one that the prompt names.
    """

    text: str
    command: str = ""
    line: int = 0
    host: str = ""


@dataclass(frozen=True)
class Recognised:
    """A segment with its source id, or with the reason why it has none."""

    segment: Segment
    source: str = ""
    reason: str = ""


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
    rows = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    blocks = _blocks(rows)
    if not blocks:
        return _split_prompts([row for row in rows if not _TAG.match(row)] if _is_tagged(rows) else rows, 0, "")
    return [segment for start, block, told in blocks for segment in _split_prompts(block, start, told)]


def _is_tagged(rows: list[str]) -> bool:
    return any(row.lstrip()[:9].lower() in ("<details>", "</details") for row in rows)


def _blocks(rows: list[str]) -> list[tuple[int, list[str], str]]:
    """Return the fenced blocks of a Markdown or forum text: (line, rows, command told in front); none: it is no such.

    A fence that is never closed reaches to the end; what a quotation mark stands before loses it.
    """
    blocks: list[tuple[int, list[str], str]] = []
    at, prose = 0, 0
    while at < len(rows):
        row = rows[at]
        fence = _FENCE.match(row) if len(row) < 120 else None
        opens = None if fence else _OPENS.match(row[:200])
        if not fence and not opens:
            at += 1
            continue
        end = at + 1
        if fence:
            while end < len(rows) and not _closes(fence[1], rows[end]):
                end += 1
            block = rows[at + 1 : end]
            if row.lstrip(" \t").startswith(">"):
                block = [re.sub(r"^[ \t]*> ?", "", one) for one in block]
        elif opens:
            end = at
            while end < len(rows) and not _CLOSES.search(rows[end]):
                end += 1
            block = [row[opens.end() :], *rows[at + 1 : end + 1]]
            block[-1] = _CLOSES.sub("", block[-1])
            if opens[0].lstrip().startswith("<"):
                block = [html.unescape(one) for one in block]
        blocks.append((at + 2, block, _told(rows[max(prose, at - 4) : at])))
        at = prose = end + 1
    return blocks


def _closes(fence: str, row: str) -> bool:
    found = _FENCE.match(row) if len(row) < 120 else None
    return bool(found and found[1][0] == fence[0] and len(found[1]) >= len(fence) and not found[2].strip())


def _told(prose: list[str]) -> str:
    """Return the command that the words in front of a block name; the last one."""
    for row in reversed(prose):
        found = _TOLD.search(row[:300])
        if found:
            return found[1].removeprefix("sudo ").rstrip(".,: ")
    return ""


def _split_prompts(rows: list[str], start: int, told: str) -> list[Segment]:
    segments: list[tuple[tuple[str, str], int, list[str]]] = [((told, ""), start, [])]
    for at, row in enumerate(rows):
        command = _prompt(row)
        if command is not None and row.lstrip().startswith("#") and _in_comments(rows, at):
            command = None
        if command is None:
            segments[-1][2].append(row)
        else:
            segments.append((command, max(start, 1) + at, []))
    first, *others = segments
    kept = [first] if any(map(str.strip, first[2])) else []
    return [Segment("\n".join([*part, ""]), command, line, host) for (command, host), line, part in [*kept, *others]]


def _in_comments(rows: list[str], at: int) -> bool:
    """Whether a line above or below starts with ``#`` too: then this is a comment, not root's prompt."""
    return any(row.lstrip().startswith("#") for row in [*rows[max(at - 1, 0) : at], *rows[at + 1 : at + 2]])


def _prompt(row: str) -> tuple[str, str] | None:
    """Return the command that a prompt stands before, with the host that the prompt names."""
    if len(row) > 500:
        return None
    tail = _TAIL_HEADER.match(row)
    if tail:
        return f"cat {tail[1]}", ""
    full = _PROMPT.match(row)
    if full:
        return full[2].strip().removeprefix("sudo "), full[1].rstrip(".:")
    bare = _BARE_PROMPT.match(row)
    return (bare[1].strip(), "") if bare and bare[2] in _COMMANDS else None


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
    if source == "pve.qm_pending" and (told := re.search(r"\bqm pending (\d+)", command)):
        return f"{source}.{told[1]}"
    if source == "pve.running" and "showcmd" in command:
        return "pve.showcmd"
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
    (r"/vhost/parameters/max_mem_regions\b", "vhost.max_mem_regions"),
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
    (r"max[-_.]mem[-_.]regions", "vhost.max_mem_regions"),
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
