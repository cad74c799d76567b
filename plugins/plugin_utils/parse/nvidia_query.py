"""What ``nvidia-smi`` tells of each GPU: ``-q`` as text, ``-q -x`` as XML, ``--query-gpu`` as CSV."""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from xml.parsers import expat

from ..core.snapshot import Gpu, GpuProcess, GpuSample, MigInstance
from .nvidia_values import flag, mode, number, program, seconds, value, whole
from .text import RefusedError, address, lines, rejoined

_BLOCK = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])")
_UNIT = re.compile(r"\s*\[[^\]]*\]$")
_FIELD = re.compile(r"[a-z][A-Za-z0-9_.]*")

# Where each field of a Gpu stands: paths of -q, element paths of -q -x, field names of --query-gpu. First hit wins.
_PLACES: dict[str, tuple[str, ...]] = {
    "name": ("Product Name", "product_name", "name", "gpu_name"),
    "uuid": ("GPU UUID", "uuid", "gpu_uuid"),
    "memory_total_mib": ("FB Memory Usage/Total", "fb_memory_usage/total", "memory.total"),
    "memory_used_mib": ("FB Memory Usage/Used", "fb_memory_usage/used", "memory.used"),
    "bar1_total_mib": ("BAR1 Memory Usage/Total", "bar1_memory_usage/total"),
    "utilization_percent": ("Utilization/GPU", "Utilization/Gpu", "utilization/gpu_util", "utilization.gpu"),
    "temperature_c": ("Temperature/GPU Current Temp", "temperature/gpu_temp", "temperature.gpu"),
    "power_draw_w": (
        "GPU Power Readings/Power Draw",
        "GPU Power Readings/Average Power Draw",
        "GPU Power Readings/Instantaneous Power Draw",
        "Power Readings/Power Draw",
        "gpu_power_readings/power_draw",
        "gpu_power_readings/average_power_draw",
        "gpu_power_readings/instant_power_draw",
        "power_readings/power_draw",
        "power.draw",
    ),
    "power_limit_w": (
        "GPU Power Readings/Current Power Limit",
        "Power Readings/Current Power Limit",
        "Power Readings/Power Limit",
        "gpu_power_readings/current_power_limit",
        "power_readings/power_limit",
        "power.limit",
    ),
    "pstate": ("Performance State", "performance_state", "pstate"),
    "link_gen_current": (
        "PCI/GPU Link Info/PCIe Generation/Current",
        "pci/pci_gpu_link_info/pcie_gen/current_link_gen",
        "pcie.link.gen.current",
    ),
    "link_gen_max": (
        "PCI/GPU Link Info/PCIe Generation/Max",
        "pci/pci_gpu_link_info/pcie_gen/max_link_gen",
        "pcie.link.gen.max",
    ),
    "link_width_current": (
        "PCI/GPU Link Info/Link Width/Current",
        "pci/pci_gpu_link_info/link_widths/current_link_width",
        "pcie.link.width.current",
    ),
    "link_width_max": (
        "PCI/GPU Link Info/Link Width/Max",
        "pci/pci_gpu_link_info/link_widths/max_link_width",
        "pcie.link.width.max",
    ),
    "link_gen_host_max": (
        "PCI/GPU Link Info/PCIe Generation/Host Max",
        "pci/pci_gpu_link_info/pcie_gen/max_host_link_gen",
        "pcie.link.gen.hostmax",
    ),
    "persistence": ("Persistence Mode", "persistence_mode"),
    "mig": ("MIG Mode/Current", "mig_mode/current_mig", "mig.mode.current"),
    "mig_pending": ("MIG Mode/Pending", "mig_mode/pending_mig", "mig.mode.pending"),
    "ecc": ("ECC Mode/Current", "Ecc Mode/Current", "ecc_mode/current_ecc", "ecc.mode.current"),
    "ecc_pending": ("ECC Mode/Pending", "Ecc Mode/Pending", "ecc_mode/pending_ecc", "ecc.mode.pending"),
    "sram_threshold_exceeded": (
        "ECC Errors/Aggregate/SRAM Threshold Exceeded",
        "ecc_errors/aggregate/sram_threshold_exceeded",
        "ecc.errors.uncorrected.aggregate.sram.thresholdExceeded",
    ),
    "retired_pending": (
        "Retired Pages/Pending Page Blacklist",
        "Retired Pages/Pending",
        "retired_pages/pending_retirement",
        "retired_pages/pending_blacklist",
        "retired_pages.pending",
    ),
    "remap_pending": (
        "Remapped Rows/Pending",
        "remapped_rows/remapped_row_pending",
        "remapped_rows.pending",
        "Remapped Rows",
        "remapped_rows",
    ),
    "remap_failed": (
        "Remapped Rows/Remapping Failure Occurred",
        "remapped_rows/remapped_row_failure",
        "remapped_rows.failure",
        "Remapped Rows",
        "remapped_rows",
    ),
    "channel_repair_pending": ("ECC Errors/Channel Repair Pending", "ecc_errors/channel_repair_pending"),
    "tpc_repair_pending": ("ECC Errors/TPC Repair Pending", "ecc_errors/tpc_repair_pending"),
    "unrepairable_memory": ("ECC Errors/Unrepairable Memory", "ecc_errors/unrepairable_memory"),
    "power_limit_default_w": (
        "GPU Power Readings/Default Power Limit",
        "Power Readings/Default Power Limit",
        "gpu_power_readings/default_power_limit",
        "power_readings/default_power_limit",
        "power.default_limit",
    ),
    "power_limit_min_w": (
        "GPU Power Readings/Min Power Limit",
        "Power Readings/Min Power Limit",
        "gpu_power_readings/min_power_limit",
        "power_readings/min_power_limit",
        "power.min_limit",
    ),
    "power_limit_max_w": (
        "GPU Power Readings/Max Power Limit",
        "Power Readings/Max Power Limit",
        "gpu_power_readings/max_power_limit",
        "power_readings/max_power_limit",
        "power.max_limit",
    ),
    "sm_clock_mhz": ("Clocks/SM", "clocks/sm_clock", "clocks.current.sm", "clocks.sm"),
    "sm_clock_max_mhz": ("Max Clocks/SM", "max_clocks/sm_clock", "clocks.max.sm"),
    "conf_compute_mib": ("Conf Compute Protected Memory Usage/Total", "cc_protected_memory_usage/total"),
    "fabric_state": ("Fabric/State", "fabric/state", "fabric.state"),
    "fabric_status": ("Fabric/Status", "fabric/status", "fabric.status"),
    "device_id": ("PCI/Device Id", "pci/pci_device_id", "pci.device_id"),
    "compute_mode": ("Compute Mode", "compute_mode"),
    "virtualization_mode": (
        "GPU Virtualization Mode/Virtualization Mode",
        "GPU Virtualization Mode/Virtualization mode",
        "gpu_virtualization_mode/virtualization_mode",
    ),
    "recovery_action": ("GPU Recovery Action", "gpu_recovery_action"),
    "gsp_firmware": ("GSP Firmware Version", "gsp_firmware_version"),
}
_RESET_REQUIRED = ("GPU Reset Status/Reset Required", "gpu_reset_status/reset_required")

