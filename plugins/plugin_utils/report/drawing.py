"""A drawing of how GPUs and network cards hang below sockets, root ports and switches, as boxes and lines.

One panel for each NUMA node, as wide as a phone, so that a page can put panels side by side where there is room.
All lengths are SVG user units, which are CSS pixels as long as a panel is not scaled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.snapshot import PciFunction, Snapshot, Topology
from ..rules.knowledge import gpu_model
from ..rules.machines import gpu_vms
from ..rules.peers import components
from .story import clean

WIDTH = 350
_ROW, _BOX = 46, 36
_TRUNK, _PORT, _PORT_WIDTH, _LEAF, _STEP = 10, 20, 98, 132, 18
_CHAR, _SMALL_CHAR = 6.7, 5.9  # mean widths of the two text sizes of the page (12 and 10.5 px)
_MOST_LEAVES = 96
_MOST_BRIDGES = 16  # between a device and the root; a loop of parents ends here

_SWITCHED, _BRIDGED, _NODE = ("PIX", "PXB"), ("PIX", "PXB", "PHB"), ("PIX", "PXB", "PHB", "NODE")
_OVER_PCIE = (*_NODE, "SYS")
_NVSWITCH_CLASS = "0680"


@dataclass
class _Node:
    """One thing to draw. ``kind``: port, switch, hop (not drawn itself), gpu, nic, nvswitch."""

    kind: str
    title: str
    detail: str = ""
    link: str = ""
    degraded: bool = False
    tip: str = ""
    children: list[_Node] = field(default_factory=list)


@dataclass(frozen=True)
class Box:
    """One box with up to three texts: the title, what stands at the right of it, and a line below."""

    x: int
    y: int
    width: int
    height: int
    kind: str
    title: str
    detail: str
    link: str
    degraded: bool
    tip: str


@dataclass(frozen=True)
class Panel:
    """One NUMA node. ``lines`` are SVG path data."""

    title: str
    height: int
    boxes: tuple[Box, ...]
    lines: tuple[str, ...]
    width: int = WIDTH


@dataclass(frozen=True)
class Drawing:
    """All panels of a host, and what the drawing can't show."""

    panels: tuple[Panel, ...]
    notes: tuple[str, ...]
    source: str

    @property
    def has_links(self) -> bool:
        """Whether the width of any link is told."""
        return any(box.link for panel in self.panels for box in panel.boxes)


def draw(snapshot: Snapshot) -> Drawing | None:
    """Return the drawing of a host, or None where no GPU is known."""
    leaves = _leaves(snapshot)
    topology = snapshot.topology.value
    gpus = [one for one in leaves if one.is_gpu]
    by_bus = _by_secondary_bus(snapshot)
    tree_known = any(_above(one, snapshot, by_bus) for one in gpus)
    if gpus and (tree_known or snapshot.pci.complete or topology is None):
        return _from_pci(snapshot, leaves, by_bus, tree_known)
    if topology is not None and topology.gpus:
        return _from_topology(snapshot, topology)
    return None


# --- from the PCI bus -----------------------------------------------------------------------------------------------


def _leaves(snapshot: Snapshot) -> list[PciFunction]:
    """Return GPUs, NVSwitches and network cards, one function of each slot, in bus order."""
    found: dict[tuple[str, str], PciFunction] = {}
    functions = snapshot.pci.functions.value or {}
    for bdf in sorted(functions):
        one = functions[bdf]
        kind = _kind(one)
        if kind and not one.physfn:
            found.setdefault((bdf.rpartition(".")[0], kind), one)
    return list(found.values())


def _kind(one: PciFunction) -> str:
    if one.is_gpu:
        return "gpu"
    if one.is_nvidia and one.class_code == _NVSWITCH_CLASS:
        return "nvswitch"
    return "nic" if (one.class_code or "").startswith("02") else ""


def _by_secondary_bus(snapshot: Snapshot) -> dict[tuple[str, int], PciFunction]:
    functions = (snapshot.pci.functions.value or {}).values()
    return {
        (one.bdf.partition(":")[0], one.secondary_bus): one
        for one in functions
        if one.is_bridge and one.secondary_bus is not None
    }


