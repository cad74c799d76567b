"""libvirt: domain XML, in the words of a Proxmox configuration, so that one rule judges both.

What QEMU is told decides the translation (libvirt's ``src/qemu/qemu_command.c``): ``host-passthrough`` is
``-cpu host``, ``<hidden state='on'/>`` is ``kvm=off``, ``maxphysaddr`` is ``phys-bits`` or ``host-phys-bits``, a
hostdev is ``-device vfio-pci`` with the id ``hostdevN`` in the order of all hostdevs.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from xml.etree import ElementTree

from ..core.snapshot import HostPci, VmConfig
from .text import RefusedError, lines, whole_number

# A domain has some ten kilobytes. Entities and external parts have no place in it: libvirt never writes any.
_MOST_CHARACTERS = 1024 * 1024
_FORBIDDEN = re.compile(r"<!(?:DOCTYPE|ENTITY|ELEMENT|ATTLIST|NOTATION)", re.IGNORECASE)
_DOMAIN = re.compile(r"<domain\b(?:[^>]*/>|.*?</domain>)", re.DOTALL)
_QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"
_PCIE_PORTS = ("pcie-root-port", "pcie-switch-downstream-port")
# libvirt's units (docs/formatdomain); KB and its like are powers of 1000, which it never writes itself.
_UNITS = {
    "b": 1,
    "bytes": 1,
    "k": 1 << 10,
    "KiB": 1 << 10,
    "M": 1 << 20,
    "MiB": 1 << 20,
    "G": 1 << 30,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
}

Put = Callable[..., None]


def domain(text: str, source: str) -> VmConfig:
    """Read one ``<domain>``, as ``virsh dumpxml`` prints it or a file of ``/etc/libvirt/qemu`` holds it.

    ``lines`` of the result hold the elements with the blanks of each line break folded into one. Raises RefusedError
    where the text is no complete domain, or holds a document type or entities.
    """
    plain = "\n".join(lines(text))
    if len(plain) > _MOST_CHARACTERS:
        raise RefusedError("is too long for the XML of a domain")
    if _FORBIDDEN.search(plain):
        raise RefusedError("declares a document type or entities, which the XML of a domain never does")
    found = _DOMAIN.search(plain)
    if not found:
        raise RefusedError("holds no complete <domain> element")
    markup = found[0]
    if "qemu:" in markup and "xmlns:qemu" not in markup:
        markup = markup.replace("<domain", f'<domain xmlns:qemu="{_QEMU[1:-1]}"', 1)
    try:
        return _config(ElementTree.fromstring(markup), source)  # noqa: S314 (no document type, so no entities)
    except ElementTree.ParseError as error:
        raise RefusedError(f"is not well-formed XML: {error}") from None
    except RecursionError:
        raise RefusedError("has elements nested deeper than any domain has") from None


def _config(root: ElementTree.Element, source: str) -> VmConfig:
    name = (root.findtext("name") or "").strip()
    if not name:
        raise RefusedError("is a domain without a name")
    settings: dict[str, str] = {}
    printed: dict[str, str] = {}

    def put(key: str, value: str | None, *shown: ElementTree.Element | None) -> None:
        if value is not None:
            settings[key] = value
            printed[key] = "\n".join(_markup(one) for one in shown if one is not None)

    features, cpu, machine = root.find("features"), root.find("cpu"), root.find("os/type")
    put("cpu", _cpu(root), cpu, *_signatures(features))
    put("machine", _machine(root), machine, root.find("devices/iommu"))
    put("bios", "ovmf" if _is_efi(root) else "seabios", root.find("os"))
    put("memory", _mebibytes(root.find("memory")), root.find("memory"))
    put("balloon", _balloon(root), root.find("devices/memballoon"), root.find("currentMemory"))
    put("cores", (root.findtext("vcpu") or "").strip() or None, root.find("vcpu"))
    put("affinity", _affinity(root), root.find("cputune"), root.find("vcpu"))
    put("hugepages", _huge_pages(root), root.find("memoryBacking"))
    put("smbios1", _uuid(root), root.find("uuid"))
    _put_numa(root, put)
    for index, mac in enumerate(root.iterfind("devices/interface/mac")):
        put(f"net{index}", f"virtio={mac.get('address', '')}", mac)
    if _has_keys(root):
        put("efidisk0", "nvram,pre-enrolled-keys=1", root.find("os"))
    elif root.find("os/nvram") is not None or root.get("firmware") or _is_efi(root):
        put("efidisk0", "nvram", root.find("os"))
    devices = tuple(_devices(root))
    arguments = _arguments(root, devices)
    if arguments:
        put("args", shlex.join(arguments), root.find(f"{_QEMU}commandline"), root.find(f"{_QEMU}override"))
    return VmConfig(
        vmid=name,
        manager="libvirt",
        # An element that libvirt's own XML does not hold is not set, whoever printed it.
        whole=True,
        settings=settings,
        lines=printed,
        hostpci=devices,
        description=(root.findtext("description") or "").strip(),
        source=source,
    )


def _markup(element: ElementTree.Element) -> str:
    """Return an element as it is written, on as few lines as it has. Namespaces get their usual prefix."""
    ElementTree.register_namespace("qemu", _QEMU[1:-1])
    text = ElementTree.tostring(element, encoding="unicode")
    return re.sub(r"\s*\n\s*", " ", text.replace(f' xmlns:qemu="{_QEMU[1:-1]}"', "")).strip()


def _signatures(features: ElementTree.Element | None) -> tuple[ElementTree.Element | None, ...]:
    return () if features is None else (features.find("kvm/hidden"), features.find("hyperv/vendor_id"))


def _is_on(element: ElementTree.Element | None) -> bool:
    return element is not None and element.get("state") == "on"


def _cpu(root: ElementTree.Element) -> str | None:
    cpu = root.find("cpu")
    words = []
    if cpu is not None:
        mode = cpu.get("mode", "custom")
        model = (cpu.findtext("model") or "").strip()
        words.append(
            "host" if mode in ("host-passthrough", "maximum") else mode if mode == "host-model" else model or "qemu64"
        )
        bits = cpu.find("maxphysaddr")
        if bits is not None and bits.get("mode") == "passthrough":
            words.append(f"phys-bits={bits.get('limit') or 'host'}")
        elif bits is not None and bits.get("bits"):
            words.append(f"phys-bits={bits.get('bits')}")
    hidden, vendor = root.find("features/kvm/hidden"), root.find("features/hyperv/vendor_id")
    if _is_on(hidden):
        words = [*(words or ["qemu64"]), "hidden=1"]
    if vendor is not None and _is_on(vendor):
        words = [*(words or ["qemu64"]), f"hv-vendor-id={vendor.get('value', '')}"]
    return ",".join(words) if words else None


def _machine(root: ElementTree.Element) -> str | None:
    kind = root.find("os/type")
    machine = kind.get("machine") if kind is not None else None
    iommu = root.find("devices/iommu")
    if machine is None or iommu is None:
        return machine
    return f"{machine},viommu={iommu.get('model', 'intel')}"


def _is_efi(root: ElementTree.Element) -> bool:
    os, loader = root.find("os"), root.find("os/loader")
    return (os is not None and os.get("firmware") == "efi") or (loader is not None and loader.get("type") == "pflash")


def _has_keys(root: ElementTree.Element) -> bool:
    asked = {one.get("name"): one.get("enabled") for one in root.iterfind("os/firmware/feature")}
    if "enrolled-keys" in asked:
        return asked["enrolled-keys"] == "yes"
    template = root.find("os/nvram")
    # Distributions name the template with keys for what it is: OVMF_VARS_4M.ms.fd, OVMF_VARS.secboot.fd.
    return template is not None and bool(re.search(r"\.ms\.|secboot", template.get("template", "")))


def _mebibytes(element: ElementTree.Element | None) -> str | None:
    return None if element is None else _in_mebibytes(element.text, element.get("unit"))


def _in_mebibytes(amount: str | None, unit: str | None) -> str | None:
    number, factor = whole_number((amount or "").strip()), _UNITS.get(unit or "KiB")
    return None if number is None or factor is None else str(number * factor >> 20)


def _balloon(root: ElementTree.Element) -> str | None:
    balloon = root.find("devices/memballoon")
    if balloon is not None and balloon.get("model") == "none":
        return "0"
    return _mebibytes(root.find("currentMemory"))


def _affinity(root: ElementTree.Element) -> str | None:
    pins = [one.get("cpuset", "") for one in root.iterfind("cputune/vcpupin")]
    vcpu = root.find("vcpu")
    whole = vcpu.get("cpuset") if vcpu is not None else None
    return ",".join(dict.fromkeys(pins)) or whole or None


def _huge_pages(root: ElementTree.Element) -> str | None:
    if root.find("memoryBacking/hugepages") is None:
        return None
    page = root.find("memoryBacking/hugepages/page")
    size = _in_mebibytes(page.get("size"), page.get("unit")) if page is not None else None
    return size or "any"


def _uuid(root: ElementTree.Element) -> str | None:
    uuid = (root.findtext("uuid") or "").strip()
    return f"uuid={uuid}" if uuid else None


def _put_numa(root: ElementTree.Element, put: Put) -> None:
    """Translate guest cells and the host nodes that their memory comes from."""
    cells = list(root.iterfind("cpu/numa/cell"))
    tuned = {one.get("cellid"): one for one in root.iterfind("numatune/memnode")}
    everywhere = root.find("numatune/memory")
    # Without cells there is no NUMA in the guest, but all of its memory may be bound to host nodes.
    put("numa", "1" if cells or everywhere is not None else "0", root.find("numatune"))
    for index, cell in enumerate(cells):
        node = tuned.get(cell.get("id", str(index)), everywhere)
        words = [f"cpus={cell.get('cpus', '').replace(',', ';')}"]
        if node is not None and node.get("nodeset"):
            words.append(f"hostnodes={str(node.get('nodeset')).replace(',', ';')}")
            words.append(f"policy={'bind' if node.get('mode', 'strict') == 'strict' else node.get('mode')}")
        put(f"numa{index}", ",".join(words), cell, node)
    if not cells and everywhere is not None and everywhere.get("nodeset"):
        nodes = str(everywhere.get("nodeset")).replace(",", ";")
        put("numa0", f"cpus=,hostnodes={nodes},policy=bind", everywhere)


def _devices(root: ElementTree.Element) -> Iterator[HostPci]:
    ports = {
        one.get("index"): one.get("model", "")
        for one in root.iterfind("devices/controller")
        if one.get("type") == "pci"
    }
    for index, device in enumerate(root.iterfind("devices/hostdev")):
        if device.get("type") != "pci":
            continue
        place = device.find("source/address")
        bdf = _address(place) if place is not None else None
        if bdf is None:
            continue
        options = {}
        where = device.find("address")
        if where is not None and where.get("bus") is not None:
            bus = whole_number(str(int(str(where.get("bus")), 16))) if _is_hex(where.get("bus")) else None
            options["pcie"] = "1" if ports.get(str(bus)) in _PCIE_PORTS else "0"
        rom = device.find("rom")
        if rom is not None and rom.get("bar"):
            options["rombar"] = "1" if rom.get("bar") == "on" else "0"
        if rom is not None and rom.get("file"):
            options["romfile"] = str(rom.get("file"))
        alias = device.find("alias")
        named = alias.get("name") if alias is not None else None
        yield HostPci(index, (bdf,), "", options, _markup(device), named or f"hostdev{index}")


def _is_hex(text: str | None) -> bool:
    return bool(re.fullmatch(r"(?:0x)?[0-9a-fA-F]{1,8}", text or ""))


def _address(element: ElementTree.Element) -> str | None:
    parts = [element.get(name, "0") for name in ("domain", "bus", "slot", "function")]
    if not all(_is_hex(part) for part in parts) or element.get("bus") is None:
        return None
    domain, bus, slot, function = (int(part, 16) for part in parts)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{function:x}"


def _arguments(root: ElementTree.Element, devices: tuple[HostPci, ...]) -> list[str]:
    """Return QEMU's extra arguments; a property of ``<qemu:override>`` comes as the ``-set`` that would do the same.

    A device that has an alias of its own is called ``hostdevN`` in them, as others are.
    """
    numbered = {one.name: f"hostdev{one.index}" for one in devices}
    words = []
    for one in root.iterfind(f"{_QEMU}commandline/{_QEMU}arg"):
        word = one.get("value", "")
        alias = re.match(r"device\.([^.]+)\.", word)
        words.append(word.replace(alias[1], numbered[alias[1]], 1) if alias and alias[1] in numbered else word)
    for device in root.iterfind(f"{_QEMU}override/{_QEMU}device"):
        target = device.get("alias", "")
        for prop in device.iterfind(f"{_QEMU}frontend/{_QEMU}property"):
            words += ["-set", f"device.{numbered.get(target, target)}.{prop.get('name', '')}={prop.get('value', '')}"]
    return words