# Counts that a generation splits: the total where there is one, else the sum of its parts.
_COUNTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    f"ecc_uncorrected_{span}": (
        (
            f"ECC Errors/{span.title()}/Double Bit/Total",
            f"ecc_errors/{span}/double_bit/total",
            f"ecc.errors.uncorrected.{span}.total",
        ),
        tuple(f"ECC Errors/{span.title()}/{part} Uncorrectable" for part in ("SRAM", "DRAM"))
        + tuple(f"ECC Errors/{span.title()}/SRAM Uncorrectable {part}" for part in ("Parity", "SEC-DED"))
        + tuple(
            f"ecc_errors/{span}/{part}"
            for part in (
                "sram_uncorrectable",
                "dram_uncorrectable",
                "sram_uncorrectable_parity",
                "sram_uncorrectable_secded",
            )
        ),
    )
    for span in ("volatile", "aggregate")
}

# Why the clocks are where they are: our word, the words of -q, the end of the name in XML and CSV, the bit of `active`
# (nvml.h, nvmlClocksEventReasons).
_REASONS: tuple[tuple[str, str, str, int], ...] = (
    ("idle", "Idle", "gpu_idle", 0x1),
    ("application_clocks", "Applications Clocks Setting", "applications_clocks_setting", 0x2),
    ("sw_power_cap", "SW Power Cap", "sw_power_cap", 0x4),
    ("hw_slowdown", "HW Slowdown", "hw_slowdown", 0x8),
    ("hw_thermal", "HW Slowdown/HW Thermal Slowdown", "hw_thermal_slowdown", 0x40),
    ("hw_power_brake", "HW Slowdown/HW Power Brake Slowdown", "hw_power_brake_slowdown", 0x80),
    ("sync_boost", "Sync Boost", "sync_boost", 0x10),
    ("sw_thermal", "SW Thermal Slowdown", "sw_thermal_slowdown", 0x20),
    ("display", "Display Clock Setting", "display_clocks_setting", 0x100),
)
_REASON_PLACES: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (
        word,
        tuple(f"Clocks {kind} Reasons/{path}" for kind in ("Event", "Throttle") for path in {text, text.split("/")[-1]})
        + tuple(f"clocks_{kind}_reasons/clocks_{kind}_reason_{name}" for kind in ("event", "throttle"))
        + tuple(f"clocks_{kind}_reasons.{name}" for kind in ("event", "throttle")),
    )
    for word, text, name, _ in _REASONS
)
_REASON_MASKS = tuple(f"clocks_{kind}_reasons.active" for kind in ("event", "throttle"))
_REASON_HEADS = tuple(f"Clocks {kind} Reasons" for kind in ("Event", "Throttle"))

