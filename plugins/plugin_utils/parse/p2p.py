"""``nvidia-smi topo -p2p MODE``: what the driver claims for each ordered pair of GPUs. A claim, never a result."""

from __future__ import annotations

import re

from ..core.snapshot import P2pMatrix
from .text import RefusedError, lines

# NVML's nvmlGpuP2PStatus, as nvidia-smi abbreviates it.
CODES = ("X", "OK", "CNS", "GNS", "TNS", "NS", "DR", "U")
MODES = ("r", "w", "n", "a", "p", "rw")

_GPU = re.compile(r"GPU\d{1,3}")
_LEGEND = re.compile(r"([A-Z]{1,3})\s+=\s+\S")


def parse(text: str, mode: str) -> P2pMatrix:
    """Read the matrix. Raises RefusedError where it is not square over known codes."""
    if mode not in MODES:
        raise RefusedError(f"{mode!r} is no mode of `nvidia-smi topo -p2p`")
    rows = [row.split() for row in lines(text) if row.strip()]
    start = next((at for at, row in enumerate(rows) if row[0] == "GPU0" and all(map(_GPU.fullmatch, row))), None)
    if start is None:
        raise RefusedError("holds no header line with GPU0")
    gpus = rows[start]
    if len(set(gpus)) != len(gpus):
        raise RefusedError("its header names a GPU twice")
    cells: dict[tuple[str, str], str] = {}
    seen: list[str] = []
    cut = False
    for at, row in enumerate(rows[start + 1 :], start + 1):
        is_last = at == len(rows) - 1
        name, codes = row[0], row[1:]
        if not _GPU.fullmatch(name):
            cut = cut or (is_last and "GPU".startswith(name[:3]))
            break
        if is_last and (len(codes) < len(gpus) or name not in gpus):
            cut = True
            break
        _check_row(gpus, seen, name, codes)
        seen.append(name)
        cells.update({(name, column): code for column, code in zip(gpus, codes, strict=True)})
    if not seen:
        raise RefusedError("holds a header and no complete row")
    legend = tuple(hit[1] for row in lines(text) if (hit := _LEGEND.match(row.strip())) and hit[1] in CODES)
    return P2pMatrix(mode, tuple(gpus), cells, legend, truncated=cut or len(seen) < len(gpus))


def _check_row(gpus: list[str], seen: list[str], name: str, codes: list[str]) -> None:
    if name not in gpus or name in seen:
        raise RefusedError(f"row {name} is no column, or comes twice")
    if len(codes) != len(gpus):
        raise RefusedError(f"row {name} has {len(codes)} cells for {len(gpus)} columns: not a square matrix")
    for column, code in zip(gpus, codes, strict=True):
        if code not in CODES:
            raise RefusedError(f"{name}-{column} is {code!r}, which is no known code")
        if (code == "X") != (column == name):
            raise RefusedError(f"{name}-{column} is {code}")


def excerpt(text: str) -> list[str]:
    """Return the lines of the matrix, verbatim."""
    return [row for row in lines(text) if row.split()[:1] and _GPU.fullmatch(row.split()[0])]
