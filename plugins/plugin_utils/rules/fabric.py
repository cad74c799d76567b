"""Rules D13 to D15 and D17: NCCL's picture of a guest, the engines' own all-reduce, forced grants, switches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

from ..core.finding import Excerpt, Fix, Gain
from ..core.runtime import Engine, EngineLog, NcclTopology
from ..core.snapshot import Fact, PciFunction, Snapshot
from .common import SECURITY_NOTES, counted, gpu_count, listed
from .knowledge import names
from .peers import delivery, delivery_test, few_gpus, grants
from .registry import Fleet, Verdict, rule, verdict

# --- D13: NCCL's picture of a guest ---------------------------------------------------------------------------------

_TOPOLOGYD = "/var/run/nvidia-topologyd/virtualTopology.xml"


@rule(
    "D13",
    "nccl-vm-topology",
    title="NCCL's picture of a guest fits the guest",
    roles=("guest",),
    severity="medium",
    looks_at=("nccl.topology", "nccl.topology_file", "sysfs.pci"),
    why=(
        "In a guest sysfs shows an emulated bus: no link speed, no NUMA node. NCCL then counts each link as Gen3 x16. "
        "A topology file can tell it better; one of another machine makes it crash or choose bad rings."
    ),
    restart="service",
    automation="ask",
    risk="Restarts the service. A file that does not fit this guest is worse than none.",
    verify="NCCL_TOPO_DUMP_FILE=/tmp/topo.xml with one rank, then compare its busid with lspci",
    sources=("NVIDIA/nccl #811", "NVIDIA/nccl #1329", "NVIDIA/nccl #1674", "NCCL 2.30.7 src/graph/xml.cc"),
)
def _nccl_topology(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if none := few_gpus(snapshot):
        yield none
        return
    file, dump = snapshot.nccl.topology_file, snapshot.nccl.topology
    if file.value is not None:
        yield _topology_file(snapshot, file, file.value)
    if dump.value is not None:
        guesses = _guesses(dump.value)
        yield verdict(
            "info" if guesses else "pass",
            f"NCCL guesses in this guest: {listed(guesses)}"
            if guesses
            else "NCCL knows speeds and nodes of this guest",
            dump,
            subject="dump",
        )
    elif file.value is None:
        reason = dump.reason or "no dump of NCCL's topology was recorded (NCCL_TOPO_DUMP_FILE, one rank)"
        yield verdict("unknown", "How NCCL sees this guest is not known", dump, reason=reason)


def _topology_file(snapshot: Snapshot, fact: Fact[NcclTopology], file: NcclTopology) -> Verdict:
    present = {bdf.rpartition(".")[0] for bdf in snapshot.pci.functions.value or {}}
    missing = [bus for bus in file.gpu_bus_ids if _slot(bus) not in present]
    where = file.path or _TOPOLOGYD
    if not snapshot.pci.functions.known or (missing and not snapshot.pci.complete):
        reason = snapshot.pci.functions.reason or "the list of PCI devices is only a part"
        return verdict("unknown", f"Whether {where} fits this guest is not known", fact, subject="file", reason=reason)
    if missing:
        return verdict(
            "fail",
            f"{where} names {listed(missing)}, which this guest does not have",
            fact,
            subject="file",
            fix=Fix(
                "Take the file out of use, or write one for this guest",
                (
                    "# in the unit of the engine: remove NCCL_TOPO_FILE",
                    f"mv {_TOPOLOGYD} {_TOPOLOGYD}.unused",
                    "lspci -D -d 10de:",
                ),
            ),
        )
    return verdict("pass", f"The GPUs of {where} are those of this guest", fact, subject="file")


def _slot(bus: str) -> str:
    """Return a bus id of NCCL without its function: ``0000:01:00.0`` and ``0000:01:00`` alike."""
    return bus.partition(".")[0]


def _guesses(seen: NcclTopology) -> list[str]:
    guessed = []
    if seen.links_unknown:
        guessed.append(f"{counted(seen.links_unknown, 'link')} without speed or width")
    if seen.numa_unknown:
        guessed.append(f"{counted(seen.numa_unknown, 'CPU')} without a NUMA node")
    if seen.gpus_on_cpu:
        guessed.append(f"{counted(seen.gpus_on_cpu, 'GPU')} without a port above")
    return guessed


# --- D14: the engines' own all-reduce -------------------------------------------------------------------------------

CUSTOM_OFF = "--disable-custom-all-reduce"


@rule(
    "D14",
    "engine-custom-all-reduce",
    title="The engine's own all-reduce runs only where peer data arrives",
    roles=("bare_metal", "guest"),
    severity="high",
    looks_at=("engine.log", "engines", "p2p_caches"),
    why=(
        "vLLM and SGLang have an all-reduce kernel of their own. It writes into the other GPU's memory, and it does "
        "not look at NCCL_P2P_DISABLE. For more than two GPUs without NVLink they switch it off themselves."
    ),
    restart="service",
    automation="yes",
    risk=f"Restarts the service; off, two GPUs lose 7 to 12 % where the path works. {SECURITY_NOTES['forced_p2p']}",
    verify="the engine's log, and a known answer of the model",
    sources=("club-3090 #922", "vLLM RFC 51513", "vLLM PR 45004", "sgl-project/sglang #1509"),
    gain=Gain("+7 to +12 %", "tokens/s with two GPUs, where the path works", "club-3090"),
    without_role=True,
)
def _custom_all_reduce(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    logs = snapshot.services.logs.value or ()
    judged = list(_from_logs(logs))
    judged += _from_engines(snapshot)
    yield from judged
    if judged:
        return
    if none := few_gpus(snapshot):
        yield none
    elif snapshot.services.engines.known and not snapshot.services.engines.value:
        yield verdict(
            "not_applicable", "No engine runs here", snapshot.services.engines, reason="no engine process was found"
        )
    else:
        reason = (
            "the engine's log says nothing of its own all-reduce"
            if logs
            else snapshot.services.engines.reason or "no engine with several GPUs was found"
        )
        yield verdict("unknown", "Whether the engine uses its own all-reduce is not known", reason=reason)


def _from_logs(logs: Sequence[EngineLog]) -> Iterator[Verdict]:
    for log in logs:
        if not log.custom_all_reduce:
            continue
        told = Excerpt(log.source, log.custom_all_reduce_line)
        if log.custom_all_reduce == "failed":
            yield verdict(
                "fail",
                "The engine ended in its own all-reduce: the driver does not let these GPUs reach each other",
                told,
                subject=log.subject,
                why="This kernel needs peer access, which is denied here. It is no error of NCCL: over host memory "
                "NCCL still works.",
                fix=Fix("Start the engine without it", (f"# append to the engine's arguments: {CUSTOM_OFF}",)),
                explains=("S1",),
            )
        elif log.custom_all_reduce == "no_p2p":
            cache = f"; it read that from {log.p2p_cache} (rule G9)" if log.p2p_cache else ""
            yield verdict(
                "info",
                f"The engine uses NCCL instead of its own all-reduce: no peer access, or its test failed{cache}",
                told,
                *([Excerpt(log.source, log.p2p_cache_line)] if log.p2p_cache_line else []),
                subject=log.subject,
            )
        elif log.custom_all_reduce == "many_pcie":
            yield verdict(
                "info",
                "The engine uses NCCL instead of its own all-reduce: more than two GPUs without NVLink, by design",
                told,
                subject=log.subject,
            )


def _from_engines(snapshot: Snapshot) -> Iterator[Verdict]:
    engines = [one for one in snapshot.services.engines.value or () if one.name in ("vllm", "sglang")]
    ended = delivery(snapshot)
    for one in engines:
        several = one.tensor_parallel is not None and one.tensor_parallel > 1
        if CUSTOM_OFF in one.options or not several:
            if several:
                yield verdict(
                    "pass", f"{one.origin} runs without its own all-reduce", _said(one), subject=one.origin
                )  # fmt: skip
            continue
        if ended == "failed":
            yield verdict(
                "fail",
                f"Data between the GPUs does not arrive, and {one.origin} may use its own all-reduce",
                _said(one),
                subject=one.origin,
                fix=Fix("Switch it off", (f"# append to the arguments of {one.origin}: {CUSTOM_OFF}",)),
            )
        elif ended == "delivered":
            yield verdict(
                "pass",
                f"{one.origin} may use its own all-reduce: data arrives between the GPUs",
                _said(one),
                subject=one.origin,
            )
        elif one.tensor_parallel == 2 and _may_be_used(snapshot):
            yield verdict(
                "unknown",
                f"{one.origin} may use its own all-reduce over paths that were not tested",
                _said(one),
                subject=one.origin,
                reason=f"delivery was not tested; until then {CUSTOM_OFF} is the safe choice",
            )


def _may_be_used(snapshot: Snapshot) -> bool:
    found = grants(snapshot)
    return found is None or not found.none_granted


def _said(one: Engine) -> Excerpt:
    return Excerpt(one.source, one.command[:300])


# --- D15: forced grants ---------------------------------------------------------------------------------------------

_WAYS = (("reads", 0), ("writes", 4), ("atomics", 8))
_KNOWN = {
    "ForceP2P", "RMForceP2PType", "RMPcieP2PType", "RMForceStaticBar1", "PeerMappingOverride",
    "GrdmaPciTopoCheckOverride", "EnableResizableBar",
}  # fmt: skip


@rule(
    "D15",
    "registry-forced-p2p",
    title="No driver setting forces P2P on or off",
    roles=("bare_metal", "guest"),
    severity="high",
    looks_at=("proc.driver.nvidia.params", "modprobe.d"),
    why=(
        "ForceP2P makes the driver answer OK (or DR) without looking at the hardware. Forced on, the matrix says "
        "nothing; forced off, it explains DR. NVIDIA does not document these settings."
    ),
    restart="reboot",
    automation="never",
    risk=f"Needs a reload of the driver. {SECURITY_NOTES['forced_p2p']} A hang may hold the GPUs until a reset.",
    verify="grep RegistryDwords /proc/driver/nvidia/params   # the file under /sys/module reads empty even when set",
    sources=("open-gpu-kernel-modules nvrm_registry.h", "rtx6kpro", "club-3090"),
    gain=Gain("242 -> 17", "us custom kernel, where the path works", "rtx6kpro, bare metal, forced"),
    without_role=True,
)
def _forced(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    loaded, origin = registry_words(snapshot)
    if loaded is None:
        reason = snapshot.driver.params.reason or "neither the driver's parameters nor modprobe.d were read"
        yield few_gpus(snapshot) or verdict(
            "unknown", "Whether a driver setting forces P2P is not known", reason=reason
        )
        return
    words = {key: value for key, value in loaded.items() if key in _KNOWN}
    force = words.get("ForceP2P")
    where = "is loaded" if origin.source.startswith("proc.") else "is configured"
    if force is None:
        others = [f"{key}={value}" for key, value in loaded.items()]
        yield verdict(
            "info" if others else "pass",
            f"The driver has registry settings, none of them forces P2P: {listed(others)}"
            if others
            else "No registry setting of the driver forces P2P",
            origin,
        )
        return
    on = [way for way, shift in _WAYS if force >> shift & 3 == 1]
    off = [way for way, shift in _WAYS[:2] if force >> shift & 3 == 0]
    ended = delivery(snapshot)
    if on and ended == "delivered":
        yield verdict("info", f"ForceP2P {where} ({listed(on)} on), and delivery was verified", origin)
    elif on:
        yield verdict(
            "warn",
            f"ForceP2P {where} ({listed(on)} on): an OK of the driver means nothing until delivery is tested",
            origin,
            severity="medium",
            fix=Fix(
                "Test delivery; take the setting out where it fails",
                (*delivery_test(gpu_count(snapshot).value), "grep -rn ForceP2P /etc/modprobe.d/"),
            ),
            explains=("D5",),
        )
    elif off:
        yield verdict(
            "fail",
            f"ForceP2P {where} and switches {listed(off)} off",
            origin,
            fix=Fix(
                "Take ForceP2P out of the options of the module, rebuild the initial RAM disk, reboot",
                ("grep -rn ForceP2P /etc/modprobe.d/", "update-initramfs -u"),
            ),
            explains=("D5", "D6"),
        )
    else:
        yield verdict("pass", "ForceP2P leaves the choice to the driver", origin)


def registry_words(snapshot: Snapshot) -> tuple[dict[str, int] | None, Excerpt]:
    """Return the driver's registry settings as numbers, and the line that has them; None where none was read."""
    params = snapshot.driver.params
    if params.value is not None and "RegistryDwords" in params.value:
        text = params.value["RegistryDwords"]
        return _words(text), Excerpt(params.source, f"RegistryDwords: {text}")
    modprobe = snapshot.kernel.modprobe
    for line in modprobe.value or ():
        found = re.search(r"NVreg_RegistryDwords=(\"[^\"]*\"|'[^']*'|\S+)", line)
        # An open quote: the line was cut.
        if found and re.match(r"options\s+nvidia\b", line) and not re.fullmatch(r"[\"'][^\"']*", found[1]):
            return _words(found[1]), Excerpt(modprobe.source, line)
    return None, Excerpt("", "")


