"""Rules D: the P2P clique, the driver's grants, and what NCCL makes of them."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..core.finding import RUNG_CLAIMED, Excerpt, Fix, Gain
from ..core.snapshot import Approval, Fact, Setting, Snapshot, VmConfig
from .common import MENLO_GAIN, RISK_STOP, SECURITY_NOTES, gpu_count, listed, stop_risk, virtual_gpus
from .join import Home, home_of
from .knowledge import gpu_model, gpu_model_by_name, names, number, version, version_text, version_tuple
from .machines import (
    CLIQUE,
    DeviceSet,
    Passed,
    change_vm,
    conf_line,
    device_sets,
    display_functions,
    dotted,
    each_vm,
    gpu_lines,
    runs_as_asked,
    vm,
    vm_arguments,
    vmid,
    with_function,
)
from .peers import Grants, components, delivery, delivery_test, grants, groups, shown, why_no_grants
from .registry import Fleet, Verdict, rule, verdict

_CLIQUE_NOTE = (
    f"{SECURITY_NOTES['forced_p2p']} A grant without delivery makes NCCL hang or return wrong values, and a hang may "
    "keep the GPUs busy until they are reset. So the test of delivery is part of the fix, and the way back must be "
    "ready."
)
_CLIQUE_RISK = f"{RISK_STOP} {_CLIQUE_NOTE}"
_NO_PUBLIC_PROOF = (
    "No public result shows that bytes arrive over a clique under Proxmox: two RTX 3090 read back their own writes "
    "there, while the driver said OK."
)


_LOOK_AT_CPU = ("# on the hypervisor; VMID is this guest's id there", "qm config VMID | grep -E '^cpu|x-vga|^args'")


def _matrix_excerpts(found: Grants) -> tuple[Fact[Any] | Excerpt, ...]:
    return tuple(
        fact if fact.excerpt else Excerpt(fact.source, f"mode {mode}: {len(found.gpus)} GPUs")
        for mode, fact in zip(found.modes, found.facts, strict=True)
        if fact.source
    )


def _one_gpu(snapshot: Snapshot) -> bool:
    return (gpu_count(snapshot).value or 2) < 2 or gpu_count(snapshot).value == 0


def _peers_not_applicable(snapshot: Snapshot) -> Verdict:
    count = gpu_count(snapshot)
    return verdict("not_applicable", "There are no two GPUs here", count, reason=f"{count.value} GPU(s) found")


# --- D1, D2, D3: the clique -----------------------------------------------------------------------------------------


def _clique_fix(snapshot: Snapshot, fleet: Fleet, rule_id: str, clique: int = 0) -> Fix:
    summary = "Put all GPUs of the VM into one clique, then test delivery before anything uses it"
    home = home_of(snapshot, fleet)
    check = ("nvidia-smi topo -p2p r; nvidia-smi topo -p2p w", *delivery_test(gpu_count(snapshot).value))
    if isinstance(home, Home) and home.host in fleet:
        lines = gpu_lines(fleet[home.host], home.config)
        return Fix(
            summary,
            (
                f"# on {home.host}",
                *change_vm(
                    rule_id,
                    home.config,
                    *_set_clique(home.config, lines, clique),
                    libvirt=clique_elements(lines, clique),
                ),
                f"# in {snapshot.host}",
                *check,
            ),
            risk=f"{_CLIQUE_NOTE} {stop_risk(display_functions(lines))}",
        )
    return Fix(
        summary,
        (
            "# on the hypervisor; VMID is this guest's id there; a -set for each GPU line; keep the args that are "
            "there",
            f"cp -a /etc/pve/qemu-server/VMID.conf /root/VMID.conf.before-{rule_id}",
            f"qm set VMID --args '-set device.hostpci0.{CLIQUE}={clique} -set device.hostpci1.{CLIQUE}={clique}'",
            "qm showcmd VMID --pretty | grep -E 'clique|kvm=off|hostpci'",
            "qm shutdown VMID && qm start VMID",
            f"# way back: cp /root/VMID.conf.before-{rule_id} /etc/pve/qemu-server/VMID.conf; then stop and start "
            "the VM",
            f"# in {snapshot.host}",
            *check,
        ),
        risk=_CLIQUE_RISK,
    )


def _set_clique(config: VmConfig, lines: Sequence[Passed], clique: int) -> tuple[str, ...]:
    """Return the commands that give each of these lines a clique and keep every other argument.

    A line keeps a valid clique that it has. A line that names a whole slot is given its function first.
    """
    number_ = vmid(config)
    words = vm_arguments(config)
    kept: list[str] = []
    skip = False
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if skip:
            skip = False
        elif word in ("-set", "-global") and CLIQUE in following:
            skip = True
        else:
            kept.append(word)
    has = {one.index: int(one.value) for one in device_sets(words) if one.name == CLIQUE and _valid_clique(one.value)}
    for one in lines:
        kept += ["-set", f"device.{one.name}.{CLIQUE}={has.get(one.line.index, clique)}"]
    whole = [one for one in lines if dotted(one) is not False and not one.line.mapping]
    return (
        *(f"qm set {number_} --{one.name} '{with_function(one)}'" for one in whole),
        f"qm set {number_} --args {shlex.quote(shlex.join(kept))}",
    )


def clique_elements(lines: Sequence[Passed], clique: int) -> tuple[str, ...]:
    """Return the elements of a libvirt domain that give each of these devices a clique, one line each."""
    prop = f"<qemu:property name='{CLIQUE}' type='unsigned' value='{clique}'/>"
    return (
        "<domain xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>, and in it one <qemu:override> with:",
        *(
            f"<qemu:device alias='{one.name}'><qemu:frontend>{prop}</qemu:frontend></qemu:device>"
            for one in lines
            if one.gpu is not False
        ),
    )


def _valid_clique(value: str) -> bool:
    return value.isdigit() and int(value) <= number("gpudirect.max_clique")


@rule(
    "D1",
    "clique-present",
    title="The GPUs of this guest carry the P2P approval of the hypervisor",
    roles=("guest",),
    severity="high",
    looks_at=("sysfs.pci", "nvidia_smi.topo_p2p_r", "nvidia_smi.topo_p2p_w"),
    why=(
        "In a guest the driver grants P2P by the hypervisor's approval capability, or since "
        f"{version_text('driver.grant_without_clique')} where the GPU's firmware agrees. The capability only asserts "
        "that the path was tested; it enables nothing."
    ),
    restart="vm_stop_start",
    automation="ask",
    risk=_CLIQUE_RISK,
    verify="nvidia-smi topo -p2p r; nvidia-smi topo -p2p w; then all_reduce_perf -c 1 with a time limit",
    sources=("QEMU hw/vfio/pci-quirks.c", "NVIDIA open-gpu-kernel-modules", "Menlo", "cloud-hypervisor #6235"),
    rung=RUNG_CLAIMED,
    gain=MENLO_GAIN,
)
def _clique_present(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if _one_gpu(snapshot):
        yield _peers_not_applicable(snapshot)
        return
    if virtual_gpus(snapshot):
        yield verdict("not_applicable", "The GPUs are virtual ones", reason="a clique does not help vGPUs (rule A4)")
        return
    approvals, found = snapshot.pci.approvals, grants(snapshot)
    known: Mapping[str, Approval] = {bdf: one for bdf, one in (approvals.value or {}).items() if one.state != "not_gpu"}
    by_state: dict[str, list[str]] = {}
    for bdf, one in sorted(known.items()):
        by_state.setdefault(one.state, []).append(bdf)
    present = by_state.get("present", [])
    if found is not None and found.all_granted and found.complete:
        how = "with" if len(present) == len(known) and known else "without" if by_state.get("absent") else ""
        by_what = f" {how} a clique" if how else "; whether by a clique is not known"
        yield verdict("info", f"The driver claims P2P for all pairs{by_what}", approvals, *found.facts)
        return
    refused = found is not None and any(not found.granted(pair) for pair in found.codes)
    old = [bdf for bdf in present if known[bdf].version]
    if old:
        yield verdict(
            "fail",
            f"The P2P approval of {listed(old)} has a version other than 0: the driver ignores it",
            approvals,
            fix=Fix(
                "Update QEMU on the hypervisor, then stop and start the VM", ("pveversion -v | grep pve-qemu-kvm",)
            ),
            explains=("D5",),
        )
        return
    absent = by_state.get("absent", [])
    home = home_of(snapshot, fleet)
    if absent and refused:
        apart = (
            f" Its settings on the hypervisor are not known here: {home}. Audit both together to see B1, B2, B12 and "
            "D3."
            if isinstance(home, str)
            else ""
        )
        title = (
            f"None of the {len(known)} GPUs of this guest carries a P2P clique"
            if len(absent) == len(known)
            else f"{listed(absent)} of this guest {'carries' if len(absent) == 1 else 'carry'} no P2P clique"
        )
        yield verdict(
            "fail",
            f"{title}, and the driver refuses P2P",
            approvals,
            *(found.facts if found else ()),
            why="In a guest the driver grants P2P by the hypervisor's approval; here it is not in config space. "
            + _NO_PUBLIC_PROOF
            + apart,
            fix=_clique_fix(snapshot, fleet, "D1"),
            explains=("D5",),
        )
        return
    if not known or by_state.get("need_root") or by_state.get("device_gone"):
        if by_state.get("need_root"):
            reason = "only 64 bytes of config space were read: read it as root"
        elif by_state.get("device_gone"):
            reason = f"{listed(by_state['device_gone'])} answers only ff: it left the bus or sleeps"
        else:
            reason = approvals.reason or "config space of the GPUs was not read"
        yield verdict("unknown", "Whether the GPUs carry a P2P clique is not known", approvals, reason=reason)
    elif absent:
        yield verdict(
            "unknown",
            f"{listed(absent)} has no P2P clique; whether the driver grants P2P without one is not known",
            approvals,
            reason=why_no_grants(snapshot) if found is None else "the P2P matrix was cut",
        )
    else:
        yield verdict(
            "pass",
            f"All {len(present)} GPUs carry a P2P clique (a claim, nothing more)",
            approvals,
        )


@rule(
    "D2",
    "clique-consistent",
    title="All GPUs of a guest are in the same P2P clique",
    roles=("guest",),
    severity="high",
    looks_at=("sysfs.pci",),
    why="The driver approves a pair only where both GPUs carry the same clique id.",
    restart="vm_stop_start",
    automation="ask",
    risk=_CLIQUE_RISK,
    verify="lspci -d 10de: -xxx   # bytes 09 .. 08 50 32 50 XX: the same XX on every GPU",
    sources=("NVIDIA open-gpu-kernel-modules hypervisor.c", "cloud-hypervisor #6305"),
    rung=RUNG_CLAIMED,
    gain=MENLO_GAIN,
)
def _clique_consistent(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if _one_gpu(snapshot):
        yield _peers_not_applicable(snapshot)
        return
    approvals = snapshot.pci.approvals
    known = {bdf: one for bdf, one in (approvals.value or {}).items() if one.state != "not_gpu"}
    cliques = {bdf: one.clique for bdf, one in sorted(known.items()) if one.state == "present"}
    absent = sorted(bdf for bdf, one in known.items() if one.state == "absent")
    unread = sorted(bdf for bdf, one in known.items() if one.state in ("need_root", "device_gone"))
    ids = dict.fromkeys(cliques.values())
    if cliques and absent:
        yield verdict(
            "fail",
            f"{listed(absent)} has no P2P clique, while {len(cliques)} other GPUs have one",
            approvals,
            fix=_clique_fix(snapshot, fleet, "D2", next(iter(ids)) or 0),
            explains=("D5",),
        )
    elif len(ids) > 1:
        groups = "; ".join(f"clique {one}: {' '.join(bdf for bdf in cliques if cliques[bdf] == one)}" for one in ids)
        if delivery(snapshot) == "delivered":
            yield verdict("info", f"The GPUs are in {len(ids)} cliques, as measured ({groups})", approvals)
        else:
            yield verdict(
                "warn",
                f"The GPUs are in {len(ids)} different cliques: pairs across them are refused ({groups})",
                approvals,
                severity="medium",
                why="Several cliques are right only where they match islands that were measured.",
                fix=_clique_fix(snapshot, fleet, "D2"),
                explains=("D5",),
            )
    elif not known or unread:
        reason = approvals.reason or "config space of the GPUs was not read beyond 64 bytes: read it as root"
        yield verdict("unknown", "The cliques of the GPUs are not known", approvals, reason=reason)
    elif not cliques:
        yield verdict("not_applicable", "No GPU carries a clique", approvals, reason="rule D1 judges that")
    else:
        yield verdict("pass", f"All {len(cliques)} GPUs are in clique {next(iter(ids))}", approvals)


@rule(
    "D3",
    "clique-args-target",
    title="The clique settings of a VM reach its GPUs",
    roles=("hypervisor",),
    severity="critical",
    looks_at=("pve.conf", "sysfs.pci"),
    why="A -set on a device that QEMU does not know stops the start; a GPU without a clique gets no grant.",
    restart="vm_stop_start",
    automation="ask",
    risk=_CLIQUE_RISK,
    verify="tr '\\0' '\\n' < /proc/$(cat /run/qemu-server/VMID.pid)/cmdline | grep -A1 -E '^-set$|kvm=off'",
    sources=("measured on QEMU 7.2", "QEMU hw/vfio/pci-quirks.c"),
    without_role=True,
)
@each_vm
def _clique_target(snapshot: Snapshot, fleet: Fleet, config: VmConfig, lines: tuple[Passed, ...]) -> Iterator[Verdict]:
    yield _judge_targets(snapshot, config, lines)


def _judge_targets(snapshot: Snapshot, config: VmConfig, lines: tuple[Passed, ...]) -> Verdict:
    words = vm_arguments(config)
    sets = [one for one in device_sets(words) if one.name == CLIQUE]
    everywhere = [
        following for word, following in itertools.pairwise(words) if word == "-global" and CLIQUE in following
    ]
    if not sets and not everywhere:
        return verdict(
            "not_applicable",
            f"VM {config.vmid} sets no P2P clique",
            subject=vm(config),
            reason="its args hold no x-nv-gpudirect-clique",
        )
    by_index = {one.line.index: one for one in lines}
    configured = {one.index for one in config.hostpci}
    wrong: list[str] = []
    for one in sets:
        name = f"{'hostdev' if config.manager == 'libvirt' else 'hostpci'}{one.index}"
        if one.index not in configured:
            wrong.append(f"there is no line {name}")
        elif one.index not in by_index:
            wrong.append(f"{name} is no NVIDIA GPU, so the VM does not start")
        if one.suffix:
            wrong.append(f"the id {name}{one.suffix} cannot be addressed")
        if not _valid_clique(one.value):
            wrong.append(f"clique {one.value} of {name} is not in 0 to {number('gpudirect.max_clique')}")
    targets = {one.index for one in sets}
    unreachable = [one.name for one in lines if one.line.index in targets and dotted(one) is not False]
    if unreachable and not (config.running_arguments.value and runs_as_asked(config)):
        names_ = "names" if len(unreachable) == 1 else "name"
        wrong.append(f"{listed(unreachable)} {names_} a slot without a function, which -set does not find (rule B8)")
    others = len(config.hostpci) > len(lines) or any(
        len(one.functions) > 1 or (one.line.all_functions and one.function_count is None) for one in lines
    )
    if everywhere and others:
        wrong.append("-global sets it on every passed device, and one that is no NVIDIA GPU stops the start")
    without = [] if everywhere else [one for one in lines if one.line.index not in targets]
    sure = [one.name for one in without if one.gpu]
    fix = Fix(
        "Set the same clique on each GPU line, and keep the other arguments",
        (
            *change_vm(
                "D3",
                config,
                *_set_clique(config, lines, _first_clique(sets)),
                libvirt=clique_elements(lines, _first_clique(sets)),
            ),
            *delivery_test(len(lines)),
        ),
        risk=f"{_CLIQUE_NOTE} {stop_risk(display_functions(lines))}",
    )
    evidence = conf_line(config, "args", *(one.name for one in lines))
    if wrong or sure:
        if sure:
            wrong.append(f"{listed(sure)} has no clique")
        return verdict(
            "fail",
            f"The P2P clique of VM {config.vmid} does not reach its GPUs: {listed(list(dict.fromkeys(wrong)))}",
            evidence,
            subject=vm(config),
            fix=fix,
        )
    if without:
        return verdict(
            "warn",
            f"{listed([one.name for one in without])} of VM {config.vmid} has no clique: right only if it is no GPU",
            evidence,
            subject=vm(config),
            fix=fix,
        )
    ids = dict.fromkeys(one.value for one in sets)
    if len(ids) > 1:
        return verdict(
            "warn",
            f"VM {config.vmid} has {len(ids)} different cliques: right only where they match measured islands",
            evidence,
            subject=vm(config),
            fix=Fix("Test delivery inside each clique; across them NCCL uses host memory", delivery_test(len(lines))),
        )
    return verdict(
        "pass",
        f"The clique of VM {config.vmid} is set on each of its {len(lines)} GPU lines (a claim: test delivery)",
        evidence,
        subject=vm(config),
    )


def _first_clique(sets: Sequence[DeviceSet]) -> int:
    """Return the first valid clique that is set already, else 0."""
    return next((int(one.value) for one in sets if _valid_clique(one.value)), 0)


# --- D4, D5, D6: what the driver grants -----------------------------------------------------------------------------


@rule(
    "D4",
    "driver-sees-passthrough",
    title="The driver knows its GPUs as passed through",
    roles=("guest",),
    severity="high",
    looks_at=("nvidia_smi.q",),
    why="Only GPUs that the driver counts as passed through can be approved by a clique.",
    restart="vm_stop_start",
    automation="ask",
    risk=RISK_STOP,
    verify="nvidia-smi -q | grep 'Virtualization Mode'",
    sources=("NVIDIA open-gpu-kernel-modules",),
    gain=MENLO_GAIN,
)
def _sees_passthrough(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    modes = {gpu.bus_id or f"GPU {gpu.index}": gpu.virtualization_mode for gpu in snapshot.gpus.value or ()}
    told = {name: mode for name, mode in modes.items() if mode and mode.upper() not in ("N/A", "[N/A]")}
    without = [name for name, mode in told.items() if mode == "None"]
    if without:
        yield verdict(
            "fail",
            f"The driver sees no hypervisor for {listed(without)} (Virtualization Mode None)",
            snapshot.gpus,
            fix=Fix("Let the guest see KVM: rules A2, B1 and B2 say how", _LOOK_AT_CPU),
            explains=("D1", "D5"),
        )
    elif told and set(told.values()) == {"Pass-Through"}:
        found, approvals = grants(snapshot), (snapshot.pci.approvals.value or {}).values()
        refused = found is not None and found.none_granted
        cliques = bool(approvals) and all(one.state == "present" for one in approvals if one.state != "not_gpu")
        yield verdict(
            "pass",
            "The driver sees its GPUs as passed through",
            snapshot.gpus,
            why="Clique and pass-through are there, and still nothing is granted: look for MIG, mixed "
            "models, a registry setting, then the driver version."
            if refused and cliques
            else "",
        )
    elif told:
        yield verdict("not_applicable", "The GPUs are virtual ones", snapshot.gpus, reason="rule A4 judges vGPUs")
    else:
        reason = snapshot.gpus.reason or "nvidia-smi -q gave no Virtualization Mode"
        yield verdict("unknown", "What the driver sees is not known", reason=reason)


# What a code means (NVML's enum), and what to do about it in a guest and on bare metal.
_CODES: Mapping[str, tuple[str, str, str]] = {
    "CNS": (
        "chipset not supported",
        "in a guest the hypervisor must publish a P2P clique (rule D1)",
        "on bare metal this board or CPU is not on the driver's list",
    ),
    "GNS": (
        "GPU not supported",
        "a policy of the stock driver for this GPU, or a virtual function",
        "a policy of the stock driver for this GPU: use host memory",
    ),
    "TNS": (
        "topology not supported",
        "two I/O hubs lie between them",
        "two I/O hubs lie between them: same socket only",
    ),
    "DR": (
        "disabled by a registry setting",
        "a driver setting switches it off (ForceP2P)",
        "a driver setting switches it off",
    ),
    "NS": (
        "not supported",
        "in a guest: no P2P clique, MIG on, or different GPU models (rule D1 first)",
        "MIG on, different GPU models, or NVLink down",
    ),
    "U": ("unknown", "driver and library may not match (rule F3)", "driver and library may not match (rule F3)"),
}


def _meaning(codes: list[str], role: str | None) -> str:
    parts = []
    for code in codes:
        name, guest, bare = _CODES.get(code, ("not a known code", "update Peerlane", "update Peerlane"))
        if role == "guest":
            parts.append(f"{code} ({name}): {guest}")
        elif role == "bare_metal":
            parts.append(f"{code} ({name}): {bare}")
        else:
            parts.append(f"{code} ({name}): {guest}; {bare}" if guest != bare else f"{code} ({name}): {guest}")
    return ". ".join(parts) + "."


_ASK_ROLE = "Run systemd-detect-virt to know which of both this machine is."


def _stock_refusers(snapshot: Snapshot) -> list[str]:
    """Return the GPUs for which the stock driver is known to refuse P2P over PCIe on bare metal."""
    models = [gpu_model(one.device) for one in snapshot.pci.gpus()]
    models += [gpu_model_by_name(gpu.name) for gpu in snapshot.gpus.value or ()]
    return list(dict.fromkeys(model.name for model in models if model is not None and model.p2p == "no"))


@rule(
    "D5",
    "p2p-matrix",
    title="The driver grants P2P between the GPUs",
    roles=("bare_metal", "guest"),
    severity="high",
    looks_at=("nvidia_smi.topo_p2p_r", "nvidia_smi.topo_p2p_w", "nvidia_smi.topo_p2p_n"),
    why="The matrix is what the driver claims. OK permits a path, it does not show that data arrives.",
    restart="none",
    automation="never",
    risk=SECURITY_NOTES["forced_p2p"],
    verify="nvidia-smi topo -p2p r; nvidia-smi topo -p2p w",
    sources=("NVIDIA NVML", "club-3090", "p2p-bench"),
    rung=RUNG_CLAIMED,
    gain=Gain("+12 to +85 % prefill, 0 to +15 % decode", "tokens/s", "club-3090 and p2p-bench, 2 to 4 GPUs, real P2P"),
    without_role=True,
)
def _p2p_matrix(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    yield from _grants(snapshot)
    yield from _cuda_access(snapshot)


def _cuda_access(snapshot: Snapshot) -> Iterator[Verdict]:
    """Judge what a CUDA test was told of peer access: the driver's claim, where its matrix is missing."""
    if grants(snapshot) is not None:
        return
    for run in snapshot.measurements.get("p2p", ()):
        if not run.access:
            continue
        gpus = [f"GPU{device.index}" for device in run.devices] or sorted({gpu for pair in run.access for gpu in pair})
        both = [pair for pair, may in run.access.items() if may and run.access.get((pair[1], pair[0]), True)]
        islands = [island for island in components(gpus, both) if len(island) > 1]
        wanted = len(gpus) * (len(gpus) - 1)
        models = {f"GPU{device.index}": device.name for device in run.devices if device.name}
        mixed = len(set(models.values())) > 1
        across = any(models.get(a) != models.get(b) for a, b in both)
        # Before the first refusal was read, an island is only where the output was cut.
        islands = islands if not all(run.access.values()) else []
        fact = Fact(run.access, run.source, "\n".join(
            f"{a} {'may' if may else 'may not'} reach {b}" for (a, b), may in list(run.access.items())[:12]
        ))  # fmt: skip
        if len(both) == wanted:
            yield verdict("info", f"CUDA claims peer access between all {len(gpus)} GPUs", fact, subject="cuda")
        elif mixed and islands and not across:
            yield verdict(
                "warn",
                f"The GPUs are of different models: CUDA claims peer access only inside {groups(islands)}, none across",
                fact,
                subject="cuda",
                severity="medium",
                why="Peer access over PCIe needs equal GPUs. A group across models goes through host memory.",
                fix=Fix(
                    "Build tensor parallel groups of equal GPUs",
                    ("nvidia-smi -L", "# in the unit of the engine: Environment=CUDA_VISIBLE_DEVICES=<one group>"),
                ),
            )
        elif islands:
            yield verdict(
                "info",
                f"CUDA claims peer access only inside islands: {groups(islands)}",
                fact,
                subject="cuda",
                why="Keep tensor parallel groups inside an island; across them NCCL uses host memory.",
            )
        elif len(run.access) == wanted:
            yield verdict("info", f"CUDA claims no peer access between the {len(gpus)} GPUs", fact, subject="cuda")