def _above(one: PciFunction, snapshot: Snapshot, by_bus: Mapping[tuple[str, int], PciFunction]) -> list[PciFunction]:
    """Return the bridges above a function, the root port first."""
    functions = snapshot.pci.functions.value or {}
    chain: list[PciFunction] = []
    while len(chain) < _MOST_BRIDGES:
        domain, bus, _ = one.bdf.split(":") if one.bdf.count(":") == 2 else ("", "0", "")
        above = functions.get(one.parent or "") or by_bus.get((domain, int(bus, 16)))
        if above is None or above.bdf == one.bdf or above in chain:
            break
        chain.insert(0, above)
        one = above
    return chain


def _from_pci(
    snapshot: Snapshot,
    leaves: Sequence[PciFunction],
    by_bus: Mapping[tuple[str, int], PciFunction],
    tree_known: bool,
) -> Drawing:
    role = snapshot.role.value
    numbers = {gpu.bus_id: gpu.index for gpu in snapshot.gpus.value or () if gpu.index is not None}
    vms = {
        function.bdf: config.vmid for config, lines in gpu_vms(snapshot) for one in lines for function in one.functions
    }
    domains = {one.bdf.partition(":")[0] for one in leaves}
    affinity = snapshot.topology.value.numa_affinity if snapshot.topology.value else {}
    nodes: dict[str, list[_Node]] = {}
    known: dict[tuple[str, str], _Node] = {}
    for one in leaves[:_MOST_LEAVES]:
        chain = _above(one, snapshot, by_bus)
        index = numbers.get(one.bdf)
        numa = next(
            (two.numa_node for two in (one, *reversed(chain)) if (two.numa_node or -1) >= 0 or two.numa_node == 0), None
        )
        place = str(numa) if numa is not None else affinity.get(f"GPU{index}") or ""
        level = nodes.setdefault(place, [])
        for depth, bridge in enumerate(chain):
            key = (place, bridge.bdf)
            if key not in known:
                known[key] = _bridge(bridge, depth, virtual=role == "guest")
                level.append(known[key])
            level = known[key].children
        level.append(_leaf(one, index, vms.get(one.bdf, ""), short=domains == {"0000"}, via=chain))
    titles = {place: _node_title(place) for place in nodes}
    panels = tuple(
        _panel(titles[place], _splice(nodes[place]))
        for place in sorted(nodes, key=lambda one: (not one, len(one), one))
    )
    notes = []
    if role == "guest":
        flat = not any(_above(one, snapshot, by_bus) for one in leaves if one.is_gpu)
        where = "directly on the guest's root bus" if flat else "below virtual ports"
        notes.append(
            f"This is a guest: its GPUs hang {where}. "
            "Only its hypervisor can tell which of them share a real switch or socket."
        )
    elif not tree_known:
        what = "on the root bus" if snapshot.pci.complete and snapshot.pci.functions.source == "sysfs.pci" else ""
        notes.append(
            f"All GPUs hang directly {what}."
            if what
            else "How the devices hang together was not read (lspci -t, or the tree in sysfs), only which there are."
        )
    if "" in nodes and role != "guest":
        notes.append("NUMA nodes were not told for all devices.")
    if not snapshot.pci.complete:
        notes.append("Only a part of the PCI devices was read.")
    if len(leaves) > _MOST_LEAVES:
        notes.append(f"{len(leaves) - _MOST_LEAVES} more devices are not drawn.")
    return Drawing(panels, tuple(notes), snapshot.pci.functions.source)


def _node_title(place: str) -> str:
    return f"NUMA node {place}" if place else "NUMA node not told"


def _bridge(one: PciFunction, depth: int, virtual: bool) -> _Node:
    kinds = {"root port": "port", "upstream port": "switch", "downstream port": "hop"}
    kind = kinds.get(one.port_type) or ("port" if depth == 0 else "switch" if depth % 2 else "hop")
    if depth and kind == "port":
        kind = "switch"
    title = {"port": "virtual port" if virtual else "root port", "switch": "PCIe switch"}.get(kind, "port")
    name = _short_name(one.name)
    if kind == "switch":
        name = name or (f"{one.vendor}:{one.device}" if one.vendor and one.device else "")
    detail = " ".join([_address(one.bdf), name if kind == "switch" else ""]).strip()
    link = "" if kind == "hop" or virtual else _link(one)[0]
    return _Node(kind, title, detail, link, tip=f"{one.bdf} {one.name}".strip())


