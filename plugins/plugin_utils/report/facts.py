"""The facts that later tasks branch on: the public interface of design section 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.finding import RUNGS, Finding
from ..core.snapshot import Snapshot
from ..rules.common import gpu_count, has_no_gpu
from ..rules.engine import blocking
from ..rules.knowledge import gpu_model
from ..rules.peers import PathState, grants, path_state

# The engines whose own all-reduce kernel ignores NCCL's switches, and the flag that turns it off.
CUSTOM_ALL_REDUCE_OFF: Mapping[str, tuple[str, ...]] = {
    "vllm": ("--disable-custom-all-reduce",),
    "sglang": ("--disable-custom-all-reduce",),
    "llama_cpp": (),
}


def facts(snapshot: Snapshot, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the fact ``peerlane`` of one host, as plain types.

    Everything in it comes from this audit; what was not read is None, an empty list, or named in a reason.
    """
    count = gpu_count(snapshot)
    state = path_state(snapshot, count.value)
    found = grants(snapshot)
    shape = snapshot.as_dict()
    return {
        "role": snapshot.role.value,
        "role_reason": "" if snapshot.role.known else snapshot.role.reason,
        "gpus": gpus(snapshot),
        "p2p": {
            "state": state.state,
            "rung": state.rung,
            "rung_name": None if state.rung is None else RUNGS[state.rung],
            "reason": state.reason,
            "islands": [list(one) for one in found.islands] if found else [],
            "matrix": {f"{first}-{second}": dict(codes) for (first, second), codes in sorted(found.codes.items())}
            if found
            else {},
        },
        "topology": shape["topology"]["value"],
        "driver": {
            "state": snapshot.driver.smi.value.state if snapshot.driver.smi.value else None,
            "version": _driver_version(snapshot),
            "flavour": snapshot.driver.loaded_flavour.value,
            "cuda": snapshot.driver.smi.value.cuda_version if snapshot.driver.smi.value else None,
        },
        "findings": [one.as_dict() for one in findings],
        "blocking": blocking(findings),
        "measurements": {name: shape["measurements"].get(name, []) for name in ("host", "p2p", "allreduce")},
        "advice": advice(snapshot, state, count.value),
    }


def _driver_version(snapshot: Snapshot) -> str | None:
    smi = snapshot.driver.smi.value
    return snapshot.driver.loaded_version.value or (smi.driver_version if smi else None)


def gpus(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return one row for each GPU: from the driver where it answers, else from the PCI bus."""
    on_bus = {one.bdf: one for one in snapshot.pci.gpus()}
    rows = []
    for gpu in snapshot.gpus.value or ():
        function = on_bus.pop(gpu.bus_id, None)
        rows.append(_row(gpu.index, gpu.bus_id, gpu.name, gpu.uuid, gpu.memory_total_mib, function))
    if not rows:
        rows = [_row(None, one.bdf, one.name, "", None, one) for one in on_bus.values()]
    return rows


def _row(index: int | None, bdf: str, name: str, uuid: str, memory_mib: int | None, function: Any) -> dict[str, Any]:
    device = function.device if function is not None else None
    model = gpu_model(device)
    return {
        "index": index,
        "bdf": bdf,
        "name": name or (model.name if model else ""),
        "uuid": uuid,
        "memory_mib": memory_mib,
        "pci_id": f"10de:{device}" if device else None,
        "architecture": model.architecture if model else None,
        "numa_node": function.numa_node if function is not None else None,
    }


def advice(snapshot: Snapshot, state: PathState, count: int | None) -> dict[str, Any]:
    """Return settings that this audit alone justifies, each with its reason.

    ``tp`` and ``pp`` stay None: they depend on the model, which an audit does not know. A path is never opened here;
    a guest whose P2P is not verified gets NCCL's P2P and the engine's custom all-reduce switched off.
    """
    shape: dict[str, Any] = {"tp": None, "pp": None, "nccl_env": {}, "engine_args": {}, "reasons": []}
    if has_no_gpu(snapshot) or count == 0:
        shape["reasons"].append("no NVIDIA GPU: nothing to set for NCCL")
        return shape
    if state.state == "single":
        shape["reasons"].append("one GPU: there is no path between GPUs to set anything for")
        return shape
    guest = snapshot.role.value == "guest"
    failed = state.state == "failed"
    if failed or (guest and state.state != "delivered"):
        shape["nccl_env"] = {"NCCL_P2P_DISABLE": "1"}
        shape["engine_args"] = {engine: list(flags) for engine, flags in CUSTOM_ALL_REDUCE_OFF.items() if flags}
        why = (
            "the delivery test between the GPUs failed"
            if failed
            else f"P2P in this guest is not verified: {state.reason}"
        )
        shape["reasons"] += [
            f"NCCL_P2P_DISABLE=1, because {why}",
            "custom all-reduce off, because the engines' own kernels ignore NCCL's switch",
        ]
    elif state.state == "delivered":
        shape["reasons"].append("delivery between the GPUs was verified: nothing to switch off")
    elif snapshot.role.value is None:
        shape["reasons"].append(
            f"the role of this machine is not known ({snapshot.role.reason}), so nothing is advised"
        )
    else:
        shape["reasons"].append("bare metal: NCCL and the driver decide; nothing here speaks for changing that")
    return shape
