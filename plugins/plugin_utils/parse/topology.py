"""``nvidia-smi topo -m``: how GPUs and network cards are linked. A matrix that does not add up is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..core.snapshot import Topology
from .text import RefusedError, lines

_CODE = re.compile(r"X|NV\d{1,2}|PIX|PXB|PHB|NODE|SYS|SOC|C2C")
_GPU = re.compile(r"GPU\d{1,3}")
# Longest first: "GPU NUMA ID" holds words of its own that are no columns.
_TITLES = {"GPU NUMA ID": "@id", "CPU Affinity": "@cpu", "NUMA Affinity": "@numa"}
_TITLE_WORDS = frozenset({"CPU", "NUMA", "GPU", "Affinity", "ID"})
_LEGEND_NIC = re.compile(r"(NIC\d{1,3}):\s+(\S+)")
_LEGEND_END = "bonded set of # NVLinks"


@dataclass
class _Matrix:
    columns: list[str]
    titles: list[str]
    rows: dict[str, list[str]] = field(default_factory=dict)
    rest: dict[str, list[str]] = field(default_factory=dict)
    cut: bool = False


def parse(text: str) -> Topology:
    """Read the matrix, the affinity columns and the legends. Raises RefusedError where cells and columns disagree."""
    rows = [row for row in lines(text) if row.strip()]
    start = next((at for at, row in enumerate(rows) if _is_header(row)), None)
    if start is None:
        raise RefusedError("holds no header line with GPU0")
    matrix = _header(rows[start])
    for at, row in enumerate(rows[start + 1 :], start + 1):
        if not _take_row(matrix, row, is_last=at == len(rows) - 1):
            break
    if not matrix.rows:
        raise RefusedError("holds a header and no complete row")
    gpus = tuple(name for name in matrix.columns if _GPU.fullmatch(name))
    nics = tuple(name for name in matrix.columns if not _GPU.fullmatch(name))
    nic_names = {hit[1]: hit[2] for row in rows if (hit := _LEGEND_NIC.fullmatch(row.strip()))}
    has_legend = any(row.strip() == "Legend:" for row in rows)
    legend_cut = has_legend and not any(row.rstrip().endswith(_LEGEND_END) for row in rows)
    affinity = {name: _affinity(matrix, name) for name in gpus if name in matrix.rows}
    return Topology(
        gpus=gpus,
        nics=nics,
        nic_names=nic_names,
        links=_links(matrix),
        cpu_affinity=_column(affinity, "@cpu"),
        numa_affinity=_column(affinity, "@numa"),
        gpu_numa_id=_column(affinity, "@id"),
        truncated=matrix.cut or legend_cut or any(name not in matrix.rows for name in matrix.columns),
    )


def _is_header(row: str) -> bool:
    words = row.split()
    return words[0] == "GPU0" and not any(_CODE.fullmatch(word) for word in words)


def _header(row: str) -> _Matrix:
    marked = row
    for title, mark in _TITLES.items():
        marked = re.sub(rf"(?<!\S){title}(?!\S)", mark, marked)
    words = marked.split()
    columns = [word for word in words if not word.startswith("@")]
    broken = [word for word in columns if word in _TITLE_WORDS]
    if broken or words[: len(columns)] != columns:
        raise RefusedError("its header is broken over lines or cut: paste it unwrapped")
    if len(set(columns)) != len(columns):
        raise RefusedError("its header names a column twice")
    return _Matrix(columns, words[len(columns) :])


def _take_row(matrix: _Matrix, row: str, is_last: bool) -> bool:
    """Add one row. False: the matrix ends here."""
    name, *cells = row.split()
    if name not in matrix.columns:
        # A cut inside the name of the last row ("NIC" of "NIC6") is a cut; any other word ends the matrix.
        matrix.cut = matrix.cut or (is_last and any(column.startswith(name) for column in matrix.columns))
        return False
    codes = cells[: len(matrix.columns)]
    if name in matrix.rows:
        return False
    if len(codes) < len(matrix.columns) or not all(_CODE.fullmatch(code) for code in codes):
        if is_last:
            matrix.cut = True
            return False
        raise RefusedError(f"row {name} does not have one known link code for each of {len(matrix.columns)} columns")
    for column, code in zip(matrix.columns, codes, strict=True):
        if (code == "X") != (column == name):
            raise RefusedError(f"row {name} has {code} in column {column}")
    matrix.rows[name] = codes
    matrix.rest[name] = cells[len(codes) :]
    return True


def _links(matrix: _Matrix) -> dict[tuple[str, str], str]:
    links = {
        (name, column): "SYS" if code == "SOC" else code
        for name, codes in matrix.rows.items()
        for column, code in zip(matrix.columns, codes, strict=True)
    }
    for (first, second), code in list(links.items()):
        # A path is the same both ways; this also fills the rows that a cut took.
        if links.setdefault((second, first), code) != code:
            raise RefusedError(f"{first}-{second} is {code} one way and {links[second, first]} the other")
    return links


def _affinity(matrix: _Matrix, name: str) -> dict[str, str | None]:
    """Return the affinity columns of a row.

    Values never hold blanks, so empty cells between doubled tabs don't count: `0-7<tab><tab>N/A<tab><tab>N/A` is one
    value for each of three titles. Fewer values than titles can't be told apart, except the CPU list in front.
    """
    given = matrix.rest[name]
    if len(given) == len(matrix.titles):
        return {title: _none_for_na(cell) for title, cell in zip(matrix.titles, given, strict=True)}
    found: dict[str, str | None] = dict.fromkeys(matrix.titles)
    if given and matrix.titles[:1] == ["@cpu"] and re.fullmatch(r"[\d,-]+", given[0]):
        found["@cpu"] = given[0]
    return found


def _none_for_na(cell: str) -> str | None:
    return None if cell == "N/A" else cell


def _column(affinity: dict[str, dict[str, str | None]], title: str) -> dict[str, str | None]:
    return {name: cells[title] for name, cells in affinity.items() if title in cells}


def excerpt(text: str) -> list[str]:
    """Return the lines of the matrix, verbatim, for a person to see what a verdict stands on."""
    return [row for row in lines(text) if row.split()[:1] and re.match(r"\s*(GPU\d|NIC\d|mlx)", row)]
