"""Rules F7, F8, F13, F14, F16 to F20, F24, F25, D16 and D18: how the GPUs are set, and how well they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import (
    Gpu,
    GpuProcess,
    GpuSample,
    KernelLog,
    LogLine,
    MigInstance,
    Xid,
)

Q = "nvidia_smi.q"


def gpus(*ones: dict[str, Any], count: int = 0, **same: Any) -> dict[str, Any]:
    """GPUs with these fields; as many as there are dicts, or ``count`` equal ones."""
    made = tuple(
        Gpu(**{"index": at, "bus_id": f"0000:{at + 1:02x}:00.0", "name": "RTX PRO 6000", **same, **one})
        for at, one in enumerate(ones or [{}] * (count or 2))
    )
    return {"gpus": b.fact(made, "gpus", Q)}


def host(role: str | None = "bare_metal", whole: bool = True, **parts: Any) -> object:
    found = parts.get("gpus", b.smi_gpus(0))
    driver = parts.pop("driver", b.Driver())
    if whole:
        driver = replace(driver, attached_gpus=b.fact(len(found.value or ())))
    return b.snapshot(role, driver=driver, **parts)


def blank(*names: str) -> dict[str, Any]:
    return {"blank": frozenset(names)}


def reasons(**on: bool) -> dict[str, Any]:
    return {"clock_reasons": {"idle": False, "hw_thermal": False, **on}}


def load(busy: int | None, watts: float | None = 100.0, **more: Any) -> dict[str, Any]:
    return {"utilization_percent": busy, "power_draw_w": watts, "power_limit_w": 600.0, **more}


def processes(*ones: GpuProcess) -> object:
    return b.Driver(processes=b.fact(ones, "Processes : None", Q))


def samples(seconds: int, busy: int = 100, watts: float = 130.0) -> object:
    made = tuple(GpuSample("0", float(at), busy, watts, 2400, "P0") for at in range(0, seconds + 1, 10))
    return replace(processes(), samples=b.fact(made, "samples", "nvidia_smi.dmon"))


def gsp_log(*texts: str) -> object:
    lines = tuple(LogLine("1.0", text) for text in texts)
    return b.Kernel(log=b.fact(KernelLog(lines, notes={"nvrm": lines}), "log", "kernel_log"))


TIMEOUT = b.Kernel(
    log=b.fact(KernelLog(xids=(Xid("0000:41:00", 119, "Timeout after 6s", "1.0"),)), "Xid 119", "kernel_log")
)
OPEN, CLOSED = b.fact("open"), b.fact("proprietary")
EMPTY_BUS = b.pci()
NEED_RESET = {"recovery_action": "Reset", "raw": {"pstate": "GPU requires reset"}}
UNHEARD = {"gpus": b.unknown("nvidia-smi timed out")}
ADA, BLACKWELL = {"name": "NVIDIA RTX 6000 Ada Generation"}, {"name": "NVIDIA GeForce RTX 5090"}
WEDGED = load(100, 130.0)
ROWS = [
    # F7
    ("F7", host(kernel=TIMEOUT), "fail", "0000:41:00 stopped answering"),
    ("F7", host(kernel=gsp_log("NVRM: GPU 0000:01:00.0: Cannot initialize GSP firmware RM")), "fail", "did not start"),
    ("F7", host(**gpus(gsp_firmware="590.44.01")), "pass", "590.44.01"),
    ("F7", host(**gpus(**blank("gsp_firmware")), driver=b.Driver(loaded_flavour=OPEN)), "fail", "no GSP firmware"),
    ("F7", host(**gpus(**blank("gsp_firmware")), driver=b.Driver(loaded_flavour=CLOSED)), "info", "proprietary"),
    ("F7", host(**gpus(**blank("gsp_firmware"))), "unknown", "no GSP firmware"),
    ("F7", host(**gpus(device_id="1b06", **blank("gsp_firmware"))), "not_applicable", "Turing"),
    ("F7", host(**gpus()), "unknown", "did not tell"),
    ("F7", host(**UNHEARD), "unknown", "timed out"),
    ("F7", host(pci=EMPTY_BUS), "not_applicable", "no NVIDIA GPU"),
    # F8
    ("F8", host(**gpus(persistence="Enabled")), "pass", "on"),
    ("F8", host(**gpus(persistence="Disabled")), "info", "off on all GPUs"),
    ("F8", host("guest", **gpus(persistence="Disabled")), "warn", "off"),
    ("F8", host("guest", **gpus({"persistence": "Disabled"}, {"persistence": "Enabled"})), "warn", "0000:01:00.0"),
    ("F8", host(**gpus()), "unknown", "no GPU told"),
    ("F8", host(**UNHEARD), "unknown", "timed out"),
    # F13
    ("F13", host(**gpus(mig="Disabled", mig_pending="Disabled")), "pass", "MIG is off"),
    ("F13", host(**gpus({"mig": "Enabled"}, {"mig": "Disabled"})), "fail", "0000:01:00.0"),
    (
        "F13",
        host(**gpus({"mig": "Enabled", "mig_instances": (MigInstance(0, "3g.40gb"), MigInstance(1, "3g.40gb"))})),
        "warn",
        "2 instances (2x 3g.40gb)",
    ),
    ("F13", host(**gpus(mig="Disabled", mig_pending="Enabled", count=1)), "warn", "next reset"),
    ("F13", host(**gpus(**blank("mig"))), "not_applicable", "no MIG"),
    ("F13", host(**gpus({"mig": "Disabled"}, {})), "unknown", "0000:02:00.0 did not tell"),
    ("F13", host(whole=False, **gpus(mig="Disabled")), "info", "2 GPUs shown"),
    ("F13", host(**UNHEARD), "unknown", "timed out"),
    # F14
    ("F14", host(**gpus(ecc="Enabled", ecc_uncorrected_volatile=0)), "pass", "No uncorrectable"),
    ("F14", host(**gpus({"ecc_uncorrected_volatile": 3}, {"ecc_uncorrected_volatile": 0})), "fail", "counted 3"),
    ("F14", host(**gpus(remap_failed="Yes", count=1)), "fail", "worn out"),
    ("F14", host(**gpus(sram_threshold_exceeded="Yes", count=1)), "fail", "SRAM"),
    ("F14", host(**gpus(remap_pending="Yes", count=1)), "fail", "waits for a row remap"),
    ("F14", host(**gpus({"ecc": "Enabled"}, {"ecc": "Disabled"})), "warn", "differs"),
    ("F14", host(**gpus(**blank("ecc", "ecc_uncorrected_volatile"))), "not_applicable", "count no memory errors"),
    ("F14", host(**gpus()), "unknown", "did not tell"),
    ("F14", host(**UNHEARD), "unknown", "timed out"),
    # F16
    ("F16", host(**gpus(recovery_action="None")), "pass", "No GPU waits"),
    ("F16", host(**gpus(**NEED_RESET, count=1)), "fail", "needs a reset"),
    ("F16", host(**gpus({"recovery_action": "Drain and Reset"}, {})), "fail", "needs a drain and reset"),
    ("F16", host(**gpus({"raw": {"temperature.gpu": "[GPU requires reset]"}}, {})), "fail", "needs a reset"),
    ("F16", host(**gpus(count=1, **blank("temperature_c", "pstate", "power_draw_w"))), "warn", "errors instead"),
    ("F16", host(**gpus(temperature_c=41, memory_total_mib=97887)), "pass", "No GPU says"),
    ("F16", host(**UNHEARD), "unknown", "timed out"),
    # F17
    ("F17", host(**gpus(power_limit_w=600.0, power_limit_default_w=600.0)), "pass", "equal"),
    ("F17", host(**gpus(power_limit_w=450.0, power_limit_default_w=600.0)), "info", "450 W of 600 W"),
    (
        "F17",
        host(**gpus(power_limit_w=300.0, power_limit_default_w=600.0, power_limit_min_w=300.0)),
        "warn",
        "lowest power limit (300 of 600 W)",
    ),
    ("F17", host(**gpus({"power_limit_w": 500.0}, {"power_limit_w": 600.0})), "warn", "500 W and 600 W"),
    ("F17", host(**gpus(power_limit_w=600.0)), "unknown", "default limits were not told"),
    ("F17", host(**gpus(**blank("power_limit_w", "power_limit_default_w"))), "not_applicable", "N/A"),
    ("F17", host(**gpus()), "unknown", "did not tell"),
    # F18
    ("F18", host(**gpus(**reasons(idle=True))), "pass", "while it was idle"),
    ("F18", host(**gpus(**reasons())), "pass", "No GPU is slowed down"),
    ("F18", host(**gpus(count=1, temperature_c=91, **reasons(hw_thermal=True))), "fail", "heat at 91 C"),
    ("F18", host(**gpus(count=1, **reasons(hw_power_brake=True, hw_slowdown=True))), "fail", "power brake"),
    ("F18", host(**gpus(count=1, **reasons(hw_slowdown=True, idle=True))), "pass", "while it was idle"),
    ("F18", host(**gpus(count=1, **reasons(hw_slowdown=True))), "fail", "slowed down by hardware"),
    ("F18", host(**gpus(count=1, **reasons(sw_thermal=True))), "warn", "heat"),
    ("F18", host(**gpus({"clock_reasons": {"sw_power_cap": True}}, reasons())), "info", "power limit"),
    ("F18", host(**gpus(**blank("clock_reasons"))), "not_applicable", "N/A"),
    ("F18", host(**gpus()), "unknown", "did not tell"),
    # F19
    ("F19", host(**gpus(**load(90, pstate="P0", sm_clock_mhz=2400, sm_clock_max_mhz=2600))), "pass", "working clocks"),
    ("F19", host(**gpus(count=1, **load(90, pstate="P8"))), "fail", "in P8"),
    ("F19", host(**gpus(count=1, **load(90, pstate="P1", sm_clock_mhz=500, sm_clock_max_mhz=2600))), "fail", "19 %"),
    ("F19", host(**gpus(**load(0, pstate="P8"))), "not_applicable", "under load"),
    ("F19", host(**gpus(**blank("utilization_percent"))), "not_applicable", "MIG"),
    ("F19", host(**gpus()), "unknown", "told its load"),
    # F20
    ("F20", host(**gpus(**load(99, 300.0)), p2p=b.granted(2, "NS")), "info", "fits the missing P2P"),
    ("F20", host(**gpus(**load(99, 300.0)), p2p=b.granted(2)), "info", "usual for small decode"),
    ("F20", host(**gpus(**load(99, 580.0))), "not_applicable", "only under load"),
    ("F20", host(**gpus()), "unknown", "told both"),
    # F24
    ("F24", host(**gpus(compute_mode="Default")), "pass", "Default"),
    ("F24", host(**gpus(count=1, compute_mode="Exclusive_Process")), "warn", "one process alone"),
    ("F24", host(**gpus(count=1, compute_mode="E. Process")), "warn", "Exclusive_Process"),
    ("F24", host(**gpus({"compute_mode": "Prohibited"}, {"compute_mode": "Default"})), "fail", "no program"),
    ("F24", host(**gpus()), "unknown", "no GPU told"),
    # F25
    ("F25", host("guest", **gpus(conf_compute_mib=0)), "pass", "No GPU runs"),
    ("F25", host("guest", **gpus(conf_compute_mib=4096)), "info", "off by design"),
    ("F25", host("guest", **gpus()), "unknown", "no GPU told"),
    ("F25", host(**gpus(conf_compute_mib=0)), "not_applicable", "bare metal"),
    # D16
    ("D16", host(**gpus(**ADA)), "pass", "All 2 GPUs are NVIDIA RTX 6000 Ada"),
    ("D16", host(**gpus(ADA, BLACKWELL)), "info", "different models"),
    ("D16", host(**gpus(ADA, BLACKWELL), p2p=b.granted(2, "NS")), "fail", "refuses P2P between them"),
    ("D16", host(**gpus(ADA, BLACKWELL), p2p=b.granted(2)), "info", "different models"),
    ("D16", host(**gpus(ADA)), "not_applicable", "one GPU"),
    ("D16", host(gpus=b.unknown("no"), pci=b.pci(*b.gpus_on_bus(2))), "pass", "RTX PRO 6000 Blackwell Server"),
    ("D16", host(**gpus(name="NVIDIA RTX PRO 6000 Blac...")), "unknown", "no model was told"),
    ("D16", host(**UNHEARD), "unknown", "timed out"),
    # D18
    ("D18", host(**gpus(**load(0, 30.0))), "pass", "No GPU is busy"),
    ("D18", host(**gpus(count=1, **WEDGED), driver=processes()), "warn", "look again"),
    ("D18", host(**gpus(count=1, **WEDGED), driver=samples(90)), "fail", "for 90 s without any program"),
    ("D18", host(**gpus(count=1, **WEDGED), driver=samples(30)), "warn", "for 30 s"),
    ("D18", host(**gpus(count=1, **WEDGED), driver=samples(90, busy=10)), "pass", "No GPU is busy"),
    (
        "D18",
        host(**gpus(count=1, **WEDGED), driver=processes(GpuProcess("0000:01:00.0", 4242, "C", "python3"))),
        "pass",
        "have a program",
    ),
    (
        "D18",
        host(**gpus(count=1, **WEDGED), driver=processes(), machine=b.Machine(container=b.fact("docker"))),
        "unknown",
        "programs of others",
    ),
    ("D18", host(**gpus(count=1, **WEDGED)), "unknown", "whether a program uses it"),
    ("D18", host("hypervisor"), "not_applicable", "guests"),
    ("D18", host(**gpus()), "unknown", "told load and power"),
]


@pytest.mark.parametrize(("rule", "judged", "state", "words"), ROWS)
def test_gpus(rule: str, judged: object, state: str, words: str) -> None:
    found = b.findings(rule, judged)
    assert [one.state for one in found][:1] == [state], found
    assert words in f"{found[0].title} {found[0].reason}"


def test_a_gpu_that_needs_a_reset_is_not_called_well() -> None:
    """Its other cells are N/A; they say nothing of MIG, memory, limits or load."""
    judged = host(**gpus(**NEED_RESET, **blank("mig", "ecc_uncorrected_volatile", "power_limit_w", "clock_reasons")))
    for rule in ("F13", "F14", "F17", "F18", "F19", "F24", "D18"):
        assert b.verdicts(rule, judged) == ["unknown"], rule


def test_a_gpu_that_needs_a_reset_leaves_the_driver_loaded() -> None:
    judged = host(**gpus(**NEED_RESET, count=1), driver=b.Driver(smi=b.smi(driver_version="590.44.01")))
    assert [(one.state, one.title) for one in b.findings("F1", judged)] == [
        ("pass", "The NVIDIA driver 590.44.01 answers, but a GPU needs a reset: rule F16")
    ]
    assert b.findings("F16", judged)[0].subject == "0000:01:00.0"


def test_a_list_of_which_more_may_be_missing_never_passes() -> None:
    judged = host(
        whole=False,
        **gpus(
            mig="Disabled",
            persistence="Enabled",
            ecc_uncorrected_volatile=0,
            recovery_action="None",
            power_limit_w=600.0,
            power_limit_default_w=600.0,
            compute_mode="Default",
            gsp_firmware="590.44.01",
            **reasons(),
            utilization_percent=0,
            power_draw_w=30.0,
        ),
    )
    for rule in ("F7", "F8", "F13", "F14", "F16", "F17", "F18", "F24", "D16", "D18"):
        assert "pass" not in b.verdicts(rule, judged), rule
