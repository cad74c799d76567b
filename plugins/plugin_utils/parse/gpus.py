"""One list of GPUs out of everything that ``nvidia-smi`` said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.snapshot import Gpu, MigInstance
from ..core.values import changed

_CUT = "..."
_EMPTY: tuple[object, ...] = (None, "", (), {})


def merge(readings: Iterable[tuple[str, Sequence[Gpu]]]) -> tuple[Gpu, ...]:
    """Join (source, GPUs) readings: an earlier one stands, a later one fills what it lacks; whole names beat cut ones.

    GPUs are the same where their bus addresses are, or without those their UUIDs, or without both their indexes.
    """
    merged: list[Gpu] = []
    for source, gpus in readings:
        for gpu in gpus:
            at = next((at for at, known in enumerate(merged) if _same(known, gpu)), None)
            if at is None:
                merged.append(changed(gpu, sources=(source,)))
            else:
                merged[at] = _join(merged[at], gpu, source)
    return tuple(sorted(merged, key=lambda gpu: (gpu.index is None, gpu.index or 0, gpu.bus_id)))


def _same(first: Gpu, second: Gpu) -> bool:
    if first.bus_id and second.bus_id:
        return first.bus_id == second.bus_id
    # A redacted UUID (all zeros) is shared by every GPU of a paste and names none.
    if first.uuid.strip("GPU-0") and second.uuid.strip("GPU-0"):
        return first.uuid == second.uuid
    return first.index is not None and first.index == second.index


def _join(first: Gpu, second: Gpu, source: str) -> Gpu:
    known = vars(first)
    filled: dict[str, Any] = {
        name: value
        for name, value in vars(second).items()
        if value is not None and known[name] in _EMPTY and name not in ("raw", "sources", "blank")
    }
    if first.mig_instances and second.mig_instances:
        filled["mig_instances"] = _instances(first, second)
    if first.name.endswith(_CUT) and not second.name.endswith(_CUT) and second.name:
        filled["name"] = second.name
    return changed(
        first,
        **filled,
        raw={**second.raw, **first.raw} if second.raw else first.raw,
        sources=tuple(dict.fromkeys([*first.sources, source])),
        # What one output printed without a value, another may tell.
        blank=frozenset(name for name in first.blank | second.blank if filled.get(name, known[name]) in _EMPTY),
    )


def _instances(first: Gpu, second: Gpu) -> tuple[MigInstance, ...]:
    """Join MIG devices by their index: one output tells the profile, another the memory."""
    joined = {one.index: one for one in first.mig_instances}
    for one in second.mig_instances:
        known = joined.get(one.index, one)
        joined[one.index] = changed(
            known,
            profile=known.profile or one.profile,
            memory_total_mib=known.memory_total_mib or one.memory_total_mib,
        )
    return tuple(joined[index] for index in sorted(joined))
