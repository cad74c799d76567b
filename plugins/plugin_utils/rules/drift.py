"""Drift: what differs between hosts that should be the same.

Hosts are compared within a group: one role and one GPU model. A difference is between values that were read; what
could not be read on a host is listed as unknown, and is never a difference.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from ..core.snapshot import CommandLine, Fact, Gpu, Snapshot, unknown
from .common import device_id, gpu_count, has_no_gpu
from .knowledge import gpu_model, gpu_model_by_name
from .registry import Fleet

T = TypeVar("T")

# What names this machine or its disks: different by nature on every host.
_OWN_TOKENS = frozenset(
    ("BOOT_IMAGE", "initrd", "root", "rootflags", "resume", "resume_offset", "cryptdevice", "ip", "hostname")
)
_OWN_PREFIXES = ("rd.luks", "rd.lvm", "rd.md", "systemd.machine_id")
# Where each host of a fleet is reached, and what nobody else may know.
_OWN_OPTIONS = frozenset(("--host", "--port", "--api-key", "--served-model-name"))
_ENGINE_PATH = re.compile(r"/engines/[a-z_]+-([0-9][^/\s]*)/")
_NOT_SET = "not set"
NO_GPU = "no NVIDIA GPU"


@dataclass(frozen=True)
class Share:
    """One value and the hosts that have it."""

    value: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Unread:
    """Hosts on which a value could not be read, for one reason."""

    reason: str
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class Aspect:
    """One thing that was compared.

    ``majority`` is the value that more hosts have than any other, two at least; None where there is no such value.
    ``others`` are all other values. ``unknown`` names the hosts that are not part of the comparison.
    """

    key: str
    title: str
    majority: Share | None
    others: tuple[Share, ...]
    unknown: tuple[Unread, ...]

    @property
    def differs(self) -> bool:
        """Whether two hosts have different values."""
        return len(self.others) > (self.majority is None)

    @property
    def agrees(self) -> bool:
        """Whether two hosts or more have a value, and all of them the same."""
        return self.majority is not None and not self.others


@dataclass(frozen=True)
class Group:
    """Hosts of one role with GPUs of one model, and what was compared between them."""

    role: str
    gpu_model: str
    hosts: tuple[str, ...]
    differences: tuple[Aspect, ...]
    same: tuple[str, ...]
    unknown: tuple[Aspect, ...]


@dataclass(frozen=True)
class Drift:
    """All groups of two hosts or more, and the hosts that were compared with none, each with the reason."""

    groups: tuple[Group, ...] = ()
    not_compared: tuple[Unread, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether any difference was found."""
        return any(group.differences for group in self.groups)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        shape: dict[str, Any] = asdict(self)
        return shape


# --- what is compared -----------------------------------------------------------------------------------------------


def _text(fact: Fact[Any]) -> Fact[str]:
    return Fact(str(fact.value), fact.source) if fact.known else unknown(fact.reason, fact.source)


def _driver_version(snapshot: Snapshot) -> Fact[str]:
    driver = snapshot.driver
    smi = driver.smi.value
    if driver.loaded_version.known:
        return _text(driver.loaded_version)
    if smi is not None and smi.driver_version:
        return Fact(smi.driver_version, driver.smi.source)
    if smi is not None and smi.state != "ok":
        return unknown(f"nvidia-smi does not work ({smi.state.replace('_', ' ')})", driver.smi.source)
    return unknown(driver.loaded_version.reason or driver.smi.reason)


def _per_gpu(tell: Callable[[Gpu], object | None], unit: str = "") -> Callable[[Snapshot], Fact[str]]:
    """Return a reader of one value of every GPU: ``600 W``, or ``600 W (7), 450 W (1)`` where GPUs differ."""

    def read(snapshot: Snapshot) -> Fact[str]:
        if not snapshot.gpus.known:
            return unknown(snapshot.gpus.reason, snapshot.gpus.source)
        values = [tell(gpu) for gpu in snapshot.gpus.value or ()]
        return _spread([None if one is None else f"{one}{unit}" for one in values], snapshot.gpus.source)

    return read


def _spread(values: Sequence[str | None], source: str) -> Fact[str]:
    told = [one for one in values if one is not None]
    if len(told) < len(values) or not told:
        missing = f"not told for {len(values) - len(told)} of {len(values)} GPUs" if told else "no GPU tells it"
        return unknown(missing, source)
    counts = Counter(told)
    if len(counts) == 1:
        return Fact(told[0], source)
    ranked = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return Fact(", ".join(f"{value} ({count})" for value, count in ranked), source)