def _grants(snapshot: Snapshot) -> Iterator[Verdict]:
    found = grants(snapshot)
    if found is None:
        if _one_gpu(snapshot):
            yield _peers_not_applicable(snapshot)
        else:
            yield verdict("unknown", "What the driver grants is not known", reason=why_no_grants(snapshot))
        return
    if len(found.gpus) < 2:
        yield verdict("not_applicable", "There are no two GPUs here", *found.facts, reason="the matrix has one GPU")
        return
    evidence = _matrix_excerpts(found)
    role = snapshot.role.value
    count = len(found.gpus)
    if not found.codes:
        yield verdict("unknown", "The P2P matrix holds no pair", *evidence, reason="the output was cut")
        return
    if found.all_granted:
        yield from _all_granted(snapshot, found)
        return
    refusals = found.refusals
    codes = sorted(refusals, key=lambda one: -len(refusals[one]))
    meaning = _meaning(codes, role)
    nvlink = _nvlink_note(snapshot)
    if found.none_granted:
        shown = f"The driver grants P2P to no pair of the {count} GPUs ({', '.join(codes)})"
        why = " ".join(part for part in (meaning, nvlink, "" if role else _ASK_ROLE, _FALLBACK) if part)
        if len(found.codes) < count * (count - 1):
            yield verdict("unknown", shown, *evidence, why=why, reason="only a part of the matrix was read")
            return
        # Where the stock driver refuses these cards by policy, or the role is not known, there is nothing to fix yet.
        policy = role == "bare_metal" and codes == ["GNS"] and bool(_stock_refusers(snapshot))
        mild = policy or role is None
        yield verdict(
            "warn" if mild else "fail",
            shown,
            *evidence,
            severity="medium" if mild else None,
            why=why,
            fix=_matrix_fix(role),
        )
        return
    islands = [one for one in found.islands if len(one) > 1]
    shown = "; ".join("{" + ", ".join(one) + "}" for one in islands) or "no pair in both directions"
    yield verdict(
        "info",
        f"The driver grants P2P only inside islands: {shown}",
        *evidence,
        why=f"Keep tensor parallel groups inside an island; across them NCCL uses host memory. {meaning} "
        f"{nvlink}".strip(),
    )