# Everything that anybody asks for; the rest of -q (serial numbers, board parts) is passed over.
_WANTED = frozenset(
    (
        *(place for places in _PLACES.values() for place in places),
        *(place for whole_, parts in _COUNTS.values() for place in (*whole_, *parts)),
        *(place for _, places in _REASON_PLACES for place in places),
        *_RESET_REQUIRED,
        *_REASON_MASKS,
        *_REASON_HEADS,
    )
)
_WANTED_HEADS = frozenset(place.split("/")[0] for place in _WANTED)


@dataclass(frozen=True)
class Query:
    """What one output of ``nvidia-smi`` told.

    ``attached``: how many GPUs it says there are; it may show fewer. ``processes`` is None where it lists none of any
    GPU, which is not the same as an empty list.
    """

    gpus: tuple[Gpu, ...]
    attached: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    samples: tuple[GpuSample, ...] = ()


def query_text(text: str) -> tuple[Gpu, ...]:
    """Read the GPUs of ``nvidia-smi -q``."""
    return read_text(text).gpus


def read_text(text: str) -> Query:
    """Read ``nvidia-smi -q``. Its indentation is its only structure: ``Total`` stands below three headings."""
    blocks: list[_Block] = []
    attached = None
    block: _Block | None = None
    rows = lines(text)
    if rows and not text.endswith("\n") and rows[-1][-1:].isdigit():
        # A number at the very end may be cut inside.
        rows[-1] = rows[-1].rpartition(" : ")[0]
    for text_row in rejoined(rows, lambda row: row.startswith(" ") or " : " in row or _BLOCK.fullmatch(row)):
        row = _row(text_row)
        if block is not None and block.skip_from is not None and row.indent > block.skip_from:
            # Most of -q is of no use here; this test keeps it cheap.
            continue
        if row.bus:
            block = _Block(row.bus)
            blocks.append(block)
        elif block is not None:
            block.take(row)
        elif row.name == "Attached GPUs":
            attached = whole(row.given)
    if not blocks:
        raise RefusedError("holds no block of a GPU (`GPU 00000000:01:00.0`)")
    numbered = attached == len(blocks)
    gpus = tuple(
        _gpu(one.raw, one.bus, index if numbered else None, one.mig_instances()) for index, one in enumerate(blocks)
    )
    listed = [one for one in blocks if one.processes is not None]
    held = (_process(one.bus, told, _TEXT_NAMES) for one in listed for told in one.processes or ())
    return Query(gpus, attached, tuple(process for process in held if process) if listed else None)


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of ``-q``. ``bus``: it is the head of a GPU's block. ``given`` is None where a heading has no value."""

    empty: bool
    indent: int
    bus: str
    name: str
    given: str | None


