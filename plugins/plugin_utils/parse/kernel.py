"""The kernel: its command line, where that is configured, which boot loader applies it, modules and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..core.snapshot import CommandLine
from .platform import boot_tool
from .text import RefusedError, files, lines

_RELEASE_IN_IMAGE = re.compile(r"vmlinuz-(\d\S*)$")
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?(GRUB_[A-Z0-9_]+)(\+?)=(.*)")
_VARIABLE = re.compile(r"\$(?:\{([A-Z0-9_]+)\}|([A-Z0-9_]+))")
_UNAME = re.compile(r"Linux (\S+) (\d+\.\d\S*)")
_PROC_VERSION = re.compile(r"Linux version (\d+\.\d\S*)")
_HOSTNAMECTL = re.compile(r"^\s*Kernel: Linux (\d+\.\d\S*)", re.MULTILINE)
_KERNEL_ROW = re.compile(r"release (\S+)((?: \w+=\w+)*)$")
_LOADED_MODULE = re.compile(r"([A-Za-z0-9_]+)\s+\d+\s+(-?\d+)(?:\s.*)?$")

# grub-mkconfig reads /etc/default/grub and then these, as shell; backups beside them (grub.bak) count for nothing.
_GRUB_FILE = re.compile(r"(?:/etc/default/grub|/etc/default/grub\.d/[^/]+\.cfg|)$")


def command_line(text: str) -> CommandLine:
    """Split a command line as the kernel does: at blanks outside of double quotes, a value behind the first ``=``."""
    tokens = []
    for word in _words(" ".join(lines(text))):
        key, equals, given = word.partition("=")
        bare = given[1:-1] if len(given) > 1 and given[0] == given[-1] == '"' else given
        tokens.append((key.strip('"'), bare if equals else None))
    if not tokens:
        raise RefusedError("is empty")
    return CommandLine(tuple(tokens))


def _words(text: str) -> list[str]:
    words, current, quoted = [], "", False
    for letter in text:
        if letter == '"':
            quoted = not quoted
        if letter.isspace() and not quoted:
            words.append(current)
            current = ""
        else:
            current += letter
    return [word for word in [*words, current] if word]


@dataclass(frozen=True)
class Grub:
    """The settings of GRUB's defaults file, and the kernel options in them (None where no line sets any)."""

    settings: Mapping[str, str]
    kernel: CommandLine | None
    excerpt: str


def grub(text: str) -> Grub:
    """Read ``/etc/default/grub`` and its drop-ins: shell assignments, the last one wins, later ones may extend."""
    settings: dict[str, str] = {}
    rows = []
    for path, part in files(text):
        if not _GRUB_FILE.match(path):
            continue
        for row in part.replace("\\\n", "").split("\n"):
            found = _ASSIGNMENT.match(row)
            if found:
                name, plus, raw = found.groups()
                given = _shell_value(raw, settings)
                settings[name] = settings.get(name, "") + given if plus else given
                if name.startswith("GRUB_CMDLINE_LINUX"):
                    rows.append(row.strip())
    if not settings:
        raise RefusedError("sets nothing (no GRUB_...= line)")
    parts = [settings[name] for name in ("GRUB_CMDLINE_LINUX", "GRUB_CMDLINE_LINUX_DEFAULT") if name in settings]
    # Both set and both empty is a reading: no option is configured.
    kernel = None if not parts else CommandLine() if not "".join(parts).strip() else command_line(" ".join(parts))
    return Grub(settings, kernel, "\n".join(rows))


def _shell_value(raw: str, settings: Mapping[str, str]) -> str:
    raw = raw.strip()
    quote = raw[:1] if raw[:1] in ("'", '"') else ""
    value, escaped = "", False
    for letter in raw[len(quote) :]:
        if escaped:
            value += letter if letter in '"\\$`' else "\\" + letter
            escaped = False
        elif letter == "\\" and quote != "'":
            escaped = True
        elif letter == quote or (not quote and letter.isspace()):
            break
        else:
            value += letter
    if quote == "'":
        return value
    return _VARIABLE.sub(lambda hit: settings.get(hit[1] or hit[2], ""), value)


def etc_cmdline(text: str) -> CommandLine:
    """Read ``/etc/kernel/cmdline``. Comments are dropped."""
    return command_line("\n".join(row for row in lines(text) if not row.lstrip().startswith("#")))


