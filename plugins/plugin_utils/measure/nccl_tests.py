"""nccl-tests, text and ``-J``: the value-checked collectives.

A run without a wrong value reaches rung 3 only where NCCL's log beside it says that the data took the peer path: over
host memory or a network the same result says nothing of the paths between GPUs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.finding import RUNG_REDUCED
from ..core.measurement import CollectiveRow, Device, Measurement, Status, Timing
from ..core.runtime import NcclLog

_RANK = re.compile(
    r"#\s+Rank\s+(\d+)(?:\s+Group\s+\d+)?\s+Pid\s+(\d+)\s+on\s+(\S+)\s+device\s+(\d+)\s+\[([0-9a-fA-Fx:]+)\]\s+(.{1,120})"
)
_STARTED = re.compile(r"# Collective test starting: (\w+)_perf")
_VERSION = re.compile(r"# nccl-tests version (\S+)")
_CONFIG = re.compile(r"# nThread \d+ nGpus \d+ .*validation: (\d+)")
_BOUNDS = re.compile(r"# Out of bounds values\s*: (\d+) (OK|FAILED)")
_AVERAGE = re.compile(r"# Avg bus bandwidth\s*: ([\d.]+(?:e[+-]?\d+)?)(?=\s|$)")
_TROUBLE = re.compile(r"Test (?:CUDA|NCCL) failure \S+ '([^']{1,200})'|^# error: (.{1,200})|^Invalid number of GPUs.*")
_PID = re.compile(r"\.\. \S+ pid (\d+): Test failure")
_WORD = re.compile(r"[a-z][a-z0-9_]*")

# The names of the binaries and of the kinds of measurements.
_KINDS = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter"}


def text(rows: Sequence[str], log: NcclLog | None = None, p2p_off: bool | None = None) -> Measurement | None:
    """Read the plain output. ``log``: NCCL's lines in the same text; ``p2p_off``: what its command line says."""
    devices: list[Device] = []
    found_rows: list[CollectiveRow] = []
    numbers: dict[str, float | int | str] = {}
    kind, failure, excerpt = "collective", "", []
    checked = counted = rooted = True
    pids: list[str] = []
    for row in rows:
        if len(row) > 2000:
            continue
        head = row.lstrip()
        if head[:1].isdigit():
            one = _row(head.split(), counted, rooted)
            if one:
                found_rows.append(one)
                if one.wrong:
                    excerpt.append(" ".join(head.split()))
        elif found := _RANK.match(head):
            devices.append(Device(int(found[1]), found[6].strip(), _bus(found[5]), found[3], int(found[2])))
        elif found := _STARTED.match(head):
            kind = _KINDS.get(found[1], found[1])
        elif found := _VERSION.match(head):
            numbers["tool_version"] = found[1]
        elif found := _CONFIG.match(head):
            checked = found[1] != "0"
        elif found := _BOUNDS.match(head):
            numbers["out_of_bounds"] = int(found[1])
            excerpt.append(head)
        elif found := _AVERAGE.match(head):
            numbers["average_busbw_gbps"] = float(found[1])
            excerpt.append(head)
        elif head.startswith("#") and "busbw" in head and "algbw" in head:
            # Old releases print the largest difference instead of a count, and have no column for the root.
            counted, rooted = "#wrong" in head, " root " in head
        elif found := _PID.search(head):
            pids.append(found[1])
        elif not failure and (found := _TROUBLE.search(head)):
            failure = found[1] or found[2] or found[0]
            excerpt.append(head)
    if not (devices or found_rows or numbers):
        return None
    if pids:
        numbers["failed_pids"] = " ".join(pids)
    return _measurement(kind, devices, found_rows, numbers, checked, failure, log, p2p_off, "\n".join(excerpt[:8]))


def _measurement(
    kind: str,
    devices: Sequence[Device],
    rows: Sequence[CollectiveRow],
    numbers: dict[str, float | int | str],
    checked: bool,
    failure: str,
    log: NcclLog | None,
    p2p_off: bool | None,
    excerpt: str,
    started_at: str = "",
) -> Measurement:
    ended = "out_of_bounds" in numbers
    wrong = bool(numbers.get("out_of_bounds")) or any(row.wrong for row in rows)
    busy = [half.busbw_gbps for row in rows for half in (row.out_of_place, row.in_place) if half is not None]
    if busy:
        numbers["max_busbw_gbps"] = max(busy)
    if devices:
        numbers["ranks"] = len(devices)
    status: Status = (
        "wrong_results" if wrong else "error" if failure and not ended else "ok" if ended else "inconclusive"
    )
    if log is not None and p2p_off is None:
        p2p_off = dict(log.settings).get("NCCL_P2P_DISABLE") == "1" or None
    one_host = len({device.host for device in devices}) == 1
    proven = status == "ok" and checked and rows and len(devices) > 1 and one_host
    over_peers = log is not None and log.path == "p2p" and not p2p_off
    return Measurement(
        kind,
        "nccl-tests",
        status,
        RUNG_REDUCED if proven and over_peers else None,
        tuple(devices),
        results=tuple(rows),
        numbers=numbers,
        transports=tuple(log.transports) if log else (),
        p2p_off=p2p_off,
        complete=ended,
        failure=failure,
        started_at=started_at,
        excerpt=excerpt,
    )


