"""Proxmox VE: VM configurations, what is pending, what really runs, mappings, CPU models, versions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from ..core.snapshot import HostPci, VmConfig
from .text import RefusedError, address, lines

_SETTING = re.compile(r"([a-z][a-z0-9_-]{0,40}):(?:\s+(.*))?")
_SECTION = re.compile(r"\[([^\]]+)\]")
_HOSTPCI = re.compile(r"hostpci(\d{1,2})")
_PENDING_VM = re.compile(r"# ==> qm pending (\d+) <==")
_PENDING_ROW = re.compile(r"(cur|new|del)\s+([a-z][a-z0-9_-]*)(?::(?:\s+(.*))?)?")
_RUNNING_VM = re.compile(r"# ==> vm (\d+) pid (\d+) <==")
_QEMU_PROCESS = re.compile(r"(?:^|[\s/])(?:kvm|qemu-system-x86_64)\s+-id\s+(\d+)\s")
_CPU_MODEL = re.compile(r"cpu-model:\s*(\S+)")

# Settings that hardly any other file has: enough to know a configuration by.
KNOWN_KEYS = frozenset(
    {
        "affinity",
        "agent",
        "args",
        "balloon",
        "bios",
        "boot",
        "cores",
        "cpu",
        "description",
        "efidisk0",
        "hookscript",
        "hugepages",
        "localtime",
        "machine",
        "memory",
        "meta",
        "name",
        "numa",
        "onboot",
        "ostype",
        "parent",
        "scsihw",
        "smbios1",
        "sockets",
        "tablet",
        "tpmstate0",
        "vga",
        "vmgenid",
    }
)


def conf(vmid: str, text: str, source: str, whole: bool = False) -> VmConfig:
    """Read ``/etc/pve/qemu-server/VMID.conf`` or part of it.

    Only the lines before the first section are active. Comment lines are the description, percent-encoded, and never
    settings. ``whole``: the text is the file itself, so a missing [PENDING] section says that nothing is pending.
    """
    sections: list[tuple[str, dict[str, str], dict[str, str], list[str]]] = [("", {}, {}, [])]
    comments: list[str] = []
    for row in lines(text):
        section = _SECTION.fullmatch(row.strip())
        if section:
            sections.append((section[1], {}, {}, []))
            continue
        name, settings, printed, repeated = sections[-1]
        if row.startswith("#"):
            if not name:
                comments.append(unquote(row[1:]))
            continue
        found = _SETTING.fullmatch(row)
        if found:
            if found[1] in settings:
                repeated.append(found[1])
            settings[found[1]] = (found[2] or "").strip()
            printed[found[1]] = row
    _, active, printed, repeated = sections[0]
    if not active:
        raise RefusedError("has no `key: value` line before its first section")
    pending = next((dict(settings) for name, settings, _, _ in sections if name == "PENDING"), {} if whole else None)
    deletes = _deletes(pending)
    description = "\n".join(comments)
    if "description" in active:
        description = unquote(active["description"])
    return VmConfig(
        vmid=vmid,
        settings=active,
        lines=printed,
        duplicates=tuple(dict.fromkeys(repeated)),
        hostpci=hostpci(active, printed),
        pending=pending,
        pending_deletes=deletes,
        snapshots=tuple(name for name, *_ in sections[1:] if name != "PENDING" and not name.startswith("special:")),
        description=description,
        source=source,
    )


def _deletes(pending: dict[str, str] | None) -> tuple[str, ...]:
    """Take ``delete: a,b`` out of a pending section. A leading ``!`` means: by force."""
    names = (pending or {}).pop("delete", "") if pending else ""
    return tuple(name.strip().lstrip("!") for name in names.split(",") if name.strip())


def hostpci(settings: Mapping[str, str], printed: Mapping[str, str]) -> tuple[HostPci, ...]:
    """Read the ``hostpciN`` settings: ``[host=]BDF[;BDF],pcie=1`` or ``mapping=ID,pcie=1``, in order of N."""
    found = []
    for key, given in settings.items():
        named = _HOSTPCI.fullmatch(key)
        if not named:
            continue
        options: dict[str, str] = {}
        paths: tuple[str, ...] = ()
        for position, part in enumerate(given.split(",")):
            name, equals, value = part.strip().partition("=")
            if equals and name != "host":
                options[name] = value
            elif equals or position == 0:
                paths = tuple(one.strip() for one in (value if equals else name).split(";") if one.strip())
        found.append(HostPci(int(named[1]), paths, options.pop("mapping", ""), options, printed.get(key, "")))
    return tuple(sorted(found, key=lambda one: one.index))


@dataclass(frozen=True)
class Pending:
    """What ``qm pending`` prints for one VM."""

    current: Mapping[str, str]
    new: Mapping[str, str]
    deletes: tuple[str, ...]


def qm_pending(text: str) -> dict[str, Pending]:
    """Read ``qm pending``, one block for each VM. A single block without a header comes under the id ""."""
    blocks: dict[str, list[tuple[str, str, str]]] = {}
    vmid = ""
    for row in lines(text):
        header = _PENDING_VM.fullmatch(row.strip())
        if header:
            vmid = header[1]
            blocks.setdefault(vmid, [])
            continue
        found = _PENDING_ROW.fullmatch(row)
        if found:
            blocks.setdefault(vmid, []).append((found[1], found[2], (found[3] or "").strip()))
    return {
        vmid: Pending(
            current={key: given for kind, key, given in rows if kind == "cur"},
            new={key: given for kind, key, given in rows if kind == "new"},
            deletes=tuple(key for kind, key, _ in rows if kind == "del"),
        )
        for vmid, rows in blocks.items()
    }


def running(text: str) -> dict[str, tuple[str, ...]]:
    """Read the arguments of running QEMU processes by VM id.

    From the source ``pve.running`` (a header for each VM, then one argument a line), or from a process list or a
    command line on one or more lines (``ps``, ``qm showcmd --pretty``).
    """
    rows = lines(text)
    found: dict[str, list[str]] = {}
    current: list[str] | None = None
    for row in rows:
        header = _RUNNING_VM.fullmatch(row.strip())
        if header:
            current = found.setdefault(header[1], [])
        elif current is not None and row:
            current.append(row)
    if found:
        return {vmid: tuple(arguments) for vmid, arguments in found.items()}
    joined = "\n".join(rows).replace("\\\n", " ")
    return {
        hit[1]: tuple(_shell_words(row[hit.start() :].strip()))
        for row in joined.split("\n")
        if (hit := _QEMU_PROCESS.search(row))
    }


def _shell_words(row: str) -> list[str]:
    try:
        return shlex.split(row)
    except ValueError:
        # An unbalanced quote: a process list prints arguments without their quotes.
        return row.split()


def mappings(text: str, node_names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Read ``/etc/pve/mapping/pci.cfg``: mapping id to the addresses on this node.

    The file serves the whole cluster. Raises RefusedError where it lists several nodes and none has one of these names.
    """
    entries: list[tuple[str, str, tuple[str, ...]]] = []
    ids: list[str] = []
    for row in lines(text):
        bare = row.strip()
        if row and not row[0].isspace() and not bare.startswith("#"):
            ids.append(bare.rpartition(":")[2].strip())
        elif bare.startswith("map ") and ids:
            options = dict(part.split("=", 1) for part in bare[4:].split(",") if "=" in part)
            paths = tuple(bdf for path in options.get("path", "").split(";") if (bdf := address(path)))
            entries.append((ids[-1], options.get("node", ""), paths))
    if not ids:
        raise RefusedError("defines no mapping")
    nodes = {node for _, node, _ in entries}
    if len(nodes) > 1:
        mine = nodes.intersection(node_names)
        if not mine:
            raise RefusedError(f"lists the nodes {', '.join(sorted(nodes))}; which of them this host is, is not known")
        nodes = mine
    found: dict[str, tuple[str, ...]] = dict.fromkeys(ids, ())
    for name, node, paths in entries:
        if node in nodes:
            found[name] += paths
    return found