def _vbios(gpu: Gpu) -> str | None:
    for key in ("VBIOS Version", "vbios_version"):
        if gpu.raw.get(key, "") not in ("", "N/A", "[N/A]"):
            return gpu.raw[key]
    return None


def _watts(gpu: Gpu) -> str | None:
    return None if gpu.power_limit_w is None else f"{gpu.power_limit_w:g}"


def _link_width(snapshot: Snapshot) -> Fact[str]:
    functions = snapshot.pci.functions
    if functions.known and snapshot.pci.complete and snapshot.pci.gpus():
        widths = [None if one.link_width is None else f"x{one.link_width}" for one in snapshot.pci.gpus()]
        if None not in widths:
            return _spread(widths, functions.source)
    return _per_gpu(lambda gpu: None if gpu.link_width_current is None else f"x{gpu.link_width_current}")(snapshot)


def _gpus(snapshot: Snapshot) -> Fact[str]:
    count = gpu_count(snapshot)
    if not count.known:
        return unknown(count.reason, count.source)
    counts = Counter(_models(snapshot))
    if sum(counts.values()) != count.value:
        return Fact(f"{count.value} GPUs", count.source)
    ranked = sorted(counts.items(), key=lambda one: (-one[1], one[0]))
    return Fact(", ".join(f"{number}x {name}" for name, number in ranked) or "none", count.source)


def _system(snapshot: Snapshot) -> Fact[str]:
    machine = snapshot.machine
    if not machine.os_id.known:
        return unknown(machine.os_id.reason, machine.os_id.source)
    return Fact(f"{machine.os_id.value} {machine.os_version.value or ''}".strip(), machine.os_id.source)


@dataclass(frozen=True)
class _Compared:
    """One value of a host. ``of``: what kind of group has it (``_applies``)."""

    key: str
    title: str
    of: str
    read: Callable[[Snapshot], Fact[str]]


def _applies(of: str, role: str, model: str) -> bool:
    """Whether a group has this: all, gpu (hosts with GPUs), driver (with GPUs of their own use), hypervisor."""
    if of == "hypervisor":
        return role == "hypervisor"
    return of == "all" or (model != NO_GPU and (of == "gpu" or role != "hypervisor"))


_COMPARED = (
    _Compared("gpus", "GPUs", "gpu", _gpus),
    _Compared("driver.version", "NVIDIA driver", "driver", _driver_version),
    _Compared("driver.flavour", "driver modules", "driver", lambda one: _text(one.driver.loaded_flavour)),
    _Compared("gpus.vbios", "VBIOS", "driver", _per_gpu(_vbios)),
    _Compared("gpus.power_limit", "power limit", "driver", _per_gpu(_watts, " W")),
    _Compared("gpus.persistence", "persistence mode", "driver", _per_gpu(lambda gpu: gpu.persistence)),
    _Compared("gpus.ecc", "ECC", "driver", _per_gpu(lambda gpu: gpu.ecc)),
    _Compared("gpus.link_width", "PCIe link width", "gpu", _link_width),
    _Compared("nccl.version", "NCCL", "driver", lambda one: _text(one.nccl.version)),
    _Compared("kernel.release", "kernel", "all", lambda one: _text(one.kernel.release)),
    _Compared("machine.os", "operating system", "all", _system),
    _Compared("machine.product", "machine model", "all", lambda one: _text(one.machine.product_name)),
    _Compared("machine.bios", "BIOS", "all", lambda one: _text(one.machine.bios_version)),
    _Compared("cpu.model", "CPU", "all", lambda one: _text(one.cpu.model_name)),
    _Compared("vm.qemu_version", "QEMU", "hypervisor", lambda one: _text(one.vm.qemu_version)),
    _Compared("vm.pve_version", "Proxmox VE", "hypervisor", lambda one: _text(one.vm.pve_version)),
)


def _command_line(snapshot: Snapshot) -> Fact[Mapping[str, str]]:
    fact: Fact[CommandLine] = snapshot.kernel.command_line
    if fact.value is None:
        return unknown(fact.reason, fact.source)
    found: dict[str, str] = {}
    for name, value in fact.value.tokens:
        if name in _OWN_TOKENS or name.startswith(_OWN_PREFIXES):
            continue
        said = "given" if value is None else value
        found[name] = f"{found[name]} {said}" if name in found else said
    return Fact(found, fact.source)


