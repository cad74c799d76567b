"""Proxmox VE: VM configurations, what is pending, what really runs, mappings, CPU models, versions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from ..core.snapshot import HostPci, MappingClaim, VmConfig
from .text import RefusedError, address, lines, whole_number

_SETTING = re.compile(r"([a-z][a-z0-9_-]{0,40}):(?!//)\s*(.*)")
_SECTION = re.compile(r"\[([^\]]+)\]")
_HOSTPCI = re.compile(r"hostpci(\d{1,2})")
_PENDING_VM = re.compile(r"# ==> qm pending (\d+) <==")
_PENDING_ROW = re.compile(r"(cur|new|del)\s+([a-z][a-z0-9_-]*)(?::\s*(.*))?")
_RUNNING_VM = re.compile(r"# ==> vm (\S+) pid \d+((?: \w+ \S+)*) <==")
_QEMU_PROCESS = re.compile(r"(?:^|[\s/])(?:kvm|qemu-system-x86_64)\s+(?:-id\s+(\d+)\s|-name\s+guest=([^,\s]+))")
_ONE_A_LINE = re.compile(r"^(?:\S*/)?(?:kvm|qemu-system-x86_64)\n-id\n(\d+)$", re.MULTILINE)
_RESERVATION = re.compile(r"(\S+)\s+(\d+)\s+(?:pid|time):(\d+)")
_WRAPPED_AT = 80
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
    for row in _unwrapped(lines(text)):
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
            settings[found[1]] = found[2].strip()
            printed[found[1]] = row
    _, active, printed, repeated = sections[0]
    if not active:
        raise RefusedError("has no `key: value` line before its first section")
    pending = next((dict(settings) for name, settings, _, _ in sections if name == "PENDING"), {} if whole else None)
    if not pending and not whole:
        # Proxmox writes no empty section: this one was cut.
        pending = None
    deletes = _deletes(pending)
    description = "\n".join(comments)
    if "description" in active:
        description = unquote(active["description"])
    return VmConfig(
        vmid=vmid,
        whole=whole,
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


def _unwrapped(rows: list[str]) -> list[str]:
    """Put lines together again that a terminal or a mail program wrapped: Proxmox writes each setting on one line."""
    joined: list[str] = []
    open_line = False
    for row in rows:
        fresh = not row or row.startswith("#") or _SETTING.fullmatch(row) or _SECTION.fullmatch(row.strip())
        if fresh or not open_line:
            joined.append(row)
            open_line = bool(row) and not row.startswith("[")
            last = len(row)
            continue
        # Cut at a fixed column, or between two words.
        joined[-1] += row if last >= _WRAPPED_AT else f" {row.lstrip()}"
        last = len(row)
    return joined


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


@dataclass(frozen=True)
class Process:
    """A running QEMU process, as the collector tells it. Times are seconds since 1970; None where not told."""

    arguments: tuple[str, ...]
    started_at: int | None = None
    changed_at: int | None = None  # the configuration file
    cpus: str = ""


def processes(text: str) -> dict[str, Process]:
    """Read the running QEMU processes by VM id, or by domain name for libvirt.

    From the collector's source (a header for each VM, then one argument a line), from a process list, or from a
    command line that ``tr`` put on several lines.
    """
    rows = lines(text)
    found: dict[str, tuple[dict[str, str], list[str]]] = {}
    current: list[str] | None = None
    for row in rows:
        header = _RUNNING_VM.fullmatch(row.strip()) if row.startswith("# ==> ") else None
        if header:
            words = header[2].split()
            current = found.setdefault(header[1], (dict(zip(words[::2], words[1::2], strict=False)), []))[1]
        elif current is not None and row:
            current.append(row)
    if found:
        return {
            vmid: Process(
                tuple(arguments),
                whole_number(told.get("started")),
                whole_number(told.get("changed")),
                told.get("cpus", ""),
            )
            for vmid, (told, arguments) in found.items()
        }
    joined = "\n".join(rows)
    whole = _ONE_A_LINE.search(joined)
    if whole:
        return {whole[1]: Process(tuple(row for row in joined[whole.start() :].split("\n") if row))}
    return {vmid: Process(arguments) for vmid, arguments in command_lines(text).items()}


def command_lines(text: str) -> dict[str, tuple[str, ...]]:
    """Read QEMU command lines by VM id: of ``ps``, or of ``qm showcmd`` with or without ``--pretty``."""
    joined = "\n".join(lines(text)).replace("\\\n", " ")
    return {
        hit[1] or hit[2]: tuple(_shell_words(row[hit.start() :].strip()))
        for row in joined.split("\n")
        if (hit := _QEMU_PROCESS.search(row))
    }


def reservations(text: str) -> dict[str, str]:
    """Read ``pci-id-reservations``: the PCI address that is held, and the id of the VM that holds it."""
    found = {}
    for row in lines(text):
        hit = _RESERVATION.fullmatch(row.strip())
        bdf = address(hit[1]) if hit else None
        if hit and bdf:
            found[bdf] = hit[2]
    return found


def _shell_words(row: str) -> list[str]:
    try:
        return shlex.split(row)
    except ValueError:
        # An unbalanced quote: a process list prints arguments without their quotes.
        return row.split()


def mapping_claims(text: str, node_names: tuple[str, ...]) -> tuple[MappingClaim, ...]:
    """Read ``/etc/pve/mapping/pci.cfg``: every ``map`` line of this node; a mapping without any comes with no address.

    The file serves the whole cluster. Raises RefusedError where it lists several nodes and none has one of these names.
    Several lines of one mapping are alternatives: a VM gets the first that is free. One line with several paths
    (``;``) is one device with several functions.
    """
    entries: list[tuple[str, MappingClaim]] = []
    ids: list[str] = []
    for row in lines(text):
        bare = row.strip()
        if row and not row[0].isspace() and not bare.startswith("#"):
            ids.append(bare.rpartition(":")[2].strip())
        elif bare.startswith("map ") and ids:
            options = dict(part.split("=", 1) for part in bare[4:].split(",") if "=" in part)
            paths = tuple(bdf for path in options.get("path", "").split(";") if (bdf := address(path)))
            group = whole_number(options.get("iommugroup"))
            claim = MappingClaim(
                ids[-1], paths, options.get("id", "").lower(), None if group is None or group < 0 else group, bare
            )
            entries.append((options.get("node", ""), claim))
    if not ids:
        raise RefusedError("defines no mapping")
    nodes = {node for node, _ in entries}
    if len(nodes) > 1:
        mine = nodes.intersection(node_names)
        if not mine:
            raise RefusedError(f"lists the nodes {', '.join(sorted(nodes))}; which of them this host is, is not known")
        nodes = mine
    here = [claim for node, claim in entries if node in nodes]
    claimed = {claim.mapping for claim in here}
    return (*here, *(MappingClaim(name, ()) for name in dict.fromkeys(ids) if name not in claimed))


def mappings(claims: Iterable[MappingClaim]) -> dict[str, tuple[str, ...]]:
    """Return each mapping with all addresses that it may mean on this node."""
    found: dict[str, tuple[str, ...]] = {}
    for claim in claims:
        found[claim.mapping] = (*found.get(claim.mapping, ()), *claim.bdfs)
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