def cpu_models(text: str) -> dict[str, Mapping[str, str]]:
    """Read ``cpu-models.conf``: ``custom-NAME`` to the keys of that model."""
    models: dict[str, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for row in lines(text):
        header = _CPU_MODEL.fullmatch(row.strip())
        if header:
            name = header[1] if header[1].startswith("custom-") else f"custom-{header[1]}"
            current = models.setdefault(name, {})
        elif current is not None and row[:1].isspace():
            key, _, given = row.strip().partition(" ")
            current[key] = given.strip()
    return dict(models)


def pve_version(text: str) -> str | None:
    """Return the version of the package pve-manager in the words of ``pveversion`` with or without ``-v``."""
    found = re.search(r"pve-manager[:/]\s*(\d[\w.~+-]*)", text)
    return found[1] if found else None


def running_kernel(text: str) -> str | None:
    """Return the kernel that ``pveversion -v`` says is running."""
    found = re.search(r"running kernel: ([^)\s]+)", text)
    return found[1] if found else None


def qemu_version(text: str) -> str | None:
    """Return QEMU's version in the words of ``kvm --version`` or ``pveversion -v``: ``10.1.2``."""
    found = re.search(r"(?:QEMU emulator version |pve-qemu-kvm:\s*)(\d{1,3}(?:\.\d{1,3}){1,3})", text)
    return found[1] if found else None
