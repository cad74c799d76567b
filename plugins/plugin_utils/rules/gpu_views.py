"""What the judges of GPUs share: which GPUs told a value, which have none, and which cannot tell now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.finding import Excerpt, Fix
from ..core.snapshot import Fact, Gpu, Snapshot
from .common import counted, device_id, gpu_count, has_no_gpu, listed
from .knowledge import GpuModel, gpu_model, gpu_model_by_name
from .registry import Verdict, verdict
from .views import view

_NO_RECOVERY = ("none", "n/a", "[n/a]", "")


def no_gpu() -> Verdict:
    """Return the verdict for a machine without any NVIDIA GPU."""
    return verdict("not_applicable", "There is no NVIDIA GPU here", reason="no NVIDIA GPU on the PCI bus")


def unread(snapshot: Snapshot, title: str) -> Verdict:
    """Return the verdict where no GPU was listed: not applicable without GPUs, else unknown."""
    return no_gpu() if has_no_gpu(snapshot) else verdict("unknown", title, reason=snapshot.gpus.reason)


def label(gpu: Gpu) -> str:
    """Return how a GPU is named in a sentence: its bus id, else its index, else its name."""
    return gpu.bus_id or (f"GPU {gpu.index}" if gpu.index is not None else "") or gpu.name or "a GPU"


def labels(gpus: Sequence[Gpu]) -> str:
    """Return the names of GPUs in a sentence."""
    return listed([label(gpu) for gpu in gpus])


def by_index(gpu: Gpu) -> str:
    """Return the option of nvidia-smi that means this GPU, with a blank before it, or "" for all."""
    return f" -i {gpu.bus_id}" if gpu.bus_id else "" if gpu.index is None else f" -i {gpu.index}"


def recovery(gpu: Gpu) -> str:
    """Return what a GPU needs before it works again: ``reset``, ``reboot`` ..., or "" for nothing."""
    said = (gpu.recovery_action or "").lower()
    if said not in _NO_RECOVERY:
        return said
    return "reset" if "requires reset" in "\n".join(gpu.raw.values()) else ""


@view
def models(snapshot: Snapshot) -> Mapping[str, GpuModel | None]:
    """Return what is known of each GPU, by PCI address or name."""
    found: dict[str, GpuModel | None] = {one.bdf: gpu_model(one.device) for one in snapshot.pci.gpus()}
    if not found:
        found = {label(gpu): model_of(gpu) for gpu in snapshot.gpus.value or ()}
    return found


def model_of(gpu: Gpu) -> GpuModel | None:
    """Return what is known of this GPU."""
    return gpu_model(gpu.device_id or device_id(gpu)) or gpu_model_by_name(gpu.name)


def module_flavour(snapshot: Snapshot) -> Fact[str]:
    """Return open or proprietary: what is loaded, else what lies on disk."""
    driver = snapshot.driver
    if driver.loaded_flavour.known:
        return driver.loaded_flavour
    licence = driver.module_license.value
    if licence is not None:
        flavour = "open" if "GPL" in licence or "MIT" in licence else "proprietary"
        return Fact(flavour, driver.module_license.source, driver.module_license.excerpt or licence)
    return Fact(reason=driver.loaded_flavour.reason or "neither the loaded module nor modinfo was read")


@view
def all_listed(snapshot: Snapshot) -> bool:
    """Whether the list of GPUs surely holds them all: a cut paste must not stand for the whole machine."""
    count = len(snapshot.gpus.value or ())
    if snapshot.driver.attached_gpus.value is not None:
        return snapshot.driver.attached_gpus.value == count
    if snapshot.driver.processes.source.partition("@")[0] == "nvidia_smi":
        # The box of processes stands below the table, so the table is whole.
        return True
    if snapshot.pci.functions.known and snapshot.pci.complete:
        return gpu_count(snapshot).value == count
    return snapshot.topology.value is not None and len(snapshot.topology.value.gpus) == count


@dataclass(frozen=True)
class Survey:
    """GPUs by what they say of some fields.

    ``known`` told all of them; ``without`` printed N/A for one, so the GPU has no such thing; ``silent`` did not tell,
    or needs a reset.
    """

    known: tuple[Gpu, ...]
    without: tuple[Gpu, ...]
    silent: tuple[Gpu, ...]


@view
def survey(snapshot: Snapshot, *fields: str) -> Survey:
    """Sort the GPUs by whether they told these fields."""
    known, without, silent = [], [], []
    for gpu in snapshot.gpus.value or ():
        missing = [name for name in fields if getattr(gpu, name) in (None, (), {})]
        if not missing:
            known.append(gpu)
        elif recovery(gpu) or any(name not in gpu.blank for name in missing):
            silent.append(gpu)
        else:
            without.append(gpu)
    return Survey(tuple(known), tuple(without), tuple(silent))


def excerpt(snapshot: Snapshot, gpus: Sequence[Gpu], show: Callable[[Gpu], str]) -> Excerpt:
    """Return one line for each of these GPUs as evidence."""
    rows = [f"{label(gpu)}: {show(gpu)}" for gpu in gpus[:12]]
    return Excerpt(snapshot.gpus.source or "nvidia_smi.q", "\n".join(rows))


def clear(snapshot: Snapshot, found: Survey, title: str, *evidence: Fact[Any] | Excerpt) -> Verdict:
    """Return the good verdict for the GPUs that told: a pass only where they are all GPUs of the machine."""
    if found.silent:
        reason = (
            f"{labels(found.silent)} did not tell"
            if not any(recovery(gpu) for gpu in found.silent)
            else f"{labels(found.silent)} needs a reset first (rule F16)"
        )
        return verdict("unknown", f"{title}, on the GPUs that told it", *evidence, reason=reason)
    if all_listed(snapshot):
        return verdict("pass", title, *evidence)
    number = len(found.known) + len(found.without)
    return verdict("info", f"{title} ({counted(number, 'GPU')} shown; whether that is all is not known)", *evidence)


def untold(
    snapshot: Snapshot,
    found: Survey,
    title: str,
    reason: str,
    *evidence: Fact[Any] | Excerpt,
    without: tuple[str, str] | None = None,
) -> Verdict:
    """Return the verdict where no GPU told what is asked: ``title`` is then not known, for ``reason``.

    ``without``: title and reason where the GPUs have no such thing.
    """
    if without and found.without and not found.silent:
        return verdict("not_applicable", without[0], reason=without[1])
    if snapshot.gpus.value:
        return verdict("unknown", title, *evidence, reason=reason)
    return unread(snapshot, title)


def reset_fix(gpu: Gpu, summary: str = "") -> Fix:
    """Return how to reset one GPU."""
    return Fix(
        summary or "Stop the engine, then reset the GPU; in a guest a stop and start of the VM is often needed",
        (
            "fuser -v /dev/nvidia*   # nothing may hold the GPU",
            f"nvidia-smi --gpu-reset{by_index(gpu)}",
            "# refused or without effect: reboot; in a guest stop and start the VM on its hypervisor",
        ),
    )
