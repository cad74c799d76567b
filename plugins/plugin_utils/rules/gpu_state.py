"""Rules F7, F8, F13, F16, F17, F24, F25 and D16: how each GPU is set, and whether it is ready."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ..core.finding import Fix, Gain
from ..core.snapshot import Fact, Gpu, Snapshot
from .common import counted, device_id, listed, log_excerpt, nvrm_lines
from .gpu_views import (
    all_listed,
    by_index,
    clear,
    excerpt,
    label,
    labels,
    model_of,
    models,
    module_flavour,
    recovery,
    reset_fix,
    survey,
    unread,
    untold,
)
from .knowledge import gpu_model
from .registry import Fleet, Verdict, rule, verdict
from .xid import xid_excerpt

_QUERY = ("nvidia_smi.q", "nvidia_smi.qx", "nvidia_smi.query_gpu")

# --- F7: firmware ---------------------------------------------------------------------------------------------------

_GSP_FAILED = re.compile(
    r"Cannot initialize GSP|GFW_BOOT|kgspBootGspRm|GSP firmware.*(?:fail|not found|mismatch|[Ee]rror)"
)
_WITHOUT_GSP = ("maxwell", "pascal", "volta", "older than maxwell")


@rule(
    "F7",
    "gsp",
    title="The GPU's own firmware (GSP) runs where the driver needs it",
    roles=("bare_metal", "guest"),
    severity="high",
    looks_at=(*_QUERY, "proc.driver.nvidia.params", "proc.driver.nvidia.version", "kernel_log"),
    why="The open kernel modules leave most of their work to the GSP firmware: without it no GPU starts.",
    restart="reboot",
    automation="never",
    risk="Reboots this machine; a running engine stops.",
    verify="nvidia-smi -q | grep 'GSP Firmware'",
    sources=("NVIDIA open-gpu-kernel-modules README", "NVIDIA Xid catalog (119, 120)"),
    without_role=True,
)
def _gsp(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    log = snapshot.kernel.log.value
    timeouts = [one for one in (log.xids if log else ()) if one.code in (119, 120)]
    said = [line for line in nvrm_lines(snapshot) if _GSP_FAILED.search(line.text)]
    if timeouts or said:
        where = listed(sorted({one.pci for one in timeouts})) or "a GPU"
        yield verdict(
            "fail",
            f"The GSP firmware of {where} " + ("stopped answering" if timeouts else "did not start"),
            xid_excerpt(snapshot, timeouts) if timeouts else log_excerpt(snapshot, said),
            fix=Fix(
                "Reset the GPU, then use a driver and firmware of one version; save a bug report if it comes back",
                (
                    "nvidia-smi --gpu-reset",
                    "nvidia-smi -q | grep -E 'Driver Version|GSP Firmware'",
                    "nvidia-bug-report.sh",
                ),
            ),
            explains=("F1",),
        )
        return
    flavour, params = module_flavour(snapshot), snapshot.driver.params
    wish = (params.value or {}).get("EnableGpuFirmware")
    if flavour.value == "open" and wish == "0":
        yield verdict(
            "warn",
            "NVreg_EnableGpuFirmware=0 is set, and the open kernel modules ignore it: they always use the GSP firmware",
            params,
            flavour,
            fix=Fix(
                "Remove the option",
                ("grep -rn EnableGpuFirmware /etc/modprobe.d/", "update-initramfs -u   # after the line is gone"),
            ),
        )
    found = survey(snapshot, "gsp_firmware")
    if not found.known and not found.without:
        if not snapshot.gpus.value:
            yield unread(snapshot, "Whether the GPUs run with their GSP firmware is not known")
        else:
            yield verdict(
                "unknown",
                "Whether the GPUs run with their GSP firmware is not known",
                reason=f"{labels(found.silent)} did not tell a firmware version",
            )
        return
    old = [gpu for gpu in found.without if (known := model_of(gpu)) and known.architecture in _WITHOUT_GSP]
    missing = [gpu for gpu in found.without if gpu not in old]
    if missing and flavour.value == "open":
        yield verdict(
            "fail",
            f"The open kernel modules are loaded, but {labels(missing)} shows no GSP firmware",
            excerpt(snapshot, missing, lambda gpu: "GSP Firmware Version N/A"),
            flavour,
            fix=Fix(
                "Install the firmware package of the driver's version",
                (
                    "ls /lib/firmware/nvidia/$(modinfo -F version nvidia)/",
                    "dmesg | grep -i -E 'gsp|firmware' | tail",
                    "# Debian: firmware-nvidia-gsp, Ubuntu: nvidia-firmware-NNN, of the same version",
                ),
            ),
        )
    elif missing and flavour.value == "proprietary":
        yield verdict(
            "info",
            f"{labels(missing)} runs without GSP firmware, as the proprietary modules allow",
            excerpt(snapshot, missing, lambda gpu: "GSP Firmware Version N/A"),
        )
    elif missing:
        yield verdict(
            "unknown",
            f"{labels(missing)} shows no GSP firmware; whether the loaded modules need it is not known",
            excerpt(snapshot, missing, lambda gpu: "GSP Firmware Version N/A"),
            reason=flavour.reason,
        )
    elif found.known:
        versions = sorted({gpu.gsp_firmware or "" for gpu in found.known})
        yield clear(
            snapshot,
            found,
            f"The GPUs run GSP firmware {listed(versions)}",
            excerpt(snapshot, found.known, lambda gpu: f"GSP Firmware Version {gpu.gsp_firmware}"),
        )
    else:
        yield verdict("not_applicable", "These GPUs have no GSP firmware", reason=f"{labels(old)} is older than Turing")


# --- F8: persistence ------------------------------------------------------------------------------------------------


@rule(
    "F8",
    "persistence-mode",
    title="The driver keeps the GPUs initialised between programs",
    roles=("bare_metal", "guest"),
    severity="low",
    looks_at=("nvidia_smi.q", "nvidia_smi", "systemctl.nvidia_units"),
    why=(
        "Without persistence the last program that closes a GPU takes it down: seconds at each start, limits and "
        "clocks forgotten, and more resets."
    ),
    restart="service",
    automation="yes",
    risk="None for a running engine; an idle GPU keeps drawing some watts.",
    verify="nvidia-smi --query-gpu=persistence_mode --format=csv",
    sources=("NVIDIA driver persistence documentation",),
    without_role=True,
)
def _persistence(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    found = survey(snapshot, "persistence")
    off = [gpu for gpu in found.known if gpu.persistence == "Disabled"]
    daemon = snapshot.driver.persistence_daemon
    if off:
        which = "all GPUs" if len(off) == len(snapshot.gpus.value or ()) and len(off) > 1 else labels(off)
        runs = " although nvidia-persistenced runs" if daemon.value == "active" else ""
        shown = excerpt(snapshot, off, lambda gpu: "Persistence Mode Disabled")
        if snapshot.role.value == "guest":
            yield verdict(
                "warn",
                f"Persistence mode is off on {which}{runs}: the GPUs are taken down whenever no program uses them",
                shown,
                daemon,
                severity="medium",
                fix=Fix(
                    "Run NVIDIA's persistence daemon (role nvidia_driver does)",
                    ("systemctl enable --now nvidia-persistenced", "nvidia-smi -q | grep 'Persistence Mode'"),
                ),
            )
        else:
            yield verdict("info", f"Persistence mode is off on {which}{runs}", shown, daemon)
    elif found.known:
        shown = excerpt(snapshot, found.known, lambda gpu: f"Persistence Mode {gpu.persistence}")
        yield clear(snapshot, found, "Persistence mode is on", shown, daemon)
    else:
        title = "Whether persistence mode is on is not known"
        yield untold(snapshot, found, title, "no GPU told its persistence mode", daemon)


# --- F13: MIG -------------------------------------------------------------------------------------------------------


@rule(
    "F13",
    "mig",
    title="No GPU of a tensor parallel group is split by MIG",
    roles=("bare_metal", "guest"),
    severity="high",
    looks_at=(*_QUERY, "nvidia_smi.L", "nvidia_smi"),
    why=(
        "The driver refuses P2P and NVLink for MIG devices, NCCL cannot join them to a tensor parallel group, and an "
        "engine must be given the UUID of one MIG device."
    ),
    restart="service",
    automation="never",
    risk="Ends every program on the GPU and deletes its MIG devices; some GPUs need a reset.",
    verify="nvidia-smi -L; nvidia-smi --query-gpu=mig.mode.current,mig.mode.pending --format=csv",
    sources=("NVIDIA MIG user guide", "NVIDIA open-gpu-kernel-modules p2p_caps.c", "recorded H100 and A100 with MIG"),
    without_role=True,
)
def _mig(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = snapshot.gpus.value or ()
    found = survey(snapshot, "mig")
    split = [gpu for gpu in gpus if gpu.mig == "Enabled"]
    waiting = [gpu for gpu in gpus if gpu.mig and gpu.mig_pending and gpu.mig != gpu.mig_pending]
    for gpu in split:
        alone = len(gpus) < 2
        parts = [one.profile or f"{one.memory_total_mib} MiB" for one in gpu.mig_instances]
        into = f" with {counted(len(parts), 'instance')} ({_shares(parts)})" if parts else ""
        yield verdict(
            "warn" if alone else "fail",
            f"MIG is on for {label(gpu)}{into}: no P2P, no NVLink and no tensor parallel group with it",
            excerpt(snapshot, [gpu], _mig_words),
            subject=gpu.bus_id,
            severity="medium" if alone else None,
            fix=Fix(
                "Keep MIG and give the engine one MIG UUID, or switch it off while the GPU is idle",
                (
                    "nvidia-smi -L   # the UUIDs: CUDA_VISIBLE_DEVICES=MIG-...",
                    f"nvidia-smi{by_index(gpu)} -mig 0",
                    f"nvidia-smi --gpu-reset{by_index(gpu)}   # only where the mode stays pending",
                ),
            ),
            explains=("D5",),
        )
    for gpu in waiting:
        yield verdict(
            "warn",
            f"MIG is {str(gpu.mig).lower()} for {label(gpu)} and becomes {str(gpu.mig_pending).lower()} at its next "
            "reset",
            excerpt(snapshot, [gpu], lambda one: f"MIG Mode Current {one.mig}, Pending {one.mig_pending}"),
            subject=gpu.bus_id,
            fix=reset_fix(gpu, "Reset the GPU while it is idle"),
        )
    if split or waiting:
        return
    if found.known:
        shown = excerpt(snapshot, found.known, lambda gpu: f"MIG Mode {gpu.mig}")
        yield clear(snapshot, found, "MIG is off", shown)
    elif found.without and not found.silent:
        yield verdict("not_applicable", "These GPUs have no MIG", reason=f"{labels(found.without)} prints N/A")
    elif gpus:
        yield verdict("unknown", "Whether MIG is on is not known", reason=f"{labels(found.silent)} did not tell")
    else:
        yield unread(snapshot, "Whether MIG is on is not known")


def _mig_words(gpu: Gpu) -> str:
    parts = [f"Device {one.index} {one.profile or f'{one.memory_total_mib} MiB'}" for one in gpu.mig_instances]
    return f"MIG Mode {gpu.mig}" + (f": {listed(parts, 8)}" if parts else "")


def _shares(parts: list[str]) -> str:
    counts = {part: parts.count(part) for part in parts}
    return listed([part if number == 1 else f"{number}x {part}" for part, number in counts.items()])


# --- F16: reset -----------------------------------------------------------------------------------------------------


@rule(
    "F16",
    "gpu-requires-reset",
    title="No GPU waits for a reset",
    roles=("bare_metal", "guest"),
    severity="critical",
    looks_at=(*_QUERY, "nvidia_smi"),
    why="A GPU in this state takes no work; its other values (temperature, link, use) mean nothing until the reset.",
    restart="reboot",
    automation="ask",
    risk="A reset ends every program on the GPU and on those that NVLink joins with it; some GPUs only come back with "
    "a power cycle of the host.",
    verify="nvidia-smi -q | grep -E 'Recovery Action|Reset Required'   # wanted: None, No",
    sources=("nvidia-smi manual", "recorded guest whose hypervisor had been suspended"),
    without_role=True,
)
def _requires_reset(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = snapshot.gpus.value or ()
    needing = [(gpu, what) for gpu in gpus if (what := recovery(gpu))]
    for gpu, what in needing:
        yield verdict(
            "fail",
            f"GPU {label(gpu)} needs a {what} and cannot be used",
            excerpt(snapshot, [gpu], _recovery_words),
            subject=gpu.bus_id,
            why=(
                "The driver itself says so. Its other values (temperature, link, use) mean nothing until then. In a "
                "guest, look at the hypervisor too: a host that was suspended leaves its passed-through GPUs so."
            ),
            fix=reset_fix(gpu),
        )
    if needing:
        return
    broken = [gpu for gpu in gpus if _all_error(gpu)]
    for gpu in broken:
        yield verdict(
            "warn",
            f"GPU {label(gpu)} answers with errors instead of values",
            excerpt(snapshot, [gpu], _recovery_words),
            subject=gpu.bus_id,
            severity="high",
            fix=reset_fix(gpu),
        )
    if broken:
        return
    if not gpus:
        yield unread(snapshot, "Whether a GPU waits for a reset is not known")
        return
    found = survey(snapshot, "recovery_action")
    if found.known:
        shown = excerpt(snapshot, found.known, lambda gpu: f"GPU Recovery Action {gpu.recovery_action}")
        yield clear(snapshot, found, "No GPU waits for a reset", shown)
    else:
        # Older drivers tell no recovery action; then values that are there are the sign of a GPU that works.
        yield clear(
            snapshot,
            survey(snapshot, "memory_total_mib", "temperature_c"),
            "No GPU says that it waits for a reset",
            excerpt(snapshot, gpus, lambda gpu: f"{gpu.temperature_c} C, {gpu.memory_total_mib} MiB"),
        )


def _recovery_words(gpu: Gpu) -> str:
    cells = sorted({text for text in gpu.raw.values() if "requires reset" in text or text == "ERR!"})
    said = f"; cells say {listed(cells)}" if cells else ""
    return f"GPU Recovery Action {gpu.recovery_action or 'not told'}{said}"


def _all_error(gpu: Gpu) -> bool:
    """Whether a GPU prints neither a temperature nor a performance state nor a power draw, all of which it has."""
    return {"temperature_c", "pstate", "power_draw_w"} <= gpu.blank


# --- F17: power limit -----------------------------------------------------------------------------------------------


@rule(
    "F17",
    "power-limit",
    title="The power limits are what was meant, and equal",
    roles=("bare_metal", "guest"),
    severity="low",
    looks_at=_QUERY,
    why="A group waits for its slowest GPU; prefill loses more than decode under a low limit.",
    restart="service",
    automation="ask",
    risk="A higher limit needs the power supply and the cooling for it.",
    verify="nvidia-smi --query-gpu=power.limit,power.default_limit,power.min_limit,power.max_limit --format=csv",
    sources=("rtx6kpro measurements", "nvidia-smi manual"),
    gain=Gain("about 4", "% single stream from 300 to 600 W", "rtx6kpro, RTX PRO 6000 Workstation: not repeated here"),
    without_role=True,
)
def _power_limit(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    found = survey(snapshot, "power_limit_w", "power_limit_default_w")
    limits = [gpu for gpu in snapshot.gpus.value or () if gpu.power_limit_w is not None and not recovery(gpu)]
    if not limits:
        none = ("These GPUs have no power limit", "the limits are printed as N/A")
        reason = f"{labels(found.silent)} did not tell"
        yield untold(snapshot, found, "The power limits are not known", reason, without=none)
        return
    spread = _by_name_with_limits(limits)
    shown = excerpt(snapshot, limits, _limit_words)
    for name, values in spread.items():
        if len(values) > 1:
            yield verdict(
                "warn",
                f"GPUs of one kind have different power limits: {listed([f'{value:g} W' for value in sorted(values)])}"
                + (f" ({name})" if name else ""),
                shown,
                fix=Fix("Set one limit for all", ("nvidia-smi -pl WATTS   # lost at the next driver load",)),
            )
    lowest = [
        gpu
        for gpu in found.known
        if gpu.power_limit_w == gpu.power_limit_min_w and gpu.power_limit_w != gpu.power_limit_default_w
    ]
    capped = [
        gpu for gpu in found.known if (gpu.power_limit_w or 0) < (gpu.power_limit_default_w or 0) and gpu not in lowest
    ]
    if lowest:
        yield verdict(
            "warn",
            f"{labels(lowest)} is at its lowest power limit ({lowest[0].power_limit_w:g} of "
            f"{lowest[0].power_limit_default_w:g} W)",
            shown,
            fix=Fix(
                "Raise it, unless it is meant so",
                (f"nvidia-smi{by_index(lowest[0])} -pl {lowest[0].power_limit_default_w:g}",),
            ),
        )
    if capped:
        yield verdict(
            "info",
            f"{labels(capped)} is limited to {capped[0].power_limit_w:g} W of {capped[0].power_limit_default_w:g} W",
            shown,
        )
    if not (lowest or capped or any(len(values) > 1 for values in spread.values())):
        if found.known:
            yield clear(snapshot, found, "The power limits are the defaults, and equal", shown)
        else:
            yield verdict(
                "unknown",
                "Whether the power limits are the defaults is not known",
                shown,
                reason="the default limits were not told (nvidia-smi -q tells them)",
            )


def _by_name_with_limits(gpus: list[Gpu]) -> dict[str, set[float]]:
    limits: dict[str, set[float]] = {}
    for gpu in gpus:
        limits.setdefault(gpu.name, set()).add(gpu.power_limit_w or 0.0)
    return limits


def _limit_words(gpu: Gpu) -> str:
    def watts(value: float | None) -> str:
        return "?" if value is None else f"{value:g} W"

    return (
        f"limit {watts(gpu.power_limit_w)}, default {watts(gpu.power_limit_default_w)}, "
        f"min {watts(gpu.power_limit_min_w)}, max {watts(gpu.power_limit_max_w)}"
    )


# --- F24: compute mode ----------------------------------------------------------------------------------------------


@rule(
    "F24",
    "compute-mode",
    title="Several processes may use each GPU",
    roles=("bare_metal", "guest"),
    severity="medium",
    looks_at=(*_QUERY, "nvidia_smi"),
    why=(
        "Engines open a GPU from more than one process; an exclusive or prohibited GPU then answers `busy or "
        "unavailable`."
    ),
    restart="service",
    automation="ask",
    risk="Others may have chosen the mode so that jobs do not share a GPU.",
    verify="nvidia-smi --query-gpu=compute_mode --format=csv",
    sources=("nvidia-smi manual", "recorded nccl-tests run with Exclusive_Process"),
    without_role=True,
)
def _compute_mode(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    found = survey(snapshot, "compute_mode")
    modes = {label(gpu): _mode(gpu) for gpu in found.known}
    for gpu in found.known:
        given = _mode(gpu)
        if given == "Default":
            continue
        closed = given == "Prohibited"
        yield verdict(
            "fail" if closed else "warn",
            f"The compute mode of {label(gpu)} is {given}: "
            + ("no program may compute on it" if closed else "one process alone may use it"),
            excerpt(snapshot, [gpu], lambda one: f"Compute Mode {one.compute_mode}"),
            subject=gpu.bus_id,
            severity="medium",
            fix=Fix("Set the default mode", (f"nvidia-smi{by_index(gpu)} -c DEFAULT",)),
        )
    if any(mode != "Default" for mode in modes.values()):
        return
    if found.known:
        shown = excerpt(snapshot, found.known, lambda gpu: f"Compute Mode {gpu.compute_mode}")
        yield clear(snapshot, found, "The compute mode is Default", shown)
    else:
        yield untold(snapshot, found, "The compute mode is not known", "no GPU told its compute mode")


def _mode(gpu: Gpu) -> str:
    """Return the compute mode in nvidia-smi's long words; the table shortens them (``E. Process``)."""
    said = (gpu.compute_mode or "").replace(" ", "_")
    return {"E._Process": "Exclusive_Process", "E._Thread": "Exclusive_Thread"}.get(said, said)


