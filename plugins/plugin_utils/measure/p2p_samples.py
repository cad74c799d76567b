"""The CUDA samples that look at peer access: p2pBandwidthLatencyTest, simpleP2P, and the summary of a run of samples.

p2pBandwidthLatencyTest times copies and checks no data: rung 1. simpleP2P lets each of two GPUs read the other's memory
and checks the result on the host: rung 2 for that pair.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..core.finding import RUNG_CLAIMED, RUNG_COPIED, RUNG_DELIVERED
from ..core.measurement import Copy, Device, Matrix, Measurement, Pair, Status

_DEVICE = re.compile(
    r"\s*Device: (\d+), (.{1,200}), pciBusID: ([0-9a-f]+), pciDeviceID: ([0-9a-f]+), pciDomainID: ?([0-9a-f]+)\s*"
)
_ACCESS = re.compile(r"\s*Device=(\d+) (CAN|CANNOT) Access Peer Device=(\d+)\s*")
_TITLE = re.compile(
    r"\s*(?:(Unidirectional|Bidirectional) )?P2P=(Disabled|Enabled) (Bandwidth|Latency) "
    r"(?:\(P2P (Writes|Reads)\) )?Matrix \((GB/s|us)\)"
)
_HEADER = re.compile(r"\s*(D\\D|GPU|CPU)((?:\s+\d+)+)\s*")
# The sample prints two decimals; a cell that was cut has fewer.
_ROW = re.compile(r"\s*(\d+)((?:\s+\d+\.\d\d)+)\s*")
_CONNECTED = re.compile(r"\s*(\d+)((?:\s+[01])+)\s*")


def bandwidth_latency(rows: Sequence[str]) -> Measurement | None:
    """Read p2pBandwidthLatencyTest: who may reach whom (a claim), and the tables of GB/s and us (rung 1).

    Names of tables: ``one_way_off``, ``one_way_on_write``, ``both_ways_on``, ``latency_gpu_on_write`` and so on.
    """
    devices: list[Device] = []
    access: dict[Pair, bool] = {}
    tables: list[Matrix] = []
    title: re.Match[str] | None = None
    cut = False
    in_connectivity = False
    at = 0
    while at < len(rows):
        row = rows[at]
        at += 1
        if len(row) > 2000:
            continue
        found = _DEVICE.fullmatch(row)
        if found:
            bus = f"{int(found[5], 16):04x}:{int(found[3], 16):02x}:{int(found[4], 16):02x}"
            devices.append(Device(int(found[1]), found[2], bus))
            continue
        found = _ACCESS.fullmatch(row)
        if found:
            access[f"GPU{int(found[1])}", f"GPU{int(found[3])}"] = found[2] == "CAN"
            continue
        if row.lstrip().startswith("Device="):
            cut = True
        elif "P2P Connectivity Matrix" in row:
            in_connectivity, title = True, None
        elif _TITLE.match(row):
            in_connectivity, title = False, _TITLE.match(row)
        else:
            header = _HEADER.fullmatch(row)
            if header and in_connectivity:
                at = _connectivity(rows, at, len(header[2].split()), access)
            elif header and title:
                table, at = _table(rows, at, title, header)
                cut = cut or not table.complete
                if table.cells:
                    tables.append(table)
    if not (devices or access or tables):
        return None
    wanted = len(devices) * (len(devices) - 1)
    measured = any(table.p2p for table in tables)
    whole = {table.name for table in tables if table.complete} >= {"one_way_off", "one_way_on_write", "both_ways_on"}
    complete = whole and not cut and len(access) >= wanted
    return Measurement(
        kind="p2p",
        backend="p2pBandwidthLatencyTest",
        status="ok" if complete else "inconclusive",
        rung=RUNG_COPIED if measured else RUNG_CLAIMED if access else None,
        devices=tuple(devices),
        access=access,
        results=tuple(tables),
        complete=complete,
    )


def _connectivity(rows: Sequence[str], at: int, width: int, access: dict[Pair, bool]) -> int:
    while at < len(rows) and (found := _CONNECTED.fullmatch(rows[at])):
        cells = found[2].split()
        if len(cells) == width:
            for column, cell in enumerate(cells):
                if column != int(found[1]):
                    access.setdefault((f"GPU{int(found[1])}", f"GPU{column}"), cell == "1")
        at += 1
    return at


def _table(rows: Sequence[str], at: int, title: re.Match[str], header: re.Match[str]) -> tuple[Matrix, int]:
    both, switched, quantity, operation, unit = title.groups()
    width = len(header[2].split())
    cells: list[tuple[float | None, ...]] = []
    whole = True
    while at < len(rows) and (found := _ROW.match(rows[at])) and int(found[1]) == len(cells):
        values = [float(cell) for cell in found[2].split()]
        whole = whole and len(values) == width and found.end() == len(rows[at])
        cells.append((*values[:width], *[None] * (width - len(values))))
        at += 1
    on = switched == "Enabled"
    kind = {"Writes": "write", "Reads": "read"}.get(operation or "", "")
    side = "latency_" + ("cpu" if header[1] == "CPU" else "gpu")
    name = side if quantity == "Latency" else "both_ways" if both == "Bidirectional" else "one_way"
    name += f"_{'on' if on else 'off'}" + (f"_{kind}" if kind and on else "")
    matrix = Matrix(
        name=name,
        quantity=quantity.lower(),
        unit=unit,
        cells=tuple(cells),
        p2p=on,
        operation=kind if on else "",
        both_ways=both == "Bidirectional",
        ends="host" if header[1] == "CPU" else "gpu",
        complete=whole and len(cells) == width,
    )
    return matrix, at


# --- simpleP2P ------------------------------------------------------------------------------------------------------

_PEER = re.compile(r"> Peer access from (.{1,120}) \((GPU\d+)\) -> (.{1,120}) \((GPU\d+)\) : (Yes|No)")
_COPY = re.compile(r"cudaMemcpyPeer / cudaMemcpy between (GPU\d+) and (GPU\d+): ([\d.]+)GB/s")
_KERNEL = re.compile(r"Run kernel on (GPU\d+), taking source data from (GPU\d+) and writing")
_WRONG = re.compile(r"Verification error @ element (\d+): val = (\S+), ref = (\S+)")


def simple_p2p(rows: Sequence[str]) -> Measurement | None:
    """Read one run of simpleP2P. Without its last line the run proves nothing beyond its copy."""
    names: dict[str, str] = {}
    access: dict[Pair, bool] = {}
    pair: Pair | None = None
    speed: float | None = None
    first_error: Mapping[str, str] = {}
    passed = failed = waived = seen = False
    excerpt: list[str] = []
    for row in rows:
        if len(row) > 2000:
            continue
        if found := _PEER.search(row):
            names.setdefault(found[2], found[1])
            names.setdefault(found[4], found[3])
            access[found[2], found[4]] = found[5] == "Yes"
        elif found := _COPY.search(row):
            pair, speed = (found[1], found[2]), float(found[3])
            excerpt.append(row.strip())
        elif found := _KERNEL.search(row):
            pair = pair or (found[2], found[1])
        elif found := _WRONG.search(row):
            if not first_error:
                first_error = {"element": found[1], "value": found[2], "expected": found[3].rstrip(",")}
                excerpt.append(row.strip())
        elif row.strip() == "Test passed":
            passed = True
            excerpt.append(row.strip())
        elif row.strip().startswith("Test failed"):
            failed = True
            excerpt.append(row.strip())
        elif "waiving test" in row or "required for simpleP2P" in row:
            waived = True
            excerpt.append(row.strip())
        elif "simpleP2P" not in row:
            continue
        seen = True
    if not seen or not (access or pair or passed or first_error or waived):
        return None
    verified = False if first_error else True if passed and pair else None
    status: Status = (
        "wrong_results" if first_error else "unsupported" if waived else "error" if failed else "inconclusive"
    )
    if verified:
        status = "ok"
    known = sorted(names) or sorted(pair or ())
    return Measurement(
        kind="p2p",
        backend="simpleP2P",
        status=status,
        rung=RUNG_DELIVERED if verified else RUNG_COPIED if speed is not None else RUNG_CLAIMED if access else None,
        devices=tuple(Device(int(one[3:]), names.get(one, "")) for one in known),
        access=access,
        results=(Copy(pair, speed, verified, first_error),) if pair else (),
        complete=passed or failed or waived,
        failure=excerpt[-1] if first_error or failed or waived else "",
        excerpt="\n".join(excerpt),
    )


# --- the summary of a run of samples --------------------------------------------------------------------------------

_FAILED = re.compile(r"\s*(simpleP2P|p2pBandwidthLatencyTest) : (?:Failed|Timeout) \(code (-?\d+)\)")


def samples_summary(rows: Sequence[str]) -> Measurement | None:
    """Read ``Failed runs`` of the samples' own test runner, for the samples that need peer access."""
    for row in rows:
        found = _FAILED.match(row[:200])
        if found:
            status: Status = "hang" if "Timeout" in row else "error"
            line = row.strip()
            return Measurement("p2p", "cuda-samples", status, failure=line, excerpt=line)
    return None