def boot_loader(running: CommandLine | None, boot: str, tool_status: str) -> tuple[str, str] | None:
    """Deduce the boot loader: (``grub`` or ``systemd-boot``, the words that say so).

    The loader's own EFI variable comes first (``boot``), then ``proxmox-boot-tool status``, then what GRUB or
    systemd-boot leave in the running command line.
    """
    info = re.search(r"loader_info:\s*(\S+)", boot)
    if info:
        if info[1].lower().startswith("systemd-boot"):
            return "systemd-boot", info[0]
        if info[1].lower().startswith("grub"):
            return "grub", info[0]
    told = _by_boot_tool(tool_status)
    if told:
        return told
    if running is None:
        return None
    image = running.last("BOOT_IMAGE")
    if image is not None:
        return "grub", f"BOOT_IMAGE={image}"
    initrd = running.last("initrd") or ""
    if "\\" in initrd:
        return "systemd-boot", f"initrd={initrd}"
    root = running.last("root") or ""
    if root.startswith("ZFS=") and running.has("boot"):
        # Proxmox on ZFS and UEFI; its GRUB would have left BOOT_IMAGE=.
        return "systemd-boot", f"root={root} boot={running.last('boot')}, and no BOOT_IMAGE="
    return None


def _by_boot_tool(status: str) -> tuple[str, str] | None:
    """Deduce the loader from ``proxmox-boot-tool status``: GRUB serves a BIOS boot, also where both are set up."""
    try:
        tool = boot_tool(status)
    except RefusedError:
        return None
    loaders = {loader for found in tool.partitions.values() for loader in found}
    shown = next((row.strip() for row in lines(status) if "configured with" in row), "")
    if "grub" in loaders and (tool.booted.startswith("legacy") or loaders == {"grub"}):
        return "grub", shown
    # Set up for both and booted by UEFI, the firmware's own entry decides.
    return ("systemd-boot", shown) if loaders == {"uefi"} else None


def release_of_image(running: CommandLine) -> str | None:
    """Return the release in the name of the booted image: ``BOOT_IMAGE=/boot/vmlinuz-6.8.12-1-pve``."""
    found = _RELEASE_IN_IMAGE.search(running.last("BOOT_IMAGE") or "")
    return found[1] if found else None


def release(text: str) -> str | None:
    """Return the kernel release in the words of ``uname -a``, ``/proc/version`` or ``hostnamectl``, or None."""
    found = _PROC_VERSION.search(text)
    if found:
        return found[1]
    named = _UNAME.search(text)
    if named:
        return named[2]
    listed = _HOSTNAMECTL.search(text)
    return listed[1] if listed else None


def node_name(uname: str) -> str | None:
    """Return the host name in the words of ``uname -a``, or None."""
    found = _UNAME.match(uname.strip())
    return found[1] if found else None


@dataclass(frozen=True)
class InstalledKernel:
    """One line of the source ``kernels``."""

    release: str
    marks: Mapping[str, bool]  # modules, headers, image, running


def installed_kernels(text: str) -> tuple[InstalledKernel, ...]:
    """Read ``release R modules=yes headers=yes image=yes running=yes`` lines."""
    kernels = []
    for row in lines(text):
        found = _KERNEL_ROW.match(row)
        if found:
            marks = dict(word.split("=", 1) for word in found[2].split())
            kernels.append(InstalledKernel(found[1], {name: given == "yes" for name, given in marks.items()}))
    return tuple(kernels)


def loaded_modules(text: str) -> dict[str, int]:
    """Read ``/proc/modules`` or ``lsmod``: name to use count."""
    found = (_LOADED_MODULE.match(row) for row in lines(text))
    return {hit[1]: int(hit[2]) for hit in found if hit and hit[1] != "Module"}


def modprobe_lines(text: str) -> tuple[str, ...]:
    """Return the directives of modprobe files: continued lines joined, comments and file headers dropped."""
    rows: list[str] = []
    for _, part in files(text):
        joined = (" ".join(row.split()) for row in part.replace("\\\n", " ").split("\n"))
        rows.extend(row for row in joined if row and not row.startswith("#"))
    return tuple(rows)


def lockdown(text: str) -> str | None:
    """Return the level between the brackets: ``none [integrity] confidentiality``."""
    found = re.search(r"\[(none|integrity|confidentiality)\]", text)
    return found[1] if found else None
