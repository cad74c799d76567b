"""Rule F15: NVIDIA's error events (Xid) in the kernel log, by what they mean (``xid.yml``)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..core.finding import Excerpt, Fix
from ..core.snapshot import Snapshot, Xid
from .common import counted, has_no_gpu, listed
from .gpu_views import no_gpu
from .knowledge import table
from .registry import Fleet, Verdict, rule, verdict

_UNLISTED = "an event that Peerlane has no entry for"

# What the rules about the same thing find when this Xid was the cause.
_CAUSES: dict[int, tuple[str, ...]] = {
    48: ("F14", "F16"),
    62: ("F16",),
    64: ("F14", "F16"),
    74: ("F10",),
    79: ("F1", "F16", "A5"),
    94: ("F14",),
    95: ("F14", "F16"),
    109: ("F16",),
    119: ("F7", "F1", "F16"),
    120: ("F7", "F1", "F16"),
    136: ("F10",),
    140: ("F14", "F16"),
    143: ("F1", "F16"),
    **dict.fromkeys(range(144, 151), ("F10", "F16")),
}

_RESET = (
    "fuser -v /dev/nvidia*   # stop what holds the GPU",
    "nvidia-smi --gpu-reset -i {pci}.0",
    "# refused, or it comes back: reboot the machine; in a guest stop and start the VM on its hypervisor",
)
_STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "restart_app": (
        "Restart the program; look at the hardware only where other programs meet the same",
        ("journalctl -k | grep Xid", "compute-sanitizer PROGRAM   # finds accesses of a program beyond its memory"),
    ),
    "reset": ("Take the GPU out of service and reset it; compare driver and GSP firmware versions", _RESET),
    "reboot": (
        "Power-cycle the machine; check seating, riser, power and cooling before the GPU serves again",
        (
            "nvidia-smi -q | grep -E 'Recovery Action|Reset Required'",
            "systemctl poweroff   # a warm reboot may leave a GPU that fell off the bus dead",
            "dmesg | grep -E 'AER|Xid'   # afterwards, under load",
        ),
    ),
    "support": (
        "Save a bug report and ask the vendor; plan a replacement",
        ("nvidia-bug-report.sh", "nvidia-smi -q -d ECC,ROW_REMAPPER,PAGE_RETIREMENT"),
    ),
    "cable": ("Connect the GPU's power cable", ("nvidia-smi -q -d POWER,PERFORMANCE",)),
    "fabric": (
        "Look at the links and the fabric manager, then reset the GPUs that are linked",
        ("nvidia-smi nvlink -s", "systemctl status nvidia-fabricmanager", "nvidia-smi --gpu-reset"),
    ),
    "none": ("Watch whether it repeats", ("journalctl -k | grep Xid",)),
}


@dataclass(frozen=True)
class Meaning:
    """What ``xid.yml`` says of one number."""

    kind: str
    action: str
    words: str


@functools.cache
def meanings() -> dict[int, Meaning]:
    """Return the table of Xid numbers. Its source stands in the file (``origin``)."""
    return {
        int(code): Meaning(row["class"], row["action"], row["words"]) for code, row in table("xid.yml")["codes"].items()
    }


def meaning(code: int) -> Meaning:
    """Return what a number means; one that is not listed is a notice."""
    return meanings().get(code) or Meaning("notice", "none", _UNLISTED)


@rule(
    "F15",
    "xid",
    title="The kernel log shows no NVIDIA error event (Xid)",
    severity="critical",
    looks_at=("kernel_log",),
    why="An Xid is the driver's own report of what went wrong on a GPU; its number tells whose fault it mostly is.",
    restart="reboot",
    automation="never",
    risk="A reset ends every process on the GPU, and on the GPUs that NVLink joins with it.",
    verify="journalctl -k -b | grep Xid   # nothing new under load",
    sources=("NVIDIA Xid catalog", "NVIDIA open-gpu-kernel-modules nverror.h", "recorded logs with Xid 13, 79, 119"),
    without_role=True,
)
def _xids(snapshot: Snapshot, fleet: Fleet) -> Iterator[Verdict]:
    log = snapshot.kernel.log
    if log.value is None:
        yield (
            no_gpu()
            if has_no_gpu(snapshot)
            else verdict("unknown", "Whether the driver reported errors is not known", reason=log.reason)
        )
        return
    if not log.value.xids:
        yield from _none(snapshot)
        return
    groups: dict[str, list[Xid]] = {}
    for one in log.value.xids:
        groups.setdefault(one.pci, []).append(one)
    broken = {pci: found for pci, ones in groups.items() if (found := _critical(ones))}
    for pci, ones in groups.items():
        yield _judged(snapshot, pci, ones, broken)


def _none(snapshot: Snapshot) -> Iterator[Verdict]:
    log = snapshot.kernel.log
    assert log.value is not None
    if has_no_gpu(snapshot):
        yield no_gpu()
    elif log.value.from_boot and snapshot.collected_at:
        yield verdict("pass", "The kernel log shows no Xid since the boot", Excerpt(log.source, "no line with Xid"))
    elif snapshot.role.value == "hypervisor":
        yield verdict("not_applicable", "No Xid in the kernel log", reason="the GPUs' driver runs in the guests")
    else:
        yield verdict(
            "info",
            f"No Xid in {counted(len(log.value.lines), 'line')} of the kernel log; whether older lines are missing is "
            "not known",
            Excerpt(log.source or "kernel_log", "no line with Xid"),
        )


def _critical(ones: Sequence[Xid]) -> list[Xid]:
    return [one for one in ones if meaning(one.code).kind == "critical"]


def _judged(snapshot: Snapshot, pci: str, ones: list[Xid], broken: dict[str, list[Xid]]) -> Verdict:
    shown = xid_excerpt(snapshot, ones)
    if pci in broken:
        first = broken[pci][0]
        same = [one for one in ones if one.code == first.code]
        others = list(dict.fromkeys(one.code for one in ones if one.code != first.code))
        also = f", with Xid {listed([str(code) for code in others])} beside it" if others else ""
        action = meaning(first.code).action
        needed = _needed(ones)
        return verdict(
            "fail",
            f"{_named(first.code)} on {pci}: {_how_often(snapshot, same)}{also}",
            shown,
            subject=pci,
            why=f"{_what_it_means(first)}{f' The driver asks for: {needed}.' if needed else ''}",
            fix=_fix(action, pci),
            explains=tuple(dict.fromkeys(rule_ for one in broken[pci] for rule_ in _CAUSES.get(one.code, ()))),
        )
    codes = list(dict.fromkeys(one.code for one in ones))
    kinds = {meaning(code).kind for code in codes}
    needed = _needed(ones)
    if needed:
        return _asked(pci, ones, needed, broken, shown)
    if kinds <= {"info"}:
        return verdict("info", f"{_list_named(codes)} on {pci}: {_how_often(snapshot, ones)}", shown, subject=pci)
    if kinds <= {"follow"} and broken:
        return verdict(
            "info",
            f"{_list_named(codes)} on {pci} follows what happened on {listed(sorted(broken))}",
            shown,
            subject=pci,
        )
    leading = next((code for code in codes if meaning(code).kind in ("notice", "application")), codes[0])
    return verdict(
        "warn",
        f"{_list_named(codes)} on {pci}: {_how_often(snapshot, ones)}",
        shown,
        subject=pci,
        severity="medium",
        why=_what_it_means(next(one for one in ones if one.code == leading)),
        fix=_fix(meaning(leading).action, pci),
    )


def _asked(pci: str, ones: list[Xid], needed: str, broken: dict[str, list[Xid]], shown: Excerpt) -> Verdict:
    """Xid 154 without an error of its own: the driver wants something done, mostly because of another GPU."""
    others = sorted(one for one in broken if one != pci)
    cause = f", because of Xid {broken[others[0]][0].code} on {listed(others)}" if others else ""
    return verdict(
        "warn" if others else "fail",
        f"The driver asks for a recovery of {pci} ({needed}){cause}",
        shown,
        subject=pci,
        severity="high" if others else "critical",
        why=(
            "This GPU reported no error itself: a reboot is asked for the whole machine."
            if others
            else "Xid 154 only says what the GPU needs; the Xid before it, which is not in this log, says why."
        ),
        fix=_fix("reboot" if "reboot" in needed.lower() else "reset", pci),
        explains=() if others else ("F16",),
    )


def _named(code: int) -> str:
    return f"Xid {code} ({meaning(code).words})"


def _list_named(codes: Sequence[int]) -> str:
    return listed([_named(code) for code in codes], 3)


def _needed(ones: Sequence[Xid]) -> str:
    """Return the last recovery action that Xid 154 named, or "" for none."""
    for one in reversed(ones):
        if one.code == 154:
            found = re.search(r"to 0x[0-9a-fA-F]+ \(([^)]+)\)", one.detail)
            words = found[1] if found else re.sub(r"^GPU recovery action\W*", "", one.detail).strip(" .")
            return "" if words.lower() == "none" else words
    return ""


def _what_it_means(one: Xid) -> str:
    known = meaning(one.code)
    if known.kind == "application":
        return (
            "Mostly the program or its kernels are at fault; suspect the GPU only where different programs meet it"
            f"{f' (here: {one.process})' if one.process else ''}."
        )
    if one.code == 79:
        return (
            "The GPU no longer answers on PCIe: power, riser, slot, heat or a failed reset. Other GPUs of the machine "
            "may log what follows from it."
        )
    if one.code in (119, 120):
        return "The firmware that runs the GPU hangs; every later call to it waits for its time limit, nvidia-smi too."
    if known.words == _UNLISTED:
        return f"This number is not in Peerlane's table; the driver says: {one.detail[:160] or 'nothing more'}"
    return f"{known.words[:1].upper()}{known.words[1:]}. The driver says: {one.detail[:160] or 'nothing more'}"


def _how_often(snapshot: Snapshot, ones: Sequence[Xid]) -> str:
    stamps = [one.time or one.stamp for one in ones if one.time or one.stamp]
    span = ""
    if stamps:
        span = f" at {stamps[0]}" if stamps[0] == stamps[-1] else f", first {stamps[0]}, last {stamps[-1]}"
    log = snapshot.kernel.log.value
    least = "at least " if log is not None and log.suppressed else ""
    return f"{least}{counted(len(ones), 'event')}{span}"


def xid_excerpt(snapshot: Snapshot, ones: Sequence[Xid]) -> Excerpt:
    """Return these events as evidence: the first and the last, with the count of those between."""
    shown = list(ones) if len(ones) <= 6 else [*ones[:3], *ones[-3:]]
    rows = []
    for one in shown:
        who = f"pid={one.pid}, " if one.pid is not None else ""
        what = f"name={one.process}, " if one.process else ""
        stamp = f"[{one.stamp}] " if one.stamp else ""
        rows.append(f"{stamp}NVRM: Xid (PCI:{one.pci}): {one.code}, {who}{what}{one.detail}"[:300])
    if len(ones) > 6:
        rows.insert(3, f"... {len(ones) - 6} more ...")
    return Excerpt(snapshot.kernel.log.source or "kernel_log", "\n".join(rows))


def _fix(action: str, pci: str) -> Fix:
    summary, steps = _STEPS.get(action, _STEPS["none"])
    return Fix(
        summary,
        tuple(step.replace("{pci}", pci.rpartition(".")[0] if pci.count(".") else pci) for step in steps),
        restart="service" if action in ("restart_app", "none") else "reboot",
    )