# Of thousands of lines in a fleet, most are the same few hundred.
@functools.lru_cache(maxsize=8192)
def _row(row: str) -> _Row:
    bare = row.lstrip()
    indent = len(row) - len(bare)
    head = _BLOCK.fullmatch(bare)
    if bare.endswith(" :"):
        return _Row(False, indent, "", bare[:-2].rstrip(), "")
    name, colon, given = bare.partition(" : ")
    name, value_ = (name.rstrip(), given.strip()) if colon else (bare.rstrip(": "), None)
    return _Row(not bare, indent, head[1] if head else "", name, value_)


class _Block:
    """Collects what ``-q`` says of one GPU."""

    def __init__(self, bus: str) -> None:
        self.bus = bus
        self.raw: dict[str, str] = {}
        self.processes: list[dict[str, str]] | None = None
        self._mig: list[dict[str, str]] = []
        self._stack: list[tuple[int, str]] = []  # the headings above a line: indentation, and path so far
        self.skip_from: int | None = None  # lines further right belong to something that nobody asks for
        self._owner: list[dict[str, str]] | None = None
        self._owner_indent = 0
        self._margin: int | None = None

    def take(self, row: _Row) -> None:
        indent, name, given = row.indent, row.name, row.given
        if self._margin is None:
            self._margin = indent
        if row.empty or indent < self._margin:
            # Left of the block stand only the ends of lines that a terminal broke.
            return
        self.skip_from = None
        if self._owner is not None:
            if indent > self._owner_indent:
                self._take_owned(name, given)
                return
            self._owner = None
        stack = self._stack
        while stack and stack[-1][0] >= indent:
            stack.pop()
        if not stack and name not in _WANTED_HEADS:
            if not self._is_list(name, given, indent):
                self.skip_from = indent
            return
        path = f"{stack[-1][1]}/{name}" if stack else name
        if given is not None and path in _WANTED:
            self.raw.setdefault(path, given)
        # A heading may carry a value of its own ("Clocks Event Reasons : N/A") and still have lines below it.
        stack.append((indent, path))

    def _is_list(self, name: str, given: str | None, indent: int) -> bool:
        """Whether a list starts here: the processes of this GPU, or one of its MIG devices."""
        if name == "Processes":
            self.processes = self.processes or []
            self._owner = self.processes
        elif name == "MIG Device":
            self._mig.append({})
            self._owner = self._mig
        else:
            return False
        if given is not None:
            self._owner = None
        self._owner_indent = indent
        return True

    def _take_owned(self, name: str, given: str | None) -> None:
        if self.processes is not None and self._owner is self.processes:
            if name == "Process ID":
                self.processes.append({})
            if self.processes:
                self.processes[-1].setdefault(name, given or "")
        elif self._mig and given is not None:
            # The framebuffer comes before BAR1, so the first Total is its.
            self._mig[-1].setdefault(name, given)

    def mig_instances(self) -> tuple[MigInstance, ...]:
        """Return the MIG devices, in their order."""
        return _instances(self._mig, "Index", "Total")


def query_csv(text: str) -> tuple[Gpu, ...]:
    """Read the GPUs of ``nvidia-smi --query-gpu=... --format=csv``."""
    return read_csv(text).gpus