_FALLBACK = "Until then NCCL goes through host memory."


def _nvlink_note(snapshot: Snapshot) -> str:
    matrix = snapshot.p2p.get("n")
    if matrix is None or matrix.value is None:
        return "NVLink is judged apart (nvidia-smi topo -p2p n)."
    linked = [pair for pair, code in matrix.value.pairs().items() if code == "OK"]
    return f"NVLink is OK for {shown(linked)}." if linked else "NVLink connects no pair either."


def _matrix_fix(role: str | None) -> Fix:
    if role == "bare_metal":
        return Fix(
            "Check MIG and GPU models; where the driver refuses by policy or board, stay on host memory",
            ("nvidia-smi -L", "nvidia-smi -q | grep -A2 'MIG Mode'", "# vLLM and SGLang: --disable-custom-all-reduce"),
        )
    return Fix(
        "Find out first what refuses it: the hypervisor's side of this guest (A2, B1, B2, D1), then MIG and models",
        ("systemd-detect-virt", "nvidia-smi -q | grep -E 'Virtualization Mode|MIG Mode' -A2"),
    )


def _all_granted(snapshot: Snapshot, found: Grants) -> Iterator[Verdict]:
    evidence = _matrix_excerpts(found)
    if not found.complete:
        missing = [
            name
            for mode, name in (("r", "reads"), ("w", "writes"))
            if mode not in found.modes and "rw" not in found.modes
        ]
        cut = f"{' and '.join(missing)} were not read" if missing else "the matrix was cut"
        yield verdict(
            "unknown",
            f"The driver claims P2P for the pairs that were read, but {cut}",
            *evidence,
            reason=cut,
        )
        return
    refusers = _stock_refusers(snapshot)
    if refusers:
        guest = snapshot.role.value == "guest"
        yield verdict(
            "warn",
            f"The driver claims P2P for all pairs of {listed(refusers)}, which the stock driver does not support on "
            "its own",
            *evidence,
            severity="medium",
            why=(
                "A clique claims it for this guest; on such cards a public report saw no byte arrive."
                if guest
                else "This means a patched driver or a forced registry setting: copies may pass and data "
                "still be wrong."
            ),
            fix=Fix(
                "Test delivery and collectives; until then keep the engine's custom all-reduce off",
                (*delivery_test(len(found.gpus)), "# vLLM and SGLang until then: --disable-custom-all-reduce"),
            ),
        )
        return
    topology = snapshot.topology.value
    over = ""
    if topology is not None and len(found.gpus) == 2:
        link = topology.links.get((found.gpus[0], found.gpus[1]))
        over = f" over {link}" if link else ""
    yield verdict(
        "pass",
        f"The driver grants P2P to all pairs of the {len(found.gpus)} GPUs{over}: a claim, delivery is not shown by it",
        *evidence,
        why="A driver's OK and a copy test are no proof: test delivery and a value-checked collective, "
        "and keep the engine's custom all-reduce off until then. On GeForce cards an OK means a patched driver: the "
        "stock driver refuses.",
    )