def _nccl_settings(snapshot: Snapshot) -> Fact[Mapping[str, str]]:
    fact = snapshot.nccl.settings
    if fact.value is None:
        return unknown(fact.reason, fact.source)
    found: dict[str, list[str]] = {}
    for one in fact.value:
        found.setdefault(one.name, []).append(one.value)
    return Fact({name: ", ".join(dict.fromkeys(values)) for name, values in found.items()}, fact.source)


def _engines(snapshot: Snapshot) -> Fact[Mapping[str, str]]:
    """Return the version of each engine, as far as the path of its program tells it (design: engines/NAME-VERSION)."""
    fact = snapshot.services.engines
    if fact.value is None:
        return unknown(fact.reason, fact.source)
    found: dict[str, set[str]] = {}
    for one in fact.value:
        hit = _ENGINE_PATH.search(one.command)
        found.setdefault(one.name, set()).add(hit[1] if hit else "version not told")
    return Fact({name: ", ".join(sorted(versions)) for name, versions in found.items()}, fact.source)


def _engine_options(snapshot: Snapshot) -> Fact[Mapping[str, str]]:
    fact = snapshot.services.engines
    if fact.value is None:
        return unknown(fact.reason, fact.source)
    found: dict[str, set[str]] = {}
    for one in fact.value:
        for option, value in one.options.items():
            if option not in _OWN_OPTIONS:
                found.setdefault(f"{one.name} {option}", set()).add(value or "given")
    return Fact({name: ", ".join(sorted(values)) for name, values in found.items()}, fact.source)


def _limits(snapshot: Snapshot) -> Fact[Mapping[str, str]]:
    """Return the soft limits of the engines, or of the machine where no engine tells any."""
    engines = snapshot.services.engines
    found: dict[str, set[int]] = {}
    for one in engines.value or ():
        for name, value in one.limits.items():
            found.setdefault(name, set()).add(value)
    source = engines.source
    if not found:
        fact = snapshot.limits.values
        if fact.value is None:
            return unknown(fact.reason, fact.source)
        found, source = {name: {value} for name, value in fact.value.items()}, fact.source
    words = {name: sorted("unlimited" if one == -1 else str(one) for one in values) for name, values in found.items()}
    return Fact({name: ", ".join(values) for name, values in words.items()}, source)


# Tables are compared key by key: (key, title, of as in _Compared, reader).
_TABLES: tuple[tuple[str, str, str, Callable[[Snapshot], Fact[Mapping[str, str]]]], ...] = (
    ("kernel.command_line", "kernel command line", "all", _command_line),
    ("nccl.settings", "NCCL settings", "driver", _nccl_settings),
    ("services.engines", "engine", "driver", _engines),
    ("services.options", "engine options", "driver", _engine_options),
    ("limits", "limits", "driver", _limits),
)


# --- grouping and comparing -----------------------------------------------------------------------------------------


def _models(snapshot: Snapshot) -> list[str]:
    """Return the model of each GPU, by its PCI id where that is known: one model has one name, whoever tells it."""
    functions = [one for one in snapshot.pci.gpus() if not one.physfn]
    if functions:
        return [_model_name(one.device, one.name) for one in functions]
    return [_model_name(device_id(gpu), gpu.name) for gpu in snapshot.gpus.value or ()]


def _model_name(device: str | None, told: str) -> str:
    model = gpu_model(device) or gpu_model_by_name(told)
    if model is not None and model.name:
        return model.name
    if device:
        return f"PCI id 10de:{device}"
    return told.removeprefix("NVIDIA ").strip() or "unknown model"


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """What is compared of one host: small enough to keep for ten thousand of them.

    ``group``: role and GPU model, or why the host is in none. ``values`` and ``tables`` are those of ``_COMPARED`` and
    ``_TABLES`` that apply to the group, in that order.
    """

    host: str
    group: tuple[str, str] | str
    values: tuple[Fact[str], ...]
    tables: tuple[Fact[Mapping[str, str]], ...]


def row(snapshot: Snapshot) -> Row:
    """Read what is compared of one host."""
    group = _group_of(snapshot)
    if isinstance(group, str):
        return Row(snapshot.host, group, (), ())
    values = tuple(_lean(one.read(snapshot)) for one in _COMPARED if _applies(one.of, *group))
    tables = tuple(_lean_table(table(snapshot)) for _, _, of, table in _TABLES if _applies(of, *group))
    return Row(snapshot.host, group, values, tables)


def _group_of(snapshot: Snapshot) -> tuple[str, str] | str:
    models = Counter(_models(snapshot))
    if snapshot.role.value is None:
        return f"the role of the machine is not known: {snapshot.role.reason}"
    if models:
        return snapshot.role.value, min(models, key=lambda name: (-models[name], name))
    return (snapshot.role.value, NO_GPU) if has_no_gpu(snapshot) else "the model of the GPUs is not known"