def _leaf(one: PciFunction, index: int | None, vm: str, short: bool, via: Sequence[PciFunction]) -> _Node:
    kind = _kind(one)
    title = {"gpu": "GPU", "nic": "NIC", "nvswitch": "NVSwitch"}[kind] + (f" {index}" if index is not None else "")
    model = gpu_model(one.device) if kind == "gpu" else None
    name = (model.name if model else "") or _short_name(one.name)
    name = name or (f"{one.vendor}:{one.device}" if one.vendor and one.device else "")
    link, degraded = _link(one)
    if vm:
        title = f"{title} \u2192 VM {vm}"
    tip = [one.bdf, one.name or name, f"below {via[-1].bdf}" if via else ""]
    if one.link_speed_gt is not None:
        tip.append(f"link now {one.link_speed_gt:g} GT/s")
    detail = f"{_address(one.bdf) if short else one.bdf} {name}".strip()
    return _Node(kind, title, detail, link, degraded, ", ".join(part for part in tip if part))


def _address(bdf: str) -> str:
    return bdf.removeprefix("0000:")


def _short_name(name: str) -> str:
    """Return the model in brackets where lspci gives one, else the last words."""
    found = re.findall(r"\[([^\]]{3,60})\]", name)
    models = [one for one in found if not re.fullmatch(r"[0-9a-f]{4}(:[0-9a-f]{4})?", one)]
    return str(models[-1]) if models else name.rpartition(": ")[2].removeprefix("NVIDIA Corporation ")


def _link(one: PciFunction) -> tuple[str, bool]:
    """Return the link in words, and whether it is narrower than both ends could be."""
    if one.link_width is None:
        return "", False
    narrow = one.link_max_width is not None and one.link_width < one.link_max_width
    words = f"x{one.link_width} of x{one.link_max_width}" if narrow else f"x{one.link_width}"
    # A GPU at rest lowers its speed: what it can is what tells. The tip has the speed of the moment.
    speed = one.link_max_speed_gt or one.link_speed_gt
    return (f"{words} \u00b7 {speed:g} GT/s" if speed else words), narrow


def _splice(nodes: Iterable[_Node]) -> list[_Node]:
    """Return the nodes with downstream ports replaced by what hangs below them."""
    made: list[_Node] = []
    for node in nodes:
        node.children = _splice(node.children)
        made += node.children if node.kind == "hop" else [node]
    return made


# --- from nvidia-smi topo -m ----------------------------------------------------------------------------------------


def _from_topology(snapshot: Snapshot, topology: Topology) -> Drawing:
    names = (*topology.gpus, *topology.nics)
    whole = _groups(names, topology, _NODE)
    # NVLink hides how two GPUs are connected over PCIe: their NUMA node then ties them.
    by_numa: dict[str, str] = {}
    ties = []
    for gpu in topology.gpus:
        node = topology.numa_affinity.get(gpu)
        if node:
            ties.append((gpu, by_numa.setdefault(node, gpu)))
    rank = {name: at for at, group in enumerate(whole) for name in group}
    whole = components(names, [*ties, *((group[0], name) for group in whole for name in group)]) if ties else whole
    panels = []
    placed = {name for pair, code in topology.links.items() if code in _OVER_PCIE for name in pair}
    placed |= {gpu for gpu, node in topology.numa_affinity.items() if node}
    lost = [name for name in names if name not in placed]
    for group in sorted(whole, key=lambda one: rank[one[0]]):
        if not placed.intersection(group):
            continue
        ports = []
        for bridge in _groups(group, topology, _BRIDGED):
            port = _Node("port", "host bridge")
            for switch in _groups(bridge, topology, _SWITCHED):
                devices = [_Node(*_named(one, topology)) for one in switch]
                port.children += [_Node("switch", "PCIe switch", children=devices)] if len(devices) > 1 else devices
            ports.append(port)
        told = {topology.numa_affinity.get(one) for one in group if one in topology.gpus}
        place = told.pop() if len(told) == 1 else None
        panels.append(_panel(_node_title(place or ""), ports))
    if lost:
        panels.append(_panel("place not told", [_Node(*_named(one, topology)) for one in lost]))
    notes = [
        "Drawn from nvidia-smi topo -m, which names no ports: host bridges and switches are inferred from its codes."
    ]
    if topology.truncated:
        notes.append("The matrix was cut: what its missing rows tell is missing here too.")
    if any(code.startswith("NV") for code in topology.links.values()):
        notes.append("Between GPUs with NVLink it does not tell the PCIe path.")
    if snapshot.role.value == "guest":
        notes.append("This is a guest: what is drawn is virtual.")
    return Drawing(tuple(panels), tuple(notes), snapshot.topology.source)


