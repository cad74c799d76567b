"""Rules F14, F18, F19, F20 and D18: memory errors, throttling, and what load and power say together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..core.finding import Fix
from ..core.snapshot import Gpu, GpuSample, Snapshot
from .common import in_container, listed
from .gpu_views import clear, excerpt, label, labels, recovery, reset_fix, survey, unread, untold
from .knowledge import number
from .peers import grants
from .registry import Fleet, Verdict, rule, verdict

_QUERY = ("nvidia_smi.q", "nvidia_smi.qx", "nvidia_smi.query_gpu")

# --- F14: memory ----------------------------------------------------------------------------------------------------

_REPLACE = (
    ("remap_failed", "a memory row could not be remapped"),
    ("unrepairable_memory", "memory cannot be repaired"),
    ("sram_threshold_exceeded", "uncorrectable SRAM errors passed the threshold"),
)
_PENDING = (
    ("remap_pending", "a row remap"),
    ("retired_pending", "a page retirement"),
    ("channel_repair_pending", "a channel repair"),
    ("tpc_repair_pending", "a TPC repair"),
)
_NO_LOAD = ("These GPUs tell no load", "it is printed as N/A (as with MIG)")
_MEMORY_FIELDS = ("ecc", "ecc_uncorrected_volatile", *(name for name, _ in (*_REPLACE, *_PENDING)))


@rule(
    "F14",
    "ecc-and-remap",
    title="The GPUs' memory has no uncorrectable errors and waits for no repair",
    roles=("bare_metal", "guest"),
    severity="critical",
    looks_at=_QUERY,
    why="An uncorrectable error ends programs or corrupts data; a GPU that cannot remap rows any more is worn out.",
    restart="reboot",
    automation="never",
    risk="A reset ends every program on the GPU.",
    verify="nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT",
    sources=("NVIDIA GPU memory error management", "NVIDIA dynamic page retirement"),
    without_role=True,
)
def _memory(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    gpus = snapshot.gpus.value or ()
    if not gpus:
        yield unread(snapshot, "Whether the GPUs' memory is healthy is not known")
        return
    told = [gpu for gpu in gpus if any(getattr(gpu, name) is not None for name in _MEMORY_FIELDS)]
    bad = [one for gpu in told if (one := _memory_of(snapshot, gpu)) is not None]
    yield from bad
    by_mode: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        if gpu.ecc is not None:
            by_mode.setdefault(gpu.ecc, []).append(gpu)
    if len(by_mode) > 1:
        yield verdict(
            "warn",
            f"ECC is on for {labels(by_mode['Enabled'])} and off for {labels(by_mode['Disabled'])}: their memory "
            "differs in size and speed",
            excerpt(snapshot, gpus, lambda gpu: f"ECC Mode {gpu.ecc}"),
            fix=Fix("Set one mode for all", ("nvidia-smi -e 1   # or 0, then a reboot", "reboot")),
        )
    waiting = [gpu for gpu in gpus if gpu.ecc and gpu.ecc_pending and gpu.ecc != gpu.ecc_pending]
    if waiting:
        yield verdict(
            "info",
            f"The ECC mode of {labels(waiting)} changes at the next reboot",
            excerpt(snapshot, waiting, lambda gpu: f"ECC Mode Current {gpu.ecc}, Pending {gpu.ecc_pending}"),
        )
    if bad or len(by_mode) > 1:
        return
    found = survey(snapshot, "ecc_uncorrected_volatile")
    if found.known:
        yield clear(
            snapshot,
            found,
            "No uncorrectable memory error since the driver was loaded, and no repair is due",
            excerpt(snapshot, found.known, lambda gpu: f"volatile uncorrectable {gpu.ecc_uncorrected_volatile}"),
        )
    elif found.without and not found.silent:
        yield verdict(
            "not_applicable", "These GPUs count no memory errors", reason="ECC is off or not there: the counts are N/A"
        )
    else:
        yield verdict(
            "unknown",
            "Whether the GPUs' memory is healthy is not known",
            reason=f"{labels(found.silent)} did not tell its error counts (nvidia-smi -q does)",
        )


def _memory_of(snapshot: Snapshot, gpu: Gpu) -> Verdict | None:
    worn = [words for name, words in _REPLACE if getattr(gpu, name) == "Yes"]
    pending = [words for name, words in _PENDING if getattr(gpu, name) == "Yes"]
    errors = gpu.ecc_uncorrected_volatile or 0
    if not worn and not pending and not errors:
        return None
    shown = excerpt(snapshot, [gpu], _memory_words)
    if worn:
        return verdict(
            "fail",
            f"The memory of {label(gpu)} is worn out: {listed(worn)}",
            shown,
            subject=gpu.bus_id,
            fix=Fix(
                "Take the GPU out of service and have it replaced",
                ("nvidia-bug-report.sh", f"nvidia-smi -q -d ECC,ROW_REMAPPER -i {gpu.bus_id or gpu.index}"),
            ),
        )
    if errors:
        also = f", and waits for {listed(pending)}" if pending else ""
        return verdict(
            "fail",
            f"{label(gpu)} counted {errors} uncorrectable memory error{'' if errors == 1 else 's'}{also}",
            shown,
            subject=gpu.bus_id,
            fix=reset_fix(gpu, "Stop the engine, reset the GPU, and see whether the count stays 0 under load"),
        )
    return verdict(
        "fail",
        f"{label(gpu)} waits for {listed(pending)}, which happens at its next reset",
        shown,
        subject=gpu.bus_id,
        severity="high",
        fix=reset_fix(gpu),
    )


def _memory_words(gpu: Gpu) -> str:
    words = [f"{name.replace('_', ' ')} {getattr(gpu, name)}" for name in _MEMORY_FIELDS if getattr(gpu, name)]
    return ", ".join(words)


# --- F18: throttling ------------------------------------------------------------------------------------------------

_HARDWARE = {"hw_thermal": "heat", "hw_power_brake": "a power brake signal", "hw_slowdown": "hardware"}
_SOFT = {
    "sw_power_cap": "at the power limit",
    "application_clocks": "at set application clocks",
    "sync_boost": "kept in step with other GPUs",
}


@rule(
    "F18",
    "throttle",
    title="No GPU is slowed down by heat or power",
    roles=("bare_metal", "guest"),
    severity="high",
    looks_at=_QUERY,
    why="A GPU that the hardware slows down holds up its whole group: cooling, a power cable or the supply.",
    restart="none",
    automation="never",
    verify="nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER   # under load",
    sources=("nvidia-smi manual", "NVML clocks event reasons"),
    without_role=True,
)
def _throttle(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    found = survey(snapshot, "clock_reasons")
    bad = False
    for gpu in found.known:
        active = [name for name, on in gpu.clock_reasons.items() if on]
        hard = [name for name in active if name in ("hw_thermal", "hw_power_brake")]
        if not hard and "idle" not in active:
            hard = [name for name in active if name == "hw_slowdown"]
        shown = excerpt(snapshot, [gpu], _reason_words)
        heat = "" if gpu.temperature_c is None else f" at {gpu.temperature_c} C"
        if hard:
            bad = True
            yield verdict(
                "fail",
                f"{label(gpu)} is slowed down by {listed([_HARDWARE[name] for name in hard])}{heat}",
                shown,
                subject=gpu.bus_id,
                fix=Fix(
                    "Look at cooling, power cables and the supply before anything else",
                    (
                        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER",
                        "nvidia-smi dmon -s pucv -c 30   # under load",
                        "ipmitool sdr type temperature   # where the machine has a BMC",
                    ),
                ),
                explains=("F19",),
            )
        elif "sw_thermal" in active:
            bad = True
            yield verdict(
                "warn",
                f"{label(gpu)} is slowed down by heat{heat}",
                shown,
                subject=gpu.bus_id,
                severity="medium",
                fix=Fix(
                    "Look at fans and air flow; a lower power limit helps too",
                    ("nvidia-smi -q -d TEMPERATURE,PERFORMANCE", "nvidia-smi -pl WATTS"),
                ),
                explains=("F19",),
            )
        elif soft := [words for name, words in _SOFT.items() if name in active]:
            yield verdict("info", f"{label(gpu)} runs {listed(soft)}", shown, subject=gpu.bus_id)
    if bad:
        return
    if found.known:
        idle = [gpu for gpu in found.known if gpu.clock_reasons.get("idle")]
        when = ", while it was idle" if len(idle) == len(found.known) else ""
        shown = excerpt(snapshot, found.known, _reason_words)
        yield clear(snapshot, found, f"No GPU is slowed down{when}", shown)
    else:
        none = ("These GPUs tell no reasons for their clocks", "the reasons are printed as N/A")
        reason = f"{labels(found.silent)} did not tell its clock reasons (nvidia-smi -q does)"
        yield untold(snapshot, found, "Whether a GPU is slowed down is not known", reason, without=none)


def _reason_words(gpu: Gpu) -> str:
    active = [name.replace("_", " ") for name, on in gpu.clock_reasons.items() if on]
    return f"clocks event reasons: {listed(active) or 'none active'}"


# --- F19, F20, D18: load --------------------------------------------------------------------------------------------


def _readings(snapshot: Snapshot, gpu: Gpu) -> list[GpuSample]:
    """Return the readings of one GPU: its samples, or the one reading of the listing."""
    names = {gpu.bus_id, "" if gpu.index is None else str(gpu.index), gpu.uuid} - {""}
    found = [one for one in snapshot.driver.samples.value or () if one.gpu in names]
    if found:
        return found
    return [
        GpuSample(gpu.bus_id, None, gpu.utilization_percent, gpu.power_draw_w, gpu.sm_clock_mhz, gpu.pstate),
    ]


def _span_s(readings: Sequence[GpuSample]) -> float:
    times = [one.at_s for one in readings if one.at_s is not None]
    return max(times) - min(times) if len(times) > 1 else 0.0


def _load_words(gpu: Gpu) -> str:
    parts = (
        (gpu.utilization_percent, "{} % busy"),
        (gpu.power_draw_w, "{:g} W"),
        (gpu.power_limit_w, "of {:g} W"),
        (gpu.pstate, "{}"),
        (gpu.sm_clock_mhz, "{} MHz"),
        (gpu.sm_clock_max_mhz, "of {} MHz"),
    )
    return ", ".join(form.format(given) for given, form in parts if given is not None)


@rule(
    "F19",
    "pstate-stuck",
    title="A busy GPU runs at its working clocks",
    roles=("bare_metal", "guest"),
    severity="high",
    looks_at=(*_QUERY, "nvidia_smi.dmon"),
    why="A power brake pin, a lock on the clocks that was left behind, or a driver fault can hold a GPU at low clocks.",
    restart="reboot",
    automation="never",
    risk="Reboots this machine or reloads the driver; a running engine stops.",
    verify="nvidia-smi --query-gpu=pstate,clocks.sm,clocks.max.sm,utilization.gpu --format=csv   # under load",
    sources=("club-3090 discussion 162",),
    without_role=True,
)
def _stuck(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    busy_from, low = number("gpu.busy_percent"), number("gpu.low_clock_percent")
    found = survey(snapshot, "utilization_percent")
    judged = bad = False
    for gpu in found.known:
        if (gpu.utilization_percent or 0) <= busy_from or (gpu.pstate is None and gpu.sm_clock_mhz is None):
            continue
        judged = True
        idle_state = gpu.pstate in ("P5", "P8", "P12")
        share = (
            None
            if not gpu.sm_clock_mhz or not gpu.sm_clock_max_mhz
            else round(100 * gpu.sm_clock_mhz / gpu.sm_clock_max_mhz)
        )
        if idle_state or (share is not None and share < low):
            bad = True
            what = f"in {gpu.pstate}" if idle_state else f"at {share} % of its highest clock"
            yield verdict(
                "fail",
                f"{label(gpu)} is {gpu.utilization_percent} % busy, but {what}",
                excerpt(snapshot, [gpu], _load_words),
                subject=gpu.bus_id,
                fix=Fix(
                    "Take off a lock on the clocks; then look at the power connector, then reload the driver",
                    (
                        f"nvidia-smi -i {gpu.bus_id or gpu.index} -rgc",
                        f"nvidia-smi -i {gpu.bus_id or gpu.index} -q -d PERFORMANCE,CLOCK",
                        "reboot   # if neither helped",
                    ),
                ),
            )
    if bad:
        return
    if judged:
        shown = excerpt(snapshot, found.known, _load_words)
        yield clear(snapshot, found, "The GPUs that are busy run at working clocks", shown)
    elif found.known:
        yield verdict(
            "not_applicable",
            "No GPU is busy: clocks mean something only under load",
            excerpt(snapshot, found.known, _load_words),
            reason=f"no GPU was more than {busy_from} % busy",
        )
    else:
        title = "Whether a busy GPU runs slowly is not known"
        yield untold(snapshot, found, title, "no GPU told its load", without=_NO_LOAD)


@rule(
    "F20",
    "power-util-pattern",
    title="What load and power say together",
    roles=("bare_metal", "guest"),
    severity="info",
    looks_at=(*_QUERY, "nvidia_smi.dmon", "nvidia_smi.topo_p2p_r"),
    why=(
        "Full load at little power is a GPU that waits: for other GPUs, or for memory as any small decode does. It is "
        "evidence, never a verdict."
    ),
    verify="nvidia-smi dmon -s pu -c 30   # while the engine decodes",
    sources=("rtx6kpro measurements",),
    without_role=True,
)
def _pattern(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    full, low = number("gpu.full_percent"), number("gpu.low_power_percent")
    found = survey(snapshot, "utilization_percent", "power_draw_w", "power_limit_w")
    if not found.known:
        none = ("These GPUs tell no load or power", "they are printed as N/A")
        yield untold(snapshot, found, "What load and power say is not known", "no GPU told both", without=none)
        return
    waiting = [
        gpu
        for gpu in found.known
        if (gpu.utilization_percent or 0) >= full
        and (gpu.power_draw_w or 0) <= (gpu.power_limit_w or 0) * low / 100
        and not any(gpu.clock_reasons.get(name) for name in (*_HARDWARE, "sw_thermal"))
    ]
    shown = excerpt(snapshot, waiting or found.known, _load_words)
    claims = grants(snapshot)
    if waiting and claims is not None and not claims.all_granted and len(claims.gpus) > 1:
        yield verdict(
            "info",
            f"{labels(waiting)} is fully busy at {_watts(waiting)} W: bound by communication or latency, which fits "
            "the missing P2P",
            shown,
        )
    elif waiting:
        yield verdict(
            "info",
            f"{labels(waiting)} is fully busy at {_watts(waiting)} W: usual for small decode batches, also with P2P",
            shown,
        )
    else:
        yield verdict(
            "not_applicable",
            "No GPU is fully busy at little power",
            shown,
            reason="the pattern shows only under load",
        )


def _watts(gpus: Sequence[Gpu]) -> str:
    return listed(sorted({f"{gpu.power_draw_w:g} of {gpu.power_limit_w:g}" for gpu in gpus}), 3)


@rule(
    "D18",
    "gpu-wedged",
    title="No GPU is busy without a program",
    severity="critical",
    looks_at=(*_QUERY, "nvidia_smi", "nvidia_smi.dmon", "nvidia_smi.compute_apps"),
    why="Peer traffic that hung keeps a GPU at full load and power after its program is gone, until it is reset.",
    restart="reboot",
    automation="ask",
    risk=(
        "The reset takes all GPUs that are linked and needs them free; a VM that is stopped and started may not get an "
        "RTX 5090 or RTX PRO 6000 Blackwell back until its host is power-cycled."
    ),
    verify="nvidia-smi   # idle: 0 %, P8",
    sources=("rtx6kpro issue 15",),
    without_role=True,
)
def _wedged(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    found = survey(snapshot, "utilization_percent", "power_draw_w")
    if not found.known:
        if snapshot.role.value == "hypervisor" and not snapshot.gpus.known:
            yield verdict("not_applicable", "The GPUs belong to guests", reason="nvidia-smi does not run here")
        else:
            title = "Whether a GPU is wedged is not known"
            yield untold(snapshot, found, title, "no GPU told load and power", without=_NO_LOAD)
        return
    hot = [gpu for gpu in found.known if not recovery(gpu) and all(map(_runs_hot, _readings(snapshot, gpu)))]
    if not hot:
        shown = excerpt(snapshot, found.known, _load_words)
        yield clear(snapshot, found, "No GPU is busy without a program", shown)
        return
    processes = snapshot.driver.processes
    if processes.value is None or in_container(snapshot):
        reason = "a container does not see the programs of others" if in_container(snapshot) else processes.reason
        yield verdict(
            "unknown",
            f"{labels(hot)} is fully busy; whether a program uses it is not known",
            excerpt(snapshot, hot, _load_words),
            reason=reason,
        )
        return
    used = {one.gpu for one in processes.value}
    free = [gpu for gpu in hot if not used & {gpu.bus_id, "" if gpu.index is None else str(gpu.index), gpu.uuid}]
    for gpu in free:
        readings = _readings(snapshot, gpu)
        span = _span_s(readings)
        sure = span >= number("gpu.wedged_s")
        for_how_long = f" for {span:.0f} s" if span else ""
        yield verdict(
            "fail" if sure else "warn",
            f"{label(gpu)} is {gpu.utilization_percent} % busy at {gpu.power_draw_w:g} W{for_how_long} without any "
            "program" + ("" if sure else ": look again in a minute, one reading may be the end of a job"),
            excerpt(snapshot, [gpu], _load_words),
            processes,
            subject=gpu.bus_id,
            severity="critical" if sure else "medium",
            fix=Fix(
                "Reset the GPUs; in a guest stop and start the VM where the reset is refused",
                (
                    "fuser -v /dev/nvidia*   # nothing may hold a GPU",
                    "nvidia-smi --gpu-reset",
                    "# until the cause is known: NCCL_P2P_DISABLE=1 and the engine's custom all-reduce off",
                ),
            ),
        )
    if not free:
        yield clear(
            snapshot, found, "The GPUs that are busy have a program", excerpt(snapshot, hot, _load_words), processes
        )


def _runs_hot(one: GpuSample) -> bool:
    return (one.utilization_percent or 0) >= number("gpu.full_percent") and (one.power_w or 0) > number(
        "gpu.wedged_power_w"
    )