def _lean(fact: Fact[str]) -> Fact[str]:
    return _value(fact.value, fact.reason)


def _lean_table(fact: Fact[Mapping[str, str]]) -> Fact[Mapping[str, str]]:
    return _table_value(None if fact.value is None else tuple(fact.value.items()), fact.reason)


# Hosts share most of their values: one object for each.
@functools.lru_cache(maxsize=65536)
def _value(value: str | None, reason: str) -> Fact[str]:
    return Fact(value, reason=reason)


@functools.lru_cache(maxsize=65536)
def _table_value(items: tuple[tuple[str, str], ...] | None, reason: str) -> Fact[Mapping[str, str]]:
    return Fact(None if items is None else dict(items), reason=reason)


def compare(fleet: Fleet) -> Drift:
    """Return what differs within each group of hosts. The order of the hosts does not matter."""
    return compare_rows(map(row, fleet.values()))


def compare_rows(rows: Iterable[Row]) -> Drift:
    """Return what differs between hosts of which only this is at hand."""
    groups: dict[tuple[str, str], list[Row]] = {}
    alone: list[tuple[str, str]] = []
    count = 0
    for one in sorted(rows, key=lambda one: one.host):
        count += 1
        if isinstance(one.group, str):
            alone.append((one.group, one.host))
        else:
            groups.setdefault(one.group, []).append(one)
    made = []
    for (role, model), members in sorted(groups.items()):
        if len(members) == 1:
            alone.append((f"no other {role.replace('_', ' ')} with {model}", members[0].host))
        else:
            made.append(_group(role, model, members))
    # One host alone is no fleet: there is nothing to say about it.
    return Drift(tuple(made), _by_reason(alone) if count > 1 else ())


def _group(role: str, model: str, rows: Sequence[Row]) -> Group:
    compared = [one for one in _COMPARED if _applies(one.of, role, model)]
    aspects = [
        _aspect(one.key, one.title, {row_.host: row_.values[at] for row_ in rows}) for at, one in enumerate(compared)
    ]
    tables = [(key, title) for key, title, of, _ in _TABLES if _applies(of, role, model)]
    for at, (key, title) in enumerate(tables):
        aspects += _table(key, title, {row_.host: row_.tables[at] for row_ in rows})
    return Group(
        role=role,
        gpu_model=model,
        hosts=tuple(row_.host for row_ in rows),
        differences=tuple(one for one in aspects if one.differs),
        same=tuple(one.title for one in aspects if one.agrees),
        unknown=tuple(one for one in aspects if one.unknown),
    )


def _table(key: str, title: str, tables: Mapping[str, Fact[Mapping[str, str]]]) -> list[Aspect]:
    """Compare tables key by key. The first aspect stands for the whole table, the others for the keys that differ."""
    read = {host: fact.value for host, fact in tables.items() if fact.value is not None}
    unread = _by_reason([(fact.reason, host) for host, fact in tables.items() if fact.value is None])
    names = sorted({name for table in read.values() for name in table})
    rows = [
        _aspect(
            f"{key}.{name}", f"{title}: {name}", {host: Fact(table.get(name, _NOT_SET)) for host, table in read.items()}
        )
        for name in names
    ]
    differing = [one for one in rows if one.differs]
    equal = Share("the same", tuple(read)) if len(read) > 1 and not differing else None
    return [Aspect(key, title, equal, (), unread), *differing]


def _aspect(key: str, title: str, facts: Mapping[str, Fact[str]]) -> Aspect:
    by_value: dict[str, list[str]] = {}
    unread: list[tuple[str, str]] = []
    for host, fact in facts.items():
        if fact.value is None:
            unread.append((fact.reason, host))
        else:
            by_value.setdefault(fact.value, []).append(host)
    ranked = sorted(by_value.items(), key=lambda one: (-len(one[1]), one[0]))
    shares = [Share(value, tuple(hosts)) for value, hosts in ranked]
    leads = bool(shares) and len(shares[0].hosts) > max([1, *(len(one.hosts) for one in shares[1:])])
    return Aspect(key, title, shares[0] if leads else None, tuple(shares[1:] if leads else shares), _by_reason(unread))


def _by_reason(pairs: Iterable[tuple[str, str]]) -> tuple[Unread, ...]:
    found: dict[str, list[str]] = {}
    for reason, host in pairs:
        found.setdefault(reason or "not collected", []).append(host)
    return tuple(Unread(reason, tuple(hosts)) for reason, hosts in found.items())