# --- F25: confidential computing ------------------------------------------------------------------------------------


@rule(
    "F25",
    "confidential-compute",
    title="Whether the GPUs run in confidential mode",
    roles=("guest",),
    severity="info",
    looks_at=("nvidia_smi.q", "nvidia_smi.qx"),
    why="In confidential mode the driver keeps P2P over PCIe off by design.",
    restart="none",
    automation="never",
    verify="nvidia-smi conf-compute -f",
    sources=("NVIDIA open-gpu-kernel-modules",),
)
def _confidential(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    found = survey(snapshot, "conf_compute_mib")
    protected = [gpu for gpu in found.known if gpu.conf_compute_mib]
    if protected:
        yield verdict(
            "info",
            f"{labels(protected)} runs in confidential mode: P2P over PCIe is off by design",
            excerpt(snapshot, protected, lambda gpu: f"Conf Compute Protected Memory {gpu.conf_compute_mib} MiB"),
        )
    elif found.known:
        shown = excerpt(snapshot, found.known, lambda gpu: "Conf Compute Protected Memory 0 MiB")
        yield clear(snapshot, found, "No GPU runs in confidential mode", shown)
    else:
        title = "Whether confidential mode is on is not known"
        none = ("These GPUs have no confidential mode", "the memory is printed as N/A")
        yield untold(snapshot, found, title, "no GPU told it", without=none)


# --- D16: models ----------------------------------------------------------------------------------------------------


@rule(
    "D16",
    "mixed-gpu-models",
    title="All GPUs are of one model",
    severity="high",
    looks_at=("sysfs.pci", "lspci.vvv", "nvidia_smi.q", "nvidia_smi.L", "nvidia_smi.topo_p2p_r"),
    why="The driver grants no P2P over PCIe between different chips, and a group waits for its slowest GPU.",
    restart="service",
    automation="never",
    risk="Changes which GPUs an engine uses.",
    verify="nvidia-smi -L; nvidia-smi topo -p2p r",
    sources=("NVIDIA open-gpu-kernel-modules, areGpusP2PCompatible", "aikitoria/open-gpu-kernel-modules #43"),
    rung=0,
    without_role=True,
)
def _mixed_models(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    groups, evidence, complete = _groups(snapshot)
    if not groups:
        if models(snapshot) or snapshot.gpus.value:
            yield verdict("unknown", "Whether the GPUs are of one model is not known", reason="no model was told")
        else:
            yield unread(snapshot, "Whether the GPUs are of one model is not known")
        return
    number = sum(len(ones) for ones in groups.values())
    if len(groups) == 1:
        name = next(iter(groups))
        if number == 1:
            yield verdict("not_applicable", "There is one GPU", evidence, reason="one GPU has no other to differ from")
        elif complete:
            yield verdict("pass", f"All {number} GPUs are {name}", evidence)
        else:
            yield verdict("info", f"The {number} GPUs that are shown are all {name}", evidence)
        return
    parts = listed([f"{len(ones)}x {name} ({listed(ones)})" for name, ones in groups.items()])
    refused = _refused_across(snapshot, groups)
    if refused:
        yield verdict(
            "fail",
            f"The GPUs are of different models, and the driver refuses P2P between them: {parts}",
            evidence,
            *(matrix for matrix in snapshot.p2p.values() if matrix.known),
            fix=Fix(
                "Serve with GPUs of one model in each tensor parallel group",
                (
                    "nvidia-smi -L",
                    "# in the engine's unit: Environment=CUDA_DEVICE_ORDER=PCI_BUS_ID "
                    "CUDA_VISIBLE_DEVICES=<the indexes of one model>",
                ),
            ),
            explains=("D5", "D6"),
        )
    else:
        yield verdict(
            "info",
            f"The GPUs are of different models: {parts}; a tensor parallel group should hold one model alone",
            evidence,
        )


def _groups(snapshot: Snapshot) -> tuple[dict[str, list[str]], Fact[Any], bool]:
    """Return the GPUs by model, the evidence, and whether these are all GPUs."""
    groups: dict[str, list[str]] = {}
    for gpu in snapshot.gpus.value or ():
        name = gpu.name or (gpu.device_id or device_id(gpu) or "")
        if not name or name.endswith("..."):
            # A name that the table cut may hide a difference.
            groups = {}
            break
        groups.setdefault(name, []).append(label(gpu))
    if groups:
        return groups, snapshot.gpus, all_listed(snapshot)
    functions = snapshot.pci.gpus()
    for one in functions:
        if one.device is None:
            return {}, snapshot.pci.functions, False
        known = gpu_model(one.device)
        groups.setdefault(known.name if known and known.name else f"10de:{one.device}", []).append(one.bdf)
    return groups, snapshot.pci.functions, snapshot.pci.complete


def _refused_across(snapshot: Snapshot, groups: dict[str, list[str]]) -> bool:
    """Whether a matrix refuses pairs of different models while it grants pairs of one model or none at all."""
    model_of_index: dict[str, str] = {}
    for gpu in snapshot.gpus.value or ():
        if gpu.index is not None:
            model_of_index[f"GPU{gpu.index}"] = gpu.name or gpu.device_id or ""
    across = [
        code
        for mode, matrix in snapshot.p2p.items()
        if mode in ("r", "w", "rw") and matrix.value is not None
        for (first, second), code in matrix.value.pairs().items()
        if model_of_index.get(first) and model_of_index.get(second) and model_of_index[first] != model_of_index[second]
    ]
    return bool(across) and "OK" not in across