def read_csv(text: str) -> Query:
    """Read ``nvidia-smi --query-gpu=... --format=csv`` with its header. Each cell is valid or not by itself.

    A GPU that comes again (``-l 1``) gives samples; its last row counts.
    """
    rows = list(csv.reader((row for row in lines(text) if row.strip()), skipinitialspace=True))
    start = next((at for at, row in enumerate(rows) if is_query_header(row)), None)
    if start is None:
        raise RefusedError("has no header of nvidia-smi field names (ask for `--format=csv`, not `noheader`)")
    fields = [_UNIT.sub("", cell.strip()) for cell in rows[start]]
    gpus: dict[str, Gpu] = {}
    times: list[tuple[str, float | None, Gpu]] = []
    for row in rows[start + 1 :]:
        if len(row) < len(fields):
            # The last cell of a row that was cut may be cut itself.
            row = row[:-1]
        if not row or is_query_header(row):
            continue
        raw = {field: cell.strip() for field, cell in zip(fields, row, strict=False)}
        bus_id = raw.get("pci.bus_id", raw.get("gpu_bus_id", ""))
        gpu = _gpu({name: cell for name, cell in raw.items() if "serial" not in name}, bus_id, whole(raw.get("index")))
        key = gpu.bus_id or ("" if gpu.index is None else str(gpu.index)) or gpu.uuid
        gpus[key or f"row {len(times)}"] = gpu
        times.append((key, seconds(raw.get("timestamp")), gpu))
    if not gpus:
        raise RefusedError("has a header and no row")
    return Query(tuple(gpus.values()), samples=_samples(times) if len(times) > len(gpus) else ())


def _samples(rows: list[tuple[str, float | None, Gpu]]) -> tuple[GpuSample, ...]:
    first = next((at for _, at, _ in rows if at is not None), None)
    return tuple(
        GpuSample(
            key,
            None if at is None or first is None else at - first,
            gpu.utilization_percent,
            gpu.power_draw_w,
            gpu.sm_clock_mhz,
            gpu.pstate,
        )
        for key, at, gpu in rows
        if key
    )


_QUERY_NAMES = frozenset(place for place in _WANTED if "/" not in place and " " not in place) | {
    "pci.bus_id",
    "driver_version",
    "index",
}


def is_query_header(cells: Iterable[str]) -> bool:
    """Whether these CSV cells are a header of ``--query-gpu``."""
    names = [_UNIT.sub("", cell.strip()) for cell in cells]
    return len(names) > 1 and all(_FIELD.fullmatch(name) for name in names) and not _QUERY_NAMES.isdisjoint(names)


def query_xml(text: str) -> tuple[Gpu, ...]:
    """Read the GPUs of ``nvidia-smi -q -x``."""
    return read_xml(text).gpus


def read_xml(text: str) -> Query:
    """Read ``nvidia-smi -q -x``. A text that is cut gives what stands before the cut. No entity is ever expanded."""
    if "<!ENTITY" in text:
        raise RefusedError("declares XML entities, which nvidia-smi never does")
    reader = _XmlReader()
    reader.feed("\n".join(lines(text)))
    if not reader.gpus:
        raise RefusedError("holds no <gpu> element")
    numbered = reader.attached == len(reader.gpus)
    gpus = tuple(
        _gpu(raw, bus, at if numbered else None, _instances(reader.mig[at], "index", "fb_memory_usage/total"))
        for at, (bus, raw) in enumerate(reader.gpus)
    )
    processes = reader.processes
    held = (_process(bus, told, _XML_NAMES) for bus, told in processes or ())
    return Query(gpus, reader.attached, None if processes is None else tuple(process for process in held if process))


def _instances(told: list[dict[str, str]], index_name: str, memory_name: str) -> tuple[MigInstance, ...]:
    indexes = [whole(one.get(index_name)) for one in told]
    return tuple(
        MigInstance(at if index is None else index, "", whole(one.get(memory_name)))
        for at, (index, one) in enumerate(zip(indexes, told, strict=True))
    )


# Where the two formats name a process's pid, kind, program and memory.
_TEXT_NAMES = ("Process ID", "Type", "Name", "Used GPU Memory")
_XML_NAMES = ("pid", "type", "process_name", "used_memory")