@rule(
    "D6",
    "p2p-asymmetric",
    title="P2P is granted alike for reads and writes, and in both directions",
    roles=("bare_metal", "guest"),
    severity="high",
    looks_at=("nvidia_smi.topo_p2p_r", "nvidia_smi.topo_p2p_w"),
    why="NCCL needs reads and writes in both directions; mixed GPU generations often differ.",
    automation="never",
    verify="nvidia-smi topo -p2p r; nvidia-smi topo -p2p w",
    sources=("NVIDIA open-gpu-kernel-modules", "NCCL"),
    rung=RUNG_CLAIMED,
    without_role=True,
)
def _asymmetric(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    found = grants(snapshot)
    if found is None:
        if _one_gpu(snapshot):
            yield _peers_not_applicable(snapshot)
        else:
            yield verdict("unknown", "What the driver grants is not known", reason=why_no_grants(snapshot))
        return
    if len(found.gpus) < 2:
        yield verdict("not_applicable", "There are no two GPUs here", *found.facts, reason="the matrix has one GPU")
        return
    by_mode, by_direction = found.unequal_modes, found.unequal_ways
    evidence = _matrix_excerpts(found)
    if by_mode or by_direction:
        what = f"reads and writes of {shown(by_mode)}" if by_mode else f"the directions of {shown(by_direction)}"
        yield verdict(
            "fail",
            f"P2P is granted differently for {what}",
            *evidence,
            fix=Fix("Treat these pairs as without P2P: NCCL needs both ways", ("export NCCL_P2P_DISABLE=1",)),
        )
    elif not found.complete:
        missing = "reads or writes were not read" if "rw" not in found.modes and len(found.modes) < 2 else "it was cut"
        yield verdict("unknown", "Whether grants are symmetric is not known", *evidence, reason=missing)
    else:
        yield verdict("pass", "Grants are alike for reads and writes, in both directions", *evidence)


# --- D11, D12: NCCL -------------------------------------------------------------------------------------------------


def _setting(snapshot: Snapshot, name: str) -> list[Setting]:
    return [one for one in snapshot.nccl.settings.value or () if one.name == name]


def _drop(settings: Sequence[Setting]) -> tuple[str, ...]:
    """Return the commands that take these settings out where they stand, with a backup or an editor."""
    steps: list[str] = []
    for one in settings:
        if one.origin.startswith("/"):
            steps.append(f"sed -i.bak '/^[[:space:]]*{one.name}[[:space:]]*=/d' {shlex.quote(one.origin)}")
        else:
            unit = shlex.quote(one.origin.removeprefix("unit ").strip())
            steps += [f"systemctl edit {unit}   # Environment= without {one.name}", f"systemctl restart {unit}"]
    return tuple(dict.fromkeys(steps))


def _said(settings: list[Setting]) -> Excerpt:
    return Excerpt(settings[0].origin, "\n".join(f"{one.name}={one.value}   ({one.origin})" for one in settings))


def _level_valid(value: str) -> bool:
    return value in names("nccl.p2p_levels") or value[:1].isdigit()


def _raises_level(value: str) -> bool:
    if value[:1].isdigit():
        return int(value[:1]) >= number("nccl.p2p_level_digit_max") - 1
    return value in ("PHB", "SYS")


_SERVICE_RISK = "Restarts the service. On a fabric that cannot route peer traffic: a hang at full utilisation."


@rule(
    "D11",
    "nccl-p2p-level",
    title="NCCL's limit for P2P fits the paths that were verified",
    roles=("bare_metal", "guest"),
    severity="high",
    looks_at=("etc.nccl.conf", "peerlane.services", "nvidia_smi.topo_m", "nvidia_smi.topo_p2p_r"),
    why=(
        f"Since NCCL {version_text('nccl.pxb_default')} the default limit is PXB: GPUs that meet at a host bridge "
        "(PHB, as in every Proxmox guest) stay on shared memory unless the limit is raised. Raise it only over "
        "paths whose delivery was verified."
    ),
    restart="service",
    automation="ask",
    risk=_SERVICE_RISK,
    verify="NCCL_DEBUG=INFO log: via P2P",
    sources=("NCCL 2.30.7 src/graph/paths.cc", "Google GKE G4 example", "Kata", "rtx6kpro"),
    gain=Gain("2.09 -> 12.97", "GB/s bus bandwidth", "Kata VM, 16 GPUs"),
)
def _nccl_level(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if _one_gpu(snapshot):
        yield _peers_not_applicable(snapshot)
        return
    settings = _setting(snapshot, "NCCL_P2P_LEVEL")
    wrong = [one for one in settings if not _level_valid(one.value)]
    if wrong:
        hint = " NODE does not exist." if wrong[0].value == "NODE" else ""
        yield verdict(
            "fail",
            f"NCCL_P2P_LEVEL={wrong[0].value} is no level that NCCL knows: it is ignored without a word",
            _said(wrong),
            why=f"The names are compared letter by letter, in capitals.{hint}",
            fix=Fix("Remove the line, or write one of LOC, NVL, PIX, PXB, PHB, SYS", _drop(wrong)),
        )
        return
    ended, found = delivery(snapshot), grants(snapshot)
    if ended != "delivered":
        yield _level_unverified(snapshot, settings, found, ended)
        return
    topology = snapshot.topology.value
    links = {
        link
        for (one, other), link in (topology.links.items() if topology else ())
        if topology and one in topology.gpus and other in topology.gpus and one != other
    }
    if not links:
        reason = snapshot.topology.reason or "nvidia-smi topo -m was not read"
        yield verdict("unknown", "Which NCCL limit the paths need is not known", reason=reason)
        return
    far = links & {"PHB", "NODE", "SYS"}
    level = "SYS" if far & {"NODE", "SYS"} else "PHB"
    if not far:
        yield verdict("pass", "All GPU paths are within NCCL's own limit", snapshot.topology)
    elif settings:
        short = [
            one for one in settings if not _raises_level(one.value) or (level == "SYS" and one.value in ("PHB", "3"))
        ]
        yield verdict(
            "warn" if short else "pass",
            f"NCCL_P2P_LEVEL={(short or settings)[0].value} "
            + (f"keeps NCCL off verified paths that need {level}" if short else "fits the verified paths"),
            _said(settings),
            snapshot.topology,
            severity="medium" if short else None,
            fix=Fix(f"Write NCCL_P2P_LEVEL={level}", (*_drop(short), f"# in the same place: NCCL_P2P_LEVEL={level}"))
            if short
            else None,
        )
    else:
        yield _level_unset(snapshot, level)


def _level_unverified(snapshot: Snapshot, settings: list[Setting], found: Grants | None, ended: str | None) -> Verdict:
    raised = [one for one in settings if _raises_level(one.value)]
    if raised and ended == "failed":
        return verdict(
            "fail",
            f"NCCL_P2P_LEVEL={raised[0].value} opens paths on which delivery failed",
            _said(raised),
            fix=Fix(
                "Remove the line and set NCCL_P2P_DISABLE=1; switch the engine's custom all-reduce off",
                (
                    *_drop(raised),
                    "# in the same place: NCCL_P2P_DISABLE=1",
                    "# vLLM and SGLang: --disable-custom-all-reduce",
                ),
            ),
        )
    if raised:
        return verdict(
            "warn",
            f"NCCL_P2P_LEVEL={raised[0].value} opens paths whose delivery was never verified",
            _said(raised),
            severity="medium",
            fix=Fix(
                "Test delivery first; until then take the line out",
                (*_drop(raised), *delivery_test(gpu_count(snapshot).value)),
            ),
        )
    if found is not None and found.none_granted:
        return verdict(
            "not_applicable",
            "There is no P2P path whose limit could be raised",
            *_matrix_excerpts(found),
            reason="the driver grants no pair",
        )
    if ended == "failed":
        return verdict("pass", "NCCL's limit is not raised, and delivery failed: leave it so", reason="")
    return verdict(
        "unknown",
        "Whether NCCL's limit for P2P should be raised is not known",
        reason="delivery between the GPUs was not tested; raising the limit before that can hang or corrupt",
    )


def _level_unset(snapshot: Snapshot, level: str) -> Verdict:
    nccl, vendor, count = snapshot.nccl, snapshot.cpu.vendor, gpu_count(snapshot).value
    if not nccl.settings.known:
        return verdict(
            "unknown", "Whether NCCL_P2P_LEVEL is set is not known", snapshot.topology, reason=nccl.settings.reason
        )
    if not nccl.version.known:
        reason = nccl.version.reason or "the NCCL version was not read"
        return verdict("unknown", "NCCL's own limit for P2P is not known", snapshot.topology, reason=reason)
    if version_tuple(nccl.version.value or "") < version("nccl.pxb_default"):
        return verdict("pass", f"NCCL {nccl.version.value} uses P2P up to SYS by itself", nccl.version)
    few = number("nccl.amd_exception_gpus")
    if vendor.value == "AuthenticAMD" and count is not None and count <= few:
        return verdict("pass", f"On AMD with {count} GPUs NCCL uses P2P up to SYS by itself", vendor)
    if not vendor.known and (count is None or count <= few):
        return verdict(
            "unknown",
            "NCCL's own limit for P2P is not known",
            reason=f"on AMD with {few} GPUs it is SYS, and the CPU vendor was not read",
        )
    return verdict(
        "fail",
        f"NCCL does not use the verified P2P paths: its limit is PXB, and these paths need {level}",
        snapshot.topology,
        nccl.version,
        fix=Fix(
            f"Set NCCL_P2P_LEVEL={level} in the environment of the engine's unit, nowhere else",
            (
                "mkdir -p /etc/systemd/system/peerlane-model@SERVICE.service.d",
                f"printf '[Service]\\nEnvironment=NCCL_P2P_LEVEL={level}\\n' > "
                "/etc/systemd/system/peerlane-model@SERVICE.service.d/nccl-level.conf",
                "systemctl daemon-reload && systemctl restart peerlane-model@SERVICE",
                "# way back: remove that file, daemon-reload, restart",
            ),
        ),
    )


@rule(
    "D12",
    "nccl-p2p-disable-env",
    title="NCCL's switches agree with what was verified",
    roles=("bare_metal", "guest"),
    severity="medium",
    looks_at=("etc.nccl.conf", "peerlane.services"),
    why="NCCL_P2P_DISABLE=1 is right where delivery failed or was never tested in a guest, and a leftover elsewhere.",
    restart="service",
    automation="ask",
    risk="Restarts the service.",
    verify="systemctl show -p Environment UNIT",
    sources=("NCCL user guide, environment variables", "NVIDIA/nccl #2335"),
    gain=Gain("2.09 -> 12.97", "GB/s bus bandwidth", "Kata VM, 16 GPUs, P2P used instead of host memory"),
)
def _nccl_switches(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    if not snapshot.nccl.settings.known:
        reason = snapshot.nccl.settings.reason or "NCCL settings were not read"
        yield verdict("unknown", "NCCL's switches are not known", reason=reason)
        return
    bad = False
    for name, value, why in _HARMFUL:
        found = [one for one in _setting(snapshot, name) if one.value.strip() == value]
        if found:
            bad = True
            yield verdict(
                "fail",
                f"{name}={value} {why}",
                _said(found),
                subject=name,
                fix=Fix(f"Remove {name} from {listed([one.origin for one in found])}", _drop(found)),
            )
    switches = _setting(snapshot, "NCCL_P2P_DISABLE")
    ignored = [one for one in switches if not one.value.strip().lstrip("-").isdigit()]
    if ignored:
        yield verdict(
            "fail",
            f"NCCL_P2P_DISABLE={ignored[0].value} is ignored: only the number 1 counts",
            _said(ignored),
            subject="NCCL_P2P_DISABLE",
            fix=Fix("Write NCCL_P2P_DISABLE=1", (*_drop(ignored), "# in the same place: NCCL_P2P_DISABLE=1")),
        )
        return
    off = [one for one in switches if one.value.strip() not in ("0", "-0")]
    ended = delivery(snapshot)
    if off and ended == "delivered":
        yield verdict(
            "warn",
            "NCCL_P2P_DISABLE=1 keeps NCCL off P2P paths whose delivery was verified",
            _said(off),
            subject="NCCL_P2P_DISABLE",
            fix=Fix(f"Remove it from {listed([one.origin for one in off])}", _drop(off)),
        )
    elif not off and ended == "failed":
        yield verdict(
            "fail",
            "Delivery between the GPUs failed, and NCCL_P2P_DISABLE=1 is not set",
            snapshot.nccl.settings,
            subject="NCCL_P2P_DISABLE",
            severity="high",
            fix=Fix(
                "Switch P2P off for NCCL and the engine's custom all-reduce off too: it ignores NCCL's switch",
                ("# in the unit: Environment=NCCL_P2P_DISABLE=1", "# vLLM and SGLang: --disable-custom-all-reduce"),
            ),
        )
    elif not off and ended not in ("delivered", "failed") and snapshot.role.value == "guest" and _claimed(snapshot):
        yield verdict(
            "unknown",
            "Whether NCCL may use P2P in this guest is not known",
            snapshot.nccl.settings,
            subject="NCCL_P2P_DISABLE",
            reason=(
                "the driver claims P2P, but delivery was not tested; NCCL_P2P_DISABLE=1 is the safe choice until then"
            ),
        )
    elif not bad:
        state = "set, so NCCL keeps off P2P" if off else "not set, and nothing speaks against that"
        yield verdict("pass", f"NCCL_P2P_DISABLE is {state}", snapshot.nccl.settings, subject="NCCL_P2P_DISABLE")


def _claimed(snapshot: Snapshot) -> bool:
    found = grants(snapshot)
    return found is not None and not found.none_granted


_HARMFUL = (
    ("NCCL_SHM_DISABLE", "1", "makes NCCL fall back to network sockets on one host"),
    ("NCCL_IGNORE_DISABLED_P2P", "2", "skips the driver's own check of P2P"),
    ("NCCL_P2P_USE_CUDA_MEMCPY", "1", "completed with wrong values in a public report"),
)