def _words(text: str) -> dict[str, int]:
    found = {}
    for word in text.strip("\"' ").split(";"):
        key, _, value = word.strip().partition("=")
        if re.fullmatch(r"0[xX][0-9a-fA-F]{1,8}|\d{1,10}", value.strip()):
            found[key.strip()] = int(value, 0) if not value.strip().isdigit() else int(value)
    return found


# --- D17: switches --------------------------------------------------------------------------------------------------


@rule(
    "D17",
    "host-switch-real",
    title="GPUs below one PCIe switch are known as such to the driver",
    roles=("bare_metal",),
    severity="info",
    looks_at=("sysfs.pci", "lspci.vvv"),
    why=(
        "Below a common switch peer traffic need not reach the root complex. The driver's open part knows some "
        "switches by their id; for others the GPU's firmware decides. An emulated switch never counts."
    ),
    automation="never",
    verify="lspci -tv; nvidia-smi topo -p2p r",
    sources=("open-gpu-kernel-modules pcie_switch_ref.h", "QEMU xio3130"),
)
def _switches(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    functions = snapshot.pci.functions.value
    if functions is None:
        yield verdict("unknown", "The PCIe switches are not known", reason=snapshot.pci.functions.reason)
        return
    gpus = snapshot.pci.gpus()
    if len(gpus) < 2:
        yield few_gpus(snapshot) or verdict(
            "unknown", "The PCIe switches above the GPUs are not known", reason="the list of PCI devices is only a part"
        )
        return
    above = {gpu.bdf: _bridges_above(functions, gpu) for gpu in gpus}
    if not any(above.values()):
        yield verdict(
            "unknown", "The PCIe switches above the GPUs are not known", reason="no parent of a GPU was read (lspci -t)"
        )
        return
    shared: dict[str, list[str]] = {}
    for first, second in itertools.combinations(gpus, 2):
        meeting = _meeting(above[first.bdf], above[second.bdf])
        if meeting:
            shared.setdefault(meeting.bdf, []).extend((first.bdf, second.bdf))
    for bdf, under in shared.items():
        switch = functions[bdf]
        gpus_under = listed(list(dict.fromkeys(under)), 8)
        yield verdict("info", f"{gpus_under} meet below {_switch(switch)}", _bridge(switch), subject=bdf)
    if not shared:
        yield verdict(
            "not_applicable",
            "No two GPUs are below a common PCIe switch",
            snapshot.pci.functions,
            reason="their paths meet at the host bridge",
        )


def _bridges_above(functions: Mapping[str, PciFunction], gpu: PciFunction) -> list[PciFunction]:
    """Return the bridges above a GPU, the nearest first; the root port is the last."""
    found: list[PciFunction] = []
    at = functions.get(gpu.parent or "")
    while at is not None and at not in found and len(found) < 16:
        found.append(at)
        at = functions.get(at.parent or "")
    return found


def _meeting(first: Sequence[PciFunction], second: Sequence[PciFunction]) -> PciFunction | None:
    """Return the upstream port of the switch where two paths meet: a bridge of both that is no root port."""
    others = {one.bdf for one in second[:-1]}
    return next((one for one in first[:-1] if one.bdf in others), None)


def _switch(one: PciFunction) -> str:
    identity = f"{one.vendor or '????'}:{one.device or '????'}"
    name = f"{one.name} ({identity})" if one.name else identity
    if identity in names("pci.emulated_switches"):
        return f"{name}, an emulated switch that does not count"
    if any(identity.startswith(prefix) for prefix in names("pci.p2p_switches")):
        return f"{name}, which the driver takes for a common switch"
    return f"{name}, which is not on the driver's open list: the firmware of the GPUs decides"


def _bridge(one: PciFunction) -> Excerpt:
    return Excerpt(one.source or "sysfs.pci", f"{one.bdf} {one.name} [{one.vendor}:{one.device}]".replace("  ", " "))