def _process(bus: str, told: Mapping[str, str], names: tuple[str, str, str, str]) -> GpuProcess | None:
    pid, kind, name, memory = (told.get(one) for one in names)
    number_ = whole(pid)
    if number_ is None:
        return None
    return GpuProcess(address(bus) or bus, number_, value(kind) or "", program(name), whole(memory))


def compute_apps(text: str) -> tuple[GpuProcess, ...]:
    """Read ``nvidia-smi --query-compute-apps=... --format=csv``: the compute processes, none below a lone header."""
    rows = list(csv.reader((row for row in lines(text) if row.strip()), skipinitialspace=True))
    start = next((at for at, row in enumerate(rows) if "pid" in [cell.strip() for cell in row]), None)
    if start is None:
        raise RefusedError("has no header with pid")
    fields = [_UNIT.sub("", cell.strip()) for cell in rows[start]]
    found = []
    for row in rows[start + 1 :]:
        told = dict(zip(fields, (cell.strip() for cell in row), strict=False))
        where = told.get("gpu_bus_id") or told.get("gpu_uuid") or ""
        memory = told.get("used_gpu_memory", told.get("used_memory", ""))
        made = _process(
            where,
            {"pid": told.get("pid", ""), "type": "C", "process_name": told.get("process_name", ""), "used": memory},
            ("pid", "type", "process_name", "used"),
        )
        found += [made] if made else []
    return tuple(found)


class _XmlReader:
    """Collects the text of each wanted element below <gpu> under its path."""

    def __init__(self) -> None:
        self.gpus: list[tuple[str, dict[str, str]]] = []
        self.mig: list[list[dict[str, str]]] = []
        self.processes: list[tuple[str, dict[str, str]]] | None = None
        self.attached: int | None = None
        self._path: list[str] = []
        self._text: list[str] = []

    def feed(self, text: str) -> None:
        start = text.find("<nvidia_smi_log")
        if start < 0:
            return
        parser = expat.ParserCreate()
        parser.StartElementHandler = self._start
        parser.EndElementHandler = self._end
        parser.CharacterDataHandler = self._data
        try:
            parser.Parse(text[start:], True)
        except expat.ExpatError:
            # The paste is cut or followed by other text; what was complete has been collected.
            return

    def _start(self, name: str, attributes: Mapping[str, str]) -> None:
        if name == "gpu" and len(self._path) == 1:
            self.gpus.append((attributes.get("id", ""), {}))
            self.mig.append([])
        elif self.gpus and name == "mig_device":
            self.mig[-1].append({})
        elif self.gpus and name == "process_info":
            self.processes = self.processes or []
            self.processes.append((self.gpus[-1][0], {}))
        self._path.append(name)
        self._text.clear()

    def _end(self, name: str) -> None:
        path = self._path
        text = "".join(self._text).strip()
        if path[1:2] == ["gpu"] and self.gpus:
            if name == "processes" and self.processes is None:
                self.processes = []
            elif text:
                self._keep(path, text)
        elif name == "attached_gpus":
            self.attached = whole(text)
        path.pop()
        self._text.clear()

    def _keep(self, path: list[str], text: str) -> None:
        if self.processes and len(path) > 3 and path[2] == "processes":
            self.processes[-1][1].setdefault(path[-1], text)
        elif len(path) > 4 and path[2] == "mig_devices" and self.mig[-1]:
            self.mig[-1][-1].setdefault("/".join(path[4:]), text)
        elif (joined := "/".join(path[2:])) in _WANTED:
            self.gpus[-1][1].setdefault(joined, text)

    def _data(self, data: str) -> None:
        self._text.append(data)


