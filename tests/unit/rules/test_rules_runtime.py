"""Rules G1 to G11: what surrounds a running engine."""

from __future__ import annotations

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.runtime import (
    Container,
    Engine,
    EngineLog,
    NcclFailure,
    NcclLog,
    P2pCache,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import (
    Limits,
    Machine,
    Nccl,
    Services,
    Setting,
    Snapshot,
)

MIB, GIB = 1 << 20, 1 << 30
TP2 = {"--tensor-parallel-size": "2"}


def engine(**told: object) -> Engine:
    made = {
        "name": "vllm",
        "origin": "unit vllm.service",
        "pid": 7,
        "command": "vllm serve m",
        "options": TP2,
        "environment_known": True,
        "source": "engines",
        **told,
    }
    return Engine(**made)


def served(*engines: Engine, role: str | None = "bare_metal", **parts: object) -> Snapshot:
    return b.snapshot(role, services=Services(engines=b.fact(engines, "vllm serve m", "engines")), **parts)


def limited(name: str, value: int, **parts: object) -> Snapshot:
    return served(engine(limits={name: value}), **parts)


def boxed(
    ipc: str | None = "private", shm: int | None = 64 * MIB, options: dict[str, str] | None = None, **more: object
):
    container = Container("serve", "0123456789ab", ipc, None, "nvidia", shm, **more)
    return served(engine(origin="container serve", container=container, options=TP2 if options is None else options))


def own(**told: object) -> Limits:
    return Limits(**{key: b.fact(value, "a line", "proc.limits") for key, value in told.items()})


def failed(text: str, file: str = "", code: int | None = None, line: int | None = 5) -> Nccl:
    log = NcclLog("nccl.log", "2.27.3", failures=(NcclFailure(text, file, line, code, f"{file} NCCL WARN {text}"),))
    return Nccl(logs=b.fact((log,), text, "nccl.log"), version=b.fact("2.27.3"))


def nccl(version: str | None = None, *settings: Setting) -> Nccl:
    return Nccl(
        settings=b.fact(settings, "settings", "etc.nccl.conf"),
        version=b.fact(version, f"NCCL version {version}", "nccl.log") if version else b.unknown("no log names it"),
    )


def listed(count: int = 4, **more: object) -> dict[str, object]:
    gpus = tuple(b.Gpu(index=at, name="A40", uuid=f"GPU-{at}", **more) for at in range(count))
    return {"gpus": b.fact(gpus, "gpus", "nvidia_smi.L"), "driver": b.Driver(smi=b.smi())}


def visible(value: str, tp: str = "2", name: str = "CUDA_VISIBLE_DEVICES", **parts: object) -> Snapshot:
    return served(engine(environment={name: value}, options={"--tp": tp}), **{**listed(), **parts})


def mixed(order: str | None) -> Snapshot:
    gpus = (b.Gpu(index=0, name="A40"), b.Gpu(index=1, name="L4"))
    environment = {"CUDA_DEVICE_ORDER": order} if order else {}
    return served(engine(environment=environment), gpus=b.fact(gpus, "gpus", "nvidia_smi.L"))


def cache(modified: int | None, booted: int | None = 2000) -> Snapshot:
    stored = (P2pCache("/c.json", modified, {("GPU0", "GPU1"): True}),)
    return b.snapshot(
        "bare_metal",
        machine=Machine(booted_at=b.fact(booted, f"btime {booted}", "proc.stat") if booted else b.unknown("not read")),
        services=Services(p2p_caches=b.fact(stored, "/c.json", "p2p_caches")),
    )


CONF, UNIT = "/etc/nccl.conf", "unit vllm.service"
BOX = Machine(container=b.fact("docker"))
HOST = Machine(container=b.fact("none"))
NO_ENGINE = b.snapshot("bare_metal", services=Services(engines=b.fact((), "", "engines")))
NOTHING = b.snapshot("bare_metal")


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        # G1
        ("G1", served(engine(shm_bytes=64 * MIB)), "fail", "64 MiB, too little for 2 GPUs"),
        ("G1", served(engine(shm_bytes=16 * GIB)), "pass", "16 GiB"),
        ("G1", served(engine(shm_bytes=2 * GIB, options={"-tp": "8"})), "warn", "little for 8 GPUs"),
        ("G1", served(engine(shm_bytes=64 * MIB, options={"--tp": "1"})), "not_applicable", "one GPU"),
        ("G1", served(engine(shm_bytes=64 * MIB, options={})), "unknown", "how many GPUs"),
        ("G1", boxed(), "fail", "64 MiB"),
        ("G1", boxed("host"), "unknown", "no engine that was found"),
        ("G1", b.guest(2, limits=own(shm_bytes=64 * MIB)), "fail", "this machine"),
        ("G1", b.guest(2, limits=own(shm_bytes=4 * GIB)), "pass", "4 GiB"),
        (
            "G1",
            b.snapshot(None, nccl=failed("Error while creating shared memory segment /dev/shm/nccl-a (size 9)")),
            "fail",
            "no room",
        ),
        ("G1", NOTHING, "unknown", "not collected"),
        ("G1", NO_ENGINE, "not_applicable", "No engine"),
        # G2
        ("G2", boxed(), "fail", "default size for 2 GPUs"),
        ("G2", boxed("host"), "pass", "the host's"),
        ("G2", boxed("private", 8 * GIB), "pass", "its own size"),
        ("G2", boxed(options={"--tp": "1"}), "not_applicable", "one GPU"),
        ("G2", boxed(options={}), "unknown", "how many GPUs"),
        ("G2", served(engine()), "not_applicable", "host processes"),
        ("G2", NOTHING, "unknown", "not collected"),
        # G3
        ("G3", limited("Max locked memory", 65536), "warn", "64 KiB only"),
        ("G3", limited("Max locked memory", 8 * MIB), "pass", "8 MiB"),
        ("G3", limited("Max locked memory", -1), "pass", "all memory"),
        (
            "G3",
            limited("Max locked memory", 8 * MIB, pci=b.pci(b.port("0000:05:00.0", class_code="0207"))),
            "fail",
            "RDMA",
        ),
        ("G3", b.snapshot("guest", limits=own(values={"Max locked memory": 65536})), "warn", "the shell or process"),
        ("G3", boxed(ulimits={"memlock": -1}), "pass", "all memory"),
        ("G3", NOTHING, "unknown", "not collected"),
        ("G3", NO_ENGINE, "not_applicable", "No engine"),
        # G4
        ("G4", limited("Max stack size", -1), "warn", "unlimited"),
        ("G4", limited("Max stack size", 8 * MIB), "pass", "8 MiB"),
        ("G4", NOTHING, "unknown", "not collected"),
        # G5
        (
            "G5",
            b.snapshot(None, nccl=failed("Cuda failure 217 'peer access'", "transport/shm.cc", 217)),
            "fail",
            "error 217",
        ),
        (
            "G5",
            b.snapshot(None, nccl=failed("Cuda failure 217 'peer access'", "transport/p2p.cc", 217)),
            "pass",
            "2.27.3",
        ),
        ("G5", b.snapshot("guest", machine=BOX, nccl=nccl("2.25.1")), "warn", "without SYS_NICE"),
        ("G5", b.snapshot("guest", machine=BOX, nccl=nccl("2.26.5")), "pass", "2.26.5"),
        (
            "G5",
            b.snapshot("guest", machine=BOX, nccl=nccl("2.25.1", Setting("NCCL_CUMEM_HOST_ENABLE", "0", UNIT))),
            "pass",
            "switched off",
        ),
        ("G5", b.snapshot("guest", nccl=nccl("2.25.1")), "unknown", "a container may forbid"),
        ("G5", b.snapshot("guest", machine=HOST, nccl=nccl("2.25.1")), "pass", "2.25.1"),
        ("G5", b.snapshot("guest", nccl=nccl()), "unknown", "no log names it"),
        # G6
        ("G6", visible("0,1"), "pass", "2 GPUs"),
        ("G6", visible("0"), "fail", "1 GPUs for a tensor parallel size of 2"),
        ("G6", visible("1,1"), "fail", "twice"),
        ("G6", visible("0,4"), "fail", "no GPU 4"),
        ("G6", visible("-1"), "fail", "no GPU is visible"),
        ("G6", visible("GPU-1,GPU-9"), "fail", "GPU-9 is not in"),
        ("G6", visible("MIG-1,MIG-2"), "fail", "MIG"),
        ("G6", visible("all", name="NVIDIA_VISIBLE_DEVICES"), "pass", "all GPUs"),
        ("G6", visible("0,1", gpus=b.unknown("no listing"), driver=b.Driver()), "unknown", "were not listed"),
        ("G6", served(engine()), "pass", "every GPU"),
        ("G6", NOTHING, "unknown", "not collected"),
        # G7
        ("G7", mixed(None), "warn", "by speed"),
        ("G7", mixed("PCI_BUS_ID"), "pass", "by bus"),
        ("G7", served(engine(), **listed()), "not_applicable", "one model"),
        ("G7", NOTHING, "unknown", "one model is not known"),
        # G8
        ("G8", b.guest(machine=BOX, driver=b.Driver(smi=b.smi("unknown_error"))), "fail", "has lost its GPUs"),
        (
            "G8",
            b.snapshot(None, driver=b.Driver(smi=b.smi("unknown_error")), limits=own(device_rules=("c 195:* m",))),
            "fail",
            "has lost its GPUs",
        ),
        (
            "G8",
            b.snapshot(None, **{**listed(), "driver": b.Driver(smi=b.smi("unknown_error"))}),
            "fail",
            "4 GPUs are there",
        ),
        ("G8", b.guest(machine=BOX), "pass", "answers"),
        ("G8", b.guest(machine=HOST), "not_applicable", "no container"),
        ("G8", NOTHING, "unknown", "not collected"),
        # G9
        ("G9", cache(1000), "warn", "older than this boot (1970-01-01)"),
        ("G9", cache(3000), "pass", "since this boot"),
        ("G9", cache(1000, None), "unknown", "not read"),
        ("G9", cache(None), "unknown", "time of the file"),
        (
            "G9",
            b.snapshot(None, services=Services(logs=b.fact((EngineLog("engine.log", p2p_cache="/d.json"),)))),
            "info",
            "/d.json",
        ),
        (
            "G9",
            b.snapshot(None, services=Services(p2p_caches=b.unknown("x: no stored P2P verdict was found"))),
            "not_applicable",
            "No engine",
        ),
        ("G9", NOTHING, "unknown", "not collected"),
        # G10
        ("G10", limited("Max open files", 1024), "warn", "1024 files only"),
        ("G10", limited("Max open files", 1048576), "pass", "1048576"),
        ("G10", NOTHING, "unknown", "not collected"),
        # G11
        (
            "G11",
            b.snapshot(None, nccl=nccl(None, Setting("NCCL_P2P_LEVEL", "SYS", CONF))),
            "info",
            "NCCL_P2P_LEVEL=SYS",
        ),
        (
            "G11",
            b.snapshot(None, nccl=nccl(None, Setting("NCCL_ALGO", "Ring", CONF), Setting("NCCL_ALGO", "Tree", UNIT))),
            "warn",
            "the environment wins",
        ),
        ("G11", b.snapshot(None, nccl=nccl(None, Setting("NCCL_ALGO ", " Ring", CONF))), "warn", "letter by letter"),
        (
            "G11",
            b.snapshot(None, nccl=nccl(None, Setting("NCCL_P2P_LEVEL", "SYS # why", CONF))),
            "warn",
            "letter by letter",
        ),
        ("G11", b.snapshot(None, nccl=nccl(None, Setting("NCCL_DEBUG", "WARN", CONF))), "pass", "No file"),
        ("G11", NOTHING, "unknown", "not collected"),
    ],
)
def test_runtime(rule: str, judged: Snapshot, state: str, words: str) -> None:
    found = b.findings(rule, judged)
    assert [one.state for one in found] == [state]
    assert words in f"{found[0].title} {found[0].reason}"


def test_a_container_that_lost_its_gpus_explains_the_driver_that_does_not_answer() -> None:
    judged = b.snapshot(None, **{**listed(), "driver": b.Driver(smi=b.smi("unknown_error", message="Unknown Error"))})
    (found,) = b.findings("G8", judged)
    assert found.explains == ("F1",)
    assert any("daemon-reload" in step for step in found.fix.steps)


def test_a_failure_of_shared_host_memory_leaves_p2p_alone() -> None:
    (found,) = b.findings("G5", b.snapshot(None, nccl=failed("Cuda failure 217 'x'", "transport/shm.cc", 217, 590)))
    assert found.severity == "critical"
    assert "transport/shm.cc:590" in found.title
    assert "no fault of a peer path" in found.why
    assert not any("P2P_DISABLE" in step for step in found.fix.steps)