def _groups(names: Sequence[str], topology: Topology, codes: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    within = set(names)
    edges = [pair for pair, code in topology.links.items() if code in codes and pair[0] in within and pair[1] in within]
    return components(names, edges)


def _named(name: str, topology: Topology) -> tuple[str, str, str]:
    if name in topology.gpus:
        cpus = topology.cpu_affinity.get(name)
        return "gpu", name.replace("GPU", "GPU "), f"CPUs {cpus}" if cpus else ""
    card = topology.nic_names.get(name, "")
    return "nic", name if card else "NIC", card or name


# --- layout ---------------------------------------------------------------------------------------------------------


class _Sheet:
    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.lines: list[str] = []
        self.row = 0

    def box(self, node: _Node, x: int, width: int) -> int:
        """Add a box in the current row and return the height of its middle."""
        y = self.row * _ROW + 8
        room = width - 16
        link = clean(node.link)
        title = _fit(node.title, (room - len(link) * _SMALL_CHAR - 6) / _CHAR if link else room / _CHAR)
        detail = _fit(node.detail, room / _SMALL_CHAR)
        self.boxes.append(
            Box(x, y, width, _BOX, node.kind, title, detail, link, node.degraded, clean(f"{node.title} {node.tip}"))
        )
        return y + _BOX // 2


def _panel(title: str, nodes: Sequence[_Node]) -> Panel:
    sheet = _Sheet()
    last = 0
    left = _LEAF if any(node.kind == "port" for node in nodes) else _PORT
    for node in nodes:
        if node.kind == "port":
            node.link = ""  # there is no room beside its name; its device shows the same link
            last = sheet.box(node, _PORT, _PORT_WIDTH)
            sheet.lines.append(f"M{_TRUNK} {last}H{_PORT}")
            _beside(sheet, node.children, last)
        else:
            last = sheet.row * _ROW + 8 + _BOX // 2
            sheet.lines.append(f"M{_TRUNK} {last}H{left}")
            _place(sheet, node, left)
    sheet.lines.append(f"M{_TRUNK} 0V{last}")
    return Panel(clean(title), sheet.row * _ROW + 4, tuple(sheet.boxes), tuple(sheet.lines))


def _beside(sheet: _Sheet, children: Sequence[_Node], middle: int) -> None:
    """Put the first child beside its port, the others below it."""
    turn = _LEAF - (_LEAF - _PORT - _PORT_WIDTH) // 2
    if not children:
        sheet.row += 1
    for at, child in enumerate(children):
        y = sheet.row * _ROW + 8 + _BOX // 2
        sheet.lines.append(f"M{_PORT + _PORT_WIDTH} {y}H{_LEAF}" if at == 0 else f"M{turn} {middle}V{y}H{_LEAF}")
        _place(sheet, child, _LEAF)


def _place(sheet: _Sheet, node: _Node, x: int) -> None:
    sheet.box(node, x, WIDTH - x - 1)
    bottom = sheet.row * _ROW + 8 + _BOX
    sheet.row += 1
    inner = min(x + _STEP, WIDTH - 150)
    for child in node.children:
        y = sheet.row * _ROW + 8 + _BOX // 2
        sheet.lines.append(f"M{x + _STEP // 2} {bottom}V{y}H{inner}")
        _place(sheet, child, inner)


def _fit(text: str, characters: float) -> str:
    text = clean(text)
    most = max(int(characters), 4)
    return text if len(text) <= most else text[: most - 1].rstrip() + "\u2026"
