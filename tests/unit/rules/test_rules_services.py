"""Rules S1 to S7: engines that ended, collectives, NCCL's release and interfaces, unit files."""

from __future__ import annotations

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.measurement import (
    CollectiveRow,
    Device,
    Measurement,
    Timing,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.runtime import (
    Cause,
    Engine,
    EngineLog,
    HungCollective,
    NcclLog,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Nccl, Services, Snapshot


def logged(cause: str | None = None, line: str = "RuntimeError: x", **told: object) -> Snapshot:
    made = EngineLog("engine.log", Cause(line, "", cause) if cause else None, **told)
    return b.snapshot(None, services=Services(logs=b.fact((made,), line, "engine.log")))


def engine(origin: str, port: str | None, gpus: str | None, **more: object) -> Engine:
    options = {"--port": port} if port else {}
    environment = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
    return Engine(
        "vllm", origin, command="vllm serve m", options=options, environment=environment, source="engines", **more
    )


def serving(*engines: Engine, **services: object) -> Snapshot:
    return b.snapshot(None, services=Services(engines=b.fact(engines, "vllm serve m", "engines"), **services))


def run(
    status: str = "ok", wrong: int = 0, ranks: int = 2, hosts: tuple[str, ...] = ("h",), **more: object
) -> Snapshot:
    rows = tuple(
        CollectiveRow(size, 2, "float", "sum", Timing(9.0, 1.0, 1.0, bad), Timing(9.0, 1.0, 1.0, 0))
        for size, bad in ((8, 0), (1048576, wrong))
    )
    made = {
        "devices": tuple(Device(at, host=hosts[at % len(hosts)]) for at in range(ranks)),
        "results": rows,
        "numbers": {"ranks": ranks},
        "source": "nccl_tests",
        "excerpt": "# Out of bounds values : 0 OK",
        **more,
    }
    return b.snapshot(None, measurements={"allreduce": (Measurement("allreduce", "nccl-tests", status, **made),)})


def nccl(version: str | None = None, **told: object) -> Nccl:
    log = NcclLog("nccl.log", version, **told)
    return Nccl(
        logs=b.fact((log,), "a line", "nccl.log"),
        version=b.fact(version, f"NCCL version {version}", "nccl.log") if version else b.unknown("no log names it"),
    )


def hung(sequence: int = 1, last: int | None = -1, **told: object) -> Snapshot:
    collectives = tuple(
        HungCollective(rank, "ALLREDUCE", sequence, 128, 600000, last, "Watchdog caught ...") for rank in (2, 0, 1)
    )
    return b.snapshot(None, nccl=nccl(ranks=4, hung=collectives, **told))


def released(version: str, device: str = b.SERVER_BLACKWELL) -> Snapshot:
    return b.snapshot("bare_metal", pci=b.pci(*b.gpus_on_bus(2, device)), nccl=nccl(version))


def unit(path: str, home: str = "/c") -> Snapshot:
    made = Engine("", "unit file", environment={"PATH": path, "CUDA_HOME": home}, source="systemd.unit")
    return serving(made)


NOTHING = b.snapshot("bare_metal")


@pytest.mark.parametrize(
    ("rule", "judged", "state", "words"),
    [
        # S1
        ("S1", logged("no_kernel_image"), "fail", "no code for this GPU"),
        ("S1", logged("driver_too_old", driver_cuda="11.4"), "fail", "supports CUDA 11.4"),
        ("S1", logged("driver_too_old", cuda_error=804), "fail", "CUDA error 804"),
        ("S1", logged("cache_memory"), "fail", "no memory left for its KV cache"),
        ("S1", logged("arguments", unknown_arguments=("--a", "--b c")), "fail", "--a and --b c"),
        ("S1", logged("arguments", unknown_arguments=("--temperature 0.8",)), "fail", "two list items"),
        ("S1", logged("port_in_use", port=44319, port_owner="66 pt_main_thread"), "fail", "44319, held by process 66"),
        ("S1", logged("internal_port_in_use", address="tcp://127.0.0.1:5570"), "fail", "tcp://127.0.0.1:5570"),
        ("S1", logged("build_tools"), "fail", "could not build"),
        ("S1", logged("gpu_busy"), "fail", "refused by a GPU"),
        ("S1", logged("other"), "fail", "ended with an error"),
        ("S1", logged("a class of tomorrow"), "fail", "ended with an error"),
        ("S1", logged(listening=True, serving=True, stage="listening"), "pass", "serves"),
        ("S1", logged(listening=True, stage="listening"), "unknown", "before the bind"),
        ("S1", logged(stage="weights 2 of 8"), "unknown", "weights 2 of 8"),
        ("S1", NOTHING, "unknown", "not collected"),
        # S2
        ("S2", serving(engine("a", "8000", "0"), engine("b", "8003", "1")), "info", "port 8000, GPUs 0"),
        ("S2", serving(engine("a", "8000", "0"), engine("b", "8000", "1")), "fail", "one port: 8000"),
        ("S2", serving(engine("a", "8000", "0,1"), engine("b", "8003", "1")), "warn", "share GPU 1"),
        ("S2", serving(engine("a", "8000", "0")), "not_applicable", "1 engine"),
        ("S2", NOTHING, "unknown", "not collected"),
        # S3
        ("S3", run("wrong_results", 96, hosts=("n1", "n7")), "fail", "between n1 and n7 at 1048576 B (96/0)"),
        ("S3", run("wrong_results", 96), "fail", "at some sizes only"),
        ("S3", run("error", failure="CUDA-capable device(s) is/are busy or unavailable"), "fail", "did not run"),
        ("S3", run("inconclusive"), "unknown", "cut, or the run hung"),
        ("S3", run(ranks=1), "info", "one rank"),
        ("S3", run(transports=("P2P/CUMEM",), rung=3), "pass", "over P2P/CUMEM"),
        ("S3", run(p2p_off=True), "pass", "P2P switched off"),
        ("S3", run(), "pass", "does not name"),
        ("S3", NOTHING, "unknown", "no run"),
        # S4
        ("S4", hung(), "fail", "the first collective never completed within 600 s on rank 0, 1 and 2 of 4"),
        ("S4", hung(158046, 158045), "fail", "work 158046 did not complete"),
        ("S4", b.snapshot(None, nccl=nccl("2.26.5")), "unknown", "no log goes on"),
        ("S4", NOTHING, "unknown", "not collected"),
        (
            "S4",
            b.snapshot(None, nccl=nccl("2.26.5"), services=Services(logs=b.fact((EngineLog("x", serving=True),)))),
            "pass",
            "No log tells",
        ),
        # S5
        (
            "S5",
            b.snapshot(None, nccl=nccl("2.25.1+cuda12.2", shared_memory=(9, 8), shared_memory_line="x")),
            "fail",
            "wants 9 bytes",
        ),
        ("S5", released("2.25.1"), "fail", "does not know"),
        ("S5", released("2.26.2"), "warn", "known to fail"),
        ("S5", released("2.29.7"), "pass", "knows these GPUs"),
        ("S5", released("2.20.5", b.RTX_3090), "pass", "knows these GPUs"),
        ("S5", b.snapshot(None, nccl=nccl("2.25.1")), "unknown", "models"),
        ("S5", NOTHING, "unknown", "not collected"),
        # S6
        (
            "S6",
            b.snapshot(None, nccl=nccl(socket_interfaces=("eno1", "wg0"), socket_line="NET/Socket : Using")),
            "warn",
            "tunnel as interface: wg0",
        ),
        (
            "S6",
            b.snapshot(None, nccl=nccl(socket_interfaces=("eno1",), bootstrap_interface="eno1", network="IB")),
            "info",
            "eno1, network IB",
        ),
        (
            "S6",
            b.snapshot(None, nccl=nccl(transports={"NET/Socket": 4}, transport_line="via NET/Socket/0")),
            "fail",
            "over the network",
        ),
        ("S6", b.snapshot(None, nccl=nccl(bootstrap_interface="eno1", transports={"P2P/CUMEM": 2})), "pass", "eno1"),
        ("S6", NOTHING, "unknown", "not collected"),
        # S7
        ("S7", unit("/c:/usr/bin:/bin:/bin"), "warn", "not its bin"),
        ("S7", unit("/usr/bin"), "warn", "lacks /c/bin"),
        ("S7", unit("/c/bin:/usr/bin"), "pass", "agree"),
        ("S7", serving(), "not_applicable", "No engine"),
        ("S7", NOTHING, "unknown", "not collected"),
    ],
)
def test_services(rule: str, judged: Snapshot, state: str, words: str) -> None:
    found = [one for one in b.findings(rule, judged) if not one.subject.endswith("readiness")]
    assert [one.state for one in found] == [state]
    assert words in f"{found[0].title} {found[0].reason}"


def test_a_startup_line_before_the_bind_is_no_readiness() -> None:
    found = b.findings("S1", logged("port_in_use", port=8000, listening=True))
    assert [one.state for one in found] == ["fail", "info"]
    assert "/health" in found[1].title


def test_argument_errors_do_not_heal_by_a_restart() -> None:
    (found,) = b.findings("S1", logged("arguments", unknown_arguments=("--a",)))
    assert "RestartPreventExitStatus=2" in found.why
    assert any("RestartPreventExitStatus=2" in step for step in found.fix.steps)


def test_a_hang_over_a_peer_path_beside_a_good_control_is_a_false_grant() -> None:
    control = run(p2p_off=True).measurements
    judged = hung(transports={"P2P/CUMEM": 4})
    judged = b.snapshot(None, nccl=judged.nccl, measurements=control)
    (found,) = b.findings("S4", judged)
    assert "P2P is granted, but carries no data" in found.title
    (found,) = b.findings("S4", b.snapshot(None, nccl=hung().nccl, measurements=control))
    assert "granted" not in found.title


def test_a_collective_behind_a_dead_engine_is_named_before_it() -> None:
    made = hung()
    ended = EngineLog("engine.log", Cause("Watchdog caught", "", "collective_timeout"))
    judged = b.snapshot(None, nccl=made.nccl, services=Services(logs=b.fact((ended,), "x", "engine.log")))
    from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine as rules

    bad = [one.rule for one in rules.judge({judged.host: judged})[judged.host] if one.bad]
    assert bad.index("S4") < bad.index("S1")
