"""nvbandwidth, text and JSON: copies between GPUs and between host and GPU. Its checks run in the copying GPU's own
context, so that a copy that never reaches its owner passes too: rung 1."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.finding import RUNG_COPIED
from ..core.measurement import Device, Matrix, Measurement, Status

_VERSION = re.compile(r"\s*nvbandwidth Version: (\S+)")
_DRIVER = re.compile(r"\s*Driver Version: (\S+)")
_DEVICE = re.compile(r"\s*Device (\d+): (.{1,200}) \(([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\)")
_RUNNING = re.compile(r"\s*Running (\w+)\.\s*")
_TITLE = re.compile(r"\s*([A-Za-z].{2,120}) (bandwidth|latency) \((GB/s|ns|us)\)\s*")
_HEADER = re.compile(r"\s*\d+(?:\s+\d+)*\s*")
# Two decimals are printed; a cell that was cut has fewer.
_ROW = re.compile(r"\s*(\d+)((?:\s+(?:\d+\.\d\d|N/A))+)")
_SUM = re.compile(r"\s*SUM (\w+) (\d+\.\d+)\s*")
_TROUBLE = re.compile(r"\s*(ERROR|Error|Waived|Not Found)\b:?\s*(.*)")

# Before 0.8 the device to device latency test reported the latency between host and device.
_LATENCY_SINCE = (0, 8)


def text(rows: Sequence[str]) -> tuple[Measurement, ...]:
    """Read the plain output: one measurement for the paths between GPUs, one for those to the host."""
    version = driver = running = ""
    devices: list[Device] = []
    tables: list[Matrix] = []
    trouble: list[str] = []
    sums: dict[str, float] = {}
    at = 0
    while at < len(rows):
        row = rows[at]
        at += 1
        if len(row) > 2000:
            continue
        if found := _VERSION.match(row):
            version = found[1]
        elif found := _DRIVER.match(row):
            driver = found[1]
        elif found := _DEVICE.match(row):
            devices.append(_device(int(found[1]), found[2], found[3], found[4], found[5]))
        elif found := _RUNNING.fullmatch(row):
            running = found[1]
        elif found := _TITLE.fullmatch(row):
            table, at = _table(rows, at, found, running, sums)
            if table.cells:
                tables.append(table)
        elif running and (found := _TROUBLE.match(row)):
            trouble.append(f"{running}: {found[1]} {found[2]}".strip())
    return tuple(_measurements(tables, devices, version, driver, trouble, sums))


def _device(index: int, name: str, domain: str, bus: str, slot: str) -> Device:
    return Device(index, name, f"{int(domain, 16):04x}:{bus}:{slot}".lower())


def _table(
    rows: Sequence[str], at: int, title: re.Match[str], running: str, sums: dict[str, float]
) -> tuple[Matrix, int]:
    width = 0
    if at < len(rows) and _HEADER.fullmatch(rows[at]):
        width = len(rows[at].split())
        at += 1
    cells: list[tuple[float | None, ...]] = []
    whole = True
    while at < len(rows) and (found := _ROW.match(rows[at])) and int(found[1]) == len(cells):
        values = [None if cell == "N/A" else float(cell) for cell in found[2].split()]
        whole = whole and len(values) == width and found.end() == len(rows[at])
        cells.append((*values[:width], *[None] * (width - len(values))))
        at += 1
    name = running
    for row in rows[at : at + 2]:
        if found := _SUM.fullmatch(row):
            name = found[1]
            sums[name] = float(found[2])
            break
    else:
        # Without its sum the table may have lost rows.
        whole = False
    between_gpus = "CPU" not in title[1] and "Host" not in title[1]
    square = not between_gpus or len(cells) == width
    return _matrix(name or title[1].strip(), title[2], title[3], cells, between_gpus, whole and square), at


def _matrix(
    name: str, quantity: str, unit: str, cells: Sequence[tuple[float | None, ...]], between_gpus: bool, whole: bool
) -> Matrix:
    return Matrix(
        name=name,
        quantity=quantity,
        unit=unit,
        cells=tuple(cells),
        p2p=True if between_gpus else None,
        operation="write" if "write" in name else "read" if "read" in name else "",
        both_ways="bidirectional" in name,
        ends="gpu" if between_gpus else "host",
        complete=whole,
    )


def _measurements(
    tables: Sequence[Matrix],
    devices: Sequence[Device],
    version: str,
    driver: str,
    trouble: Sequence[str],
    sums: Mapping[str, float],
) -> Iterator[Measurement]:
    told = {"tool_version": version, "driver_version": driver}
    trusted = [one for one in tables if one.quantity != "latency" or one.ends == "host" or not _too_old(version)]
    for kind, ends in (("p2p", "gpu"), ("host", "host")):
        chosen = [one for one in trusted if one.ends == ends]
        if not chosen:
            continue
        numbers: dict[str, float | int | str] = {key: value for key, value in told.items() if value}
        for one in chosen:
            values = list(one.between().values()) if ends == "gpu" else [x for row in one.cells for x in row if x]
            if values:
                unit = "gbps" if one.unit == "GB/s" else one.unit
                numbers[f"{one.name}.min_{unit}"] = min(values)
                numbers[f"{one.name}.max_{unit}"] = max(values)
            if one.name in sums:
                numbers[f"{one.name}.sum"] = sums[one.name]
        complete = all(one.complete for one in chosen) and not trouble
        status: Status = "error" if trouble else "ok" if complete else "inconclusive"
        rung = RUNG_COPIED if kind == "p2p" else None
        yield Measurement(
            kind,
            "nvbandwidth",
            status,
            rung,
            tuple(devices),
            results=tuple(chosen),
            numbers=numbers,
            complete=complete,
            failure=trouble[0] if trouble else "",
        )
    if trouble and not tables:
        yield Measurement("p2p", "nvbandwidth", "error", devices=tuple(devices), failure=trouble[0], complete=False)


def _too_old(version: str) -> bool:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return found is None or (int(found[1]), int(found[2])) < _LATENCY_SINCE


def from_json(document: str) -> tuple[Measurement, ...]:
    """Read the output of ``nvbandwidth -j``. Its numbers are strings, and a failed test still ends with 0."""
    root = _json_object(document).get("nvbandwidth")
    if not isinstance(root, Mapping):
        return ()
    tables: list[Matrix] = []
    trouble: list[str] = [str(root["error"])] if root.get("error") else []
    sums: dict[str, float] = {}
    for test in root.get("testcases") or ():
        if not isinstance(test, Mapping):
            continue
        name, status = str(test.get("name", "")), str(test.get("status", ""))
        raw = test.get("bandwidth_matrix")
        if status != "Passed" or not isinstance(raw, list):
            if status.lower() not in ("passed", "waived"):
                trouble.append(f"{name}: {status or 'no status'} {test.get('error', '')}".strip())
            continue
        title = str(test.get("bandwidth_description", ""))
        cells = [tuple(_number(cell) for cell in row) for row in raw if isinstance(row, list)]
        between_gpus = "CPU" not in title and "host" not in name
        latency = "latency" in name or "latency" in title.lower()
        unit = next((one for one in ("ns", "us") if f"({one})" in title), "ns" if latency else "GB/s")
        whole = not between_gpus or all(len(row) == len(cells) for row in cells)
        if isinstance(test.get("sum"), int | float):
            sums[name] = float(test["sum"])
        tables.append(_matrix(name, "latency" if latency else "bandwidth", unit, cells, between_gpus, whole))
    devices = []
    for index, one in enumerate(root.get("GPU Device list") or ()):
        found = re.match(r"(?:\d+: )?(.{1,200}?) \(([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\)", str(one))
        if found:
            devices.append(_device(index, found[1], found[2], found[3], found[4]))
    version, driver = str(root.get("version", "")), str(root.get("Driver Version", ""))
    return tuple(_measurements(tables, devices, version, driver, trouble, sums))


def _number(cell: Any) -> float | None:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def _json_object(document: str) -> Mapping[str, Any]:
    """Return the JSON object of a text that may have lines in front of it, or an empty one."""
    start = document.find("{")
    try:
        found, _ = json.JSONDecoder().raw_decode(document, max(start, 0))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