def _gpu(raw: Mapping[str, str], bus_id: str, index: int | None, instances: tuple[MigInstance, ...] = ()) -> Gpu:
    told: dict[str, str] = {}
    blank = set()
    plan = _plan(tuple(raw))
    for field, places in plan.fields:
        for place in places:
            given = value(raw[place])
            if given is not None:
                told[field] = given
                break
        else:
            blank.add(field)
    values: dict[str, Any] = {field: _CONVERT.get(field, str)(given) for field, given in told.items()}
    if "recovery_action" not in told and any(raw.get(place) == "Yes" for place in _RESET_REQUIRED):
        values["recovery_action"] = "Reset"
    if "device_id" in told:
        device = told["device_id"].lower().removeprefix("0x")
        values["device_id"] = device[:4] if re.fullmatch(r"[0-9a-f]{4}10de", device) else None
    if plan.counts:
        for field, (totals, parts) in _COUNTS.items():
            values[field], empty = _count(raw, totals, parts)
            if empty:
                blank.add(field)
    reasons = _reasons(raw) if plan.reasons else {}
    if plan.reasons and not reasons and any(head in raw for head in _REASON_HEADS):
        blank.add("clock_reasons")
    return Gpu(
        index=index,
        bus_id=address(bus_id) or "",
        mig_devices=len(instances) or None,
        mig_instances=instances,
        clock_reasons=reasons,
        blank=frozenset(blank),
        raw=dict(raw),
        **values,
    )


@dataclass(frozen=True)
class _Plan:
    """Where to look for what in an output with certain fields; all GPUs of one driver version have the same ones."""

    fields: tuple[tuple[str, tuple[str, ...]], ...]
    counts: bool
    reasons: bool


@functools.lru_cache(maxsize=256)
def _plan(printed: tuple[str, ...]) -> _Plan:
    there = frozenset(printed)
    fields = ((field, tuple(place for place in places if place in there)) for field, places in _PLACES.items())
    counted = {place for totals, parts in _COUNTS.values() for place in (*totals, *parts)}
    reasons = {*_REASON_MASKS, *_REASON_HEADS, *(place for _, places in _REASON_PLACES for place in places)}
    return _Plan(
        tuple((field, places) for field, places in fields if places),
        not there.isdisjoint(counted),
        not there.isdisjoint(reasons),
    )


# What becomes of the text of a field; where nothing stands here, it stays text.
_CONVERT: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("memory_total_mib", "memory_used_mib", "bar1_total_mib", "utilization_percent"), whole),
    **dict.fromkeys(("temperature_c", "sm_clock_mhz", "sm_clock_max_mhz", "conf_compute_mib"), whole),
    **dict.fromkeys((f"link_{name}" for name in ("gen_current", "gen_max", "gen_host_max")), whole),
    **dict.fromkeys(("link_width_current", "link_width_max"), whole),
    **dict.fromkeys(("power_draw_w", "power_limit_w", "power_limit_default_w"), number),
    **dict.fromkeys(("power_limit_min_w", "power_limit_max_w"), number),
    **dict.fromkeys(("persistence", "mig", "mig_pending", "ecc", "ecc_pending"), mode),
    **dict.fromkeys(("sram_threshold_exceeded", "retired_pending", "remap_pending", "remap_failed"), flag),
    **dict.fromkeys(("channel_repair_pending", "tpc_repair_pending", "unrepairable_memory"), flag),
}


def _count(raw: Mapping[str, str], totals: tuple[str, ...], parts: tuple[str, ...]) -> tuple[int | None, bool]:
    """Return a count, and whether it was printed without any value."""
    seen = False
    for place in totals:
        if place in raw:
            seen = True
            if (given := whole(raw[place])) is not None:
                return given, False
    found = []
    for place in parts:
        if place in raw:
            seen = True
            if (given := whole(raw[place])) is not None:
                found.append(given)
    return (sum(found), False) if found else (None, seen)


def _reasons(raw: Mapping[str, str]) -> dict[str, bool]:
    found = {}
    for word, places in _REASON_PLACES:
        given = next((raw[place] for place in places if place in raw), "")
        if given in ("Active", "Not Active"):
            found[word] = given == "Active"
    mask = next((raw[name] for name in _REASON_MASKS if name in raw), "")
    if not found and re.fullmatch(r"0x[0-9a-fA-F]{1,16}", mask):
        found = {word: bool(int(mask, 16) & bit) for word, _, _, bit in _REASONS}
    return found