def _row(cells: list[str], counted: bool, rooted: bool) -> CollectiveRow | None:
    """Read ``size count type redop [root] (time algbw busbw #wrong [4 columns of -I]) twice [date time]``."""
    if len(cells) < 12 or not (cells[0].isdigit() and cells[1].isdigit()):
        return None
    if not (_WORD.fullmatch(cells[2]) and _WORD.fullmatch(cells[3])):
        return None
    rest = cells[5:] if rooted else cells[4:]
    if len(rest) not in (8, 10, 16, 18):
        return None
    wide = len(rest) >= 16
    first = _timing(rest[0:4], counted)
    second = _timing(rest[8:12] if wide else rest[4:8], counted)
    if first is None or second is None:
        return None
    return CollectiveRow(int(cells[0]), int(cells[1]), cells[2], cells[3], first, second)


def _timing(cells: list[str], counted: bool) -> Timing | None:
    if len(cells) != 4:
        return None
    try:
        time_us, algbw, busbw = (float(cell) for cell in cells[:3])
    except ValueError:
        return None
    if not all(map(math.isfinite, (time_us, algbw, busbw))):
        return None
    return Timing(time_us, algbw, busbw, _wrong(cells[3]) if counted else None)


def _wrong(cell: str) -> int | None:
    try:
        return int(float(cell))
    except (ValueError, OverflowError):
        return None


def _bus(text_: str) -> str:
    found = re.fullmatch(r"(?:0x)?([0-9a-fA-F]{1,2})", text_)
    return f"0000:{int(found[1], 16):02x}:00" if found else text_.lower()


# --- JSON -----------------------------------------------------------------------------------------------------------


def from_json(document: str) -> Measurement | None:
    """Read the file of ``-J``. Its ``env`` is the whole environment: nothing but ``NCCL_P2P_DISABLE`` is looked at."""
    start = document.find("{")
    try:
        root, _ = json.JSONDecoder().raw_decode(document, max(start, 0))
    except (ValueError, RecursionError):
        return None
    if not isinstance(root, dict) or not isinstance(root.get("results"), list) or "nccl_version" not in root:
        return None
    config = root["config"] if isinstance(root.get("config"), Mapping) else {}
    devices = [
        Device(
            _whole(one.get("rank")),
            str(one.get("device_info", "")).strip(),
            _bus(str(one.get("device_hex", ""))),
            str(one.get("hostname", "")),
            _whole(one.get("pid")),
        )
        for one in config.get("devices") or ()
        if isinstance(one, Mapping)
    ]
    rows = [row for one in root["results"] if isinstance(one, Mapping) and (row := _json_row(one))]
    numbers: dict[str, float | int | str] = {}
    bounds, average = root.get("out_of_bounds"), root.get("average_bus_bandwidth")
    if isinstance(bounds, Mapping):
        numbers["out_of_bounds"] = _whole(bounds.get("count"))
    if isinstance(average, Mapping) and isinstance(average.get("bandwidth"), int | float):
        numbers["average_busbw_gbps"] = float(average["bandwidth"])
    numbers["nccl_version"] = _whole(root["nccl_version"])
    errors = [str(one) for one in root.get("errors") or () if one]
    arguments = root.get("args") or [""]
    program = re.search(r"(\w+?)_perf", str(arguments[0])) if isinstance(arguments, list) and arguments else None
    kind = _KINDS.get(program[1], program[1]) if program else "collective"
    environment = root.get("env")
    off = isinstance(environment, list) and "NCCL_P2P_DISABLE=1" in environment
    checked = config.get("validation") != 0
    excerpt = f"out_of_bounds {numbers.get('out_of_bounds', '?')}, {len(rows)} sizes"
    return _measurement(
        kind,
        devices,
        rows,
        numbers,
        checked,
        errors[0] if errors else "",
        None,
        off or None,
        excerpt,
        str(root.get("start_time", "")),
    )


def _json_row(one: Mapping[str, Any]) -> CollectiveRow | None:
    size, count = one.get("size"), one.get("count")
    if not isinstance(size, int) or not isinstance(count, int):
        return None
    first, second = _json_timing(one.get("out_of_place")), _json_timing(one.get("in_place"))
    return CollectiveRow(size, count, str(one.get("type", "")), str(one.get("redop", "")), first, second)


def _json_timing(half: Any) -> Timing | None:
    if not isinstance(half, Mapping):
        return None
    time_us, algbw, busbw = half.get("time", half.get("cpu_time")), half.get("alg_bw"), half.get("bus_bw")
    if not (isinstance(time_us, int | float) and isinstance(algbw, int | float) and isinstance(busbw, int | float)):
        return None
    wrong = half.get("nwrong")
    return Timing(time_us, algbw, busbw, int(wrong) if isinstance(wrong, int | float) else None)


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else -1
