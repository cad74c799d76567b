"""What ``nvidia-smi`` tells of each GPU: ``-q`` as text, ``-q -x`` as XML, ``--query-gpu`` as CSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from xml.parsers import expat

from ..core.snapshot import Gpu
from .nvidia_values import mode, number, value, whole
from .text import RefusedError, address, lines

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
    "persistence": ("Persistence Mode", "persistence_mode"),
    "mig": ("MIG Mode/Current", "mig_mode/current_mig", "mig.mode.current"),
    "ecc": ("ECC Mode/Current", "Ecc Mode/Current", "ecc_mode/current_ecc", "ecc.mode.current"),
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


def query_text(text: str) -> tuple[Gpu, ...]:
    """Read ``nvidia-smi -q``. Its indentation is its only structure: ``Total`` stands below three headings."""
    blocks: list[tuple[str, dict[str, str]]] = []
    counts: list[int] = []
    attached = None
    stack: list[tuple[int, str]] = []
    for row in lines(text):
        bare = row.lstrip()
        indent = len(row) - len(bare)
        block = _BLOCK.fullmatch(bare)
        if block:
            blocks.append((block[1], {}))
            counts.append(0)
            stack = []
            continue
        name, given = _name_and_value(bare)
        if not blocks:
            attached = whole(given) if name == "Attached GPUs" else attached
            continue
        while stack and stack[-1][0] >= indent:
            stack.pop()
        if given is None:
            counts[-1] += bare == "MIG Device"
            stack.append((indent, name))
        else:
            path = "/".join([*(heading for _, heading in stack), name])
            blocks[-1][1].setdefault(path, given)
            # A heading may carry a value of its own ("Clocks Event Reasons : N/A") and still have lines below it.
            stack.append((indent, name))
    if not blocks:
        raise RefusedError("holds no block of a GPU (`GPU 00000000:01:00.0`)")
    numbered = attached == len(blocks)
    return tuple(
        _gpu(raw, bus_id=bus, index=index if numbered else None, mig_devices=counts[index] or None)
        for index, (bus, raw) in enumerate(blocks)
    )


def _name_and_value(bare: str) -> tuple[str, str | None]:
    if bare.endswith(" :"):
        return bare[:-2].rstrip(), ""
    name, colon, given = bare.partition(" : ")
    return (name.rstrip(), given.strip()) if colon else (bare.rstrip(": "), None)


def query_csv(text: str) -> tuple[Gpu, ...]:
    """Read ``nvidia-smi --query-gpu=... --format=csv`` with its header. Each cell is valid or not by itself."""
    rows = list(csv.reader((row for row in lines(text) if row.strip()), skipinitialspace=True))
    start = next((at for at, row in enumerate(rows) if is_query_header(row)), None)
    if start is None:
        raise RefusedError("has no header of nvidia-smi field names (ask for `--format=csv`, not `noheader`)")
    fields = [_UNIT.sub("", cell.strip()) for cell in rows[start]]
    gpus = []
    for row in rows[start + 1 :]:
        if len(row) < len(fields):
            # The last cell of a row that was cut may be cut itself.
            row = row[:-1]
        if row:
            raw = {field: cell.strip() for field, cell in zip(fields, row, strict=False)}
            bus_id = raw.get("pci.bus_id", raw.get("gpu_bus_id", ""))
            gpus.append(_gpu(raw, bus_id, index=whole(raw.get("index"))))
    if not gpus:
        raise RefusedError("has a header and no row")
    return tuple(gpus)


def is_query_header(cells: Iterable[str]) -> bool:
    """Whether these CSV cells are a header of ``--query-gpu``."""
    names = [_UNIT.sub("", cell.strip()) for cell in cells]
    known = {place for places in _PLACES.values() for place in places} | {"pci.bus_id", "driver_version", "index"}
    return len(names) > 1 and all(_FIELD.fullmatch(name) for name in names) and bool(known.intersection(names))


def query_xml(text: str) -> tuple[Gpu, ...]:
    """Read ``nvidia-smi -q -x``. A text that is cut gives what stands before the cut. No entity is ever expanded."""
    if "<!ENTITY" in text:
        raise RefusedError("declares XML entities, which nvidia-smi never does")
    reader = _XmlReader()
    reader.feed("\n".join(lines(text)))
    if not reader.gpus:
        raise RefusedError("holds no <gpu> element")
    numbered = reader.attached == len(reader.gpus)
    return tuple(
        _gpu(raw, bus_id=bus, index=at if numbered else None, mig_devices=reader.mig_counts[at] or None)
        for at, (bus, raw) in enumerate(reader.gpus)
    )


class _XmlReader:
    """Collects the text of each element below <gpu> under its path."""

    def __init__(self) -> None:
        self.gpus: list[tuple[str, dict[str, str]]] = []
        self.mig_counts: list[int] = []
        self.attached: int | None = None
        self._path: list[str] = []
        self._text = ""

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
            self.mig_counts.append(0)
        if name == "mig_device" and self.gpus:
            self.mig_counts[-1] += 1
        self._path.append(name)
        self._text = ""

    def _end(self, name: str) -> None:
        if self._path[1:2] == ["gpu"] and self.gpus and self._text.strip():
            self.gpus[-1][1].setdefault("/".join(self._path[2:]), self._text.strip())
        elif name == "attached_gpus":
            self.attached = whole(self._text)
        self._path.pop()
        self._text = ""

    def _data(self, data: str) -> None:
        self._text += data


def _gpu(raw: Mapping[str, str], bus_id: str, index: int | None, mig_devices: int | None = None) -> Gpu:
    def cell(field: str) -> str | None:
        places = (raw[place] for place in _PLACES[field] if place in raw)
        return next((given for given in map(value, places) if given is not None), None)

    recovery = cell("recovery_action")
    if recovery is None and any(raw.get(place) == "Yes" for place in _RESET_REQUIRED):
        recovery = "Reset"
    return Gpu(
        index=index,
        bus_id=address(bus_id) or "",
        name=cell("name") or "",
        uuid=cell("uuid") or "",
        memory_total_mib=whole(cell("memory_total_mib")),
        memory_used_mib=whole(cell("memory_used_mib")),
        bar1_total_mib=whole(cell("bar1_total_mib")),
        utilization_percent=whole(cell("utilization_percent")),
        temperature_c=whole(cell("temperature_c")),
        power_draw_w=number(cell("power_draw_w")),
        power_limit_w=number(cell("power_limit_w")),
        pstate=cell("pstate"),
        link_gen_current=whole(cell("link_gen_current")),
        link_gen_max=whole(cell("link_gen_max")),
        link_width_current=whole(cell("link_width_current")),
        link_width_max=whole(cell("link_width_max")),
        persistence=mode(cell("persistence")),
        mig=mode(cell("mig")),
        mig_devices=mig_devices,
        ecc=mode(cell("ecc")),
        compute_mode=cell("compute_mode"),
        virtualization_mode=cell("virtualization_mode"),
        recovery_action=recovery,
        gsp_firmware=cell("gsp_firmware"),
        raw=dict(raw),
    )
