"""Rules D13 to D15 and D17: NCCL's picture of a guest, engine kernels, forced grants, switches."""

from __future__ import annotations

import pytest
import rule_builders as b

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.runtime import Engine, EngineLog, NcclTopology
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.snapshot import Nccl, Services, Snapshot

SEEN = NcclTopology("/t.xml", ("0000:01:00.0", "0000:02:00.0"), ("0000:01:00.0", "0000:02:00.0"))


def topology(seen: NcclTopology | None = None, file: NcclTopology | None = None, **parts: object) -> Snapshot:
    return b.guest(
        nccl=Nccl(
            topology=b.fact(seen, "<cpu numaid", "nccl.topology") if seen else b.unknown("no dump"),
            topology_file=b.fact(file, "<system", "nccl.topology_file") if file else b.unknown("no file"),
        ),
        **parts,
    )


def log(**told: object) -> Services:
    made = EngineLog("engine.log", custom_all_reduce_line="a line of the log", **told)
    return Services(logs=b.fact((made,), "a line", "engine.log"))


def engine(options: dict[str, str], name: str = "vllm") -> Services:
    made = Engine(name, "unit vllm.service", 7, "vllm serve m", options, environment_known=True, source="engines")
    return Services(engines=b.fact((made,), "vllm serve m", "engines"))


TP2, TP4 = {"--tensor-parallel-size": "2"}, {"--tensor-parallel-size": "4"}
OFF = {**TP2, "--disable-custom-all-reduce": ""}


def words(text: str | None, modprobe: str | None = None, **parts: object) -> Snapshot:
    params = b.fact({"RegistryDwords": text}, f"RegistryDwords: {text}", "proc.driver.nvidia.params")
    lines = b.fact((modprobe,), modprobe, "modprobe.d") if modprobe else b.unknown("modprobe.d was not collected")
    return b.snapshot(
        "bare_metal",
        driver=b.Driver(params=params if text is not None else b.unknown("not read")),
        kernel=b.Kernel(modprobe=lines),
        **parts,
    )


def tree(*, switch: str = "1000:c030", depth: int = 2, complete: bool = True) -> Snapshot:
    """Two GPUs below two downstream ports of one switch, or directly below root ports (depth 1)."""
    vendor, device = switch.split(":")
    functions = [b.port("0000:00:01.0"), b.port("0000:00:02.0")]
    if depth == 2:
        functions.append(b.port("0000:10:00.0", vendor=vendor, device=device, parent="0000:00:01.0", name="a switch"))
        functions += [b.port(f"0000:11:0{at}.0", vendor=vendor, device=device, parent="0000:10:00.0") for at in (0, 1)]
        parents = ("0000:11:00.0", "0000:11:01.0")
    else:
        parents = ("0000:00:01.0", "0000:00:02.0") if depth else (None, None)
    functions += [b.gpu_function(f"0000:2{at}:00.0", parent=parent) for at, parent in enumerate(parents)]
    return b.snapshot("bare_metal", pci=b.pci(*functions, complete=complete))


@pytest.mark.parametrize(
    ("rule", "judged", "state", "said"),
    [
        # D13
        (
            "D13",
            topology(NcclTopology(links_unknown=2, numa_unknown=1, gpus_on_cpu=1)),
            "info",
            "2 links without speed",
        ),
        ("D13", topology(SEEN), "pass", "knows speeds"),
        ("D13", topology(file=SEEN), "pass", "are those of this guest"),
        (
            "D13",
            topology(file=NcclTopology("/t.xml", gpu_bus_ids=("0000:07:00.0",))),
            "fail",
            "0000:07:00.0, which this guest does not have",
        ),
        (
            "D13",
            topology(file=NcclTopology(gpu_bus_ids=("0000:07:00.0",)), pci=b.pci(*b.gpus_on_bus(2), complete=False)),
            "unknown",
            "only a part",
        ),
        ("D13", topology(), "unknown", "no dump"),
        ("D13", b.guest(1), "not_applicable", "1 GPU"),
        # D14
        ("D14", b.snapshot(None, services=log(custom_all_reduce="failed")), "fail", "ended in its own all-reduce"),
        ("D14", b.snapshot(None, services=log(custom_all_reduce="no_p2p", p2p_cache="/c.json")), "info", "/c.json"),
        ("D14", b.snapshot(None, services=log(custom_all_reduce="many_pcie")), "info", "by design"),
        ("D14", b.guest(services=engine(TP2), measurements=b.not_delivered()), "fail", "does not arrive"),
        ("D14", b.guest(services=engine(TP4), measurements=b.not_delivered()), "fail", "does not arrive"),
        ("D14", b.guest(services=engine(OFF), measurements=b.not_delivered()), "pass", "without its own"),
        ("D14", b.guest(services=engine(TP2), measurements=b.delivered()), "pass", "data arrives"),
        ("D14", b.guest(services=engine(TP2), p2p=b.granted(2)), "unknown", "not tested"),
        ("D14", b.guest(services=engine({})), "unknown", "no engine with several GPUs"),
        ("D14", b.guest(services=Services(engines=b.fact(()))), "not_applicable", "No engine"),
        ("D14", b.guest(1), "not_applicable", "1 GPU"),
        ("D14", b.guest(), "unknown", "not collected"),
        # D15
        ("D15", words('"ForceP2P=0x11;RMForceP2PType=1"'), "warn", "reads and writes on"),
        ("D15", words('"ForceP2P=17"', measurements=b.delivered()), "info", "delivery was verified"),
        ("D15", words('"ForceP2P=0"'), "fail", "reads and writes off"),
        ("D15", words('"ForceP2P=0x22"'), "pass", "leaves the choice"),
        ("D15", words('"RMForceStaticBar1=1"'), "info", "none of them forces P2P"),
        ("D15", words('""'), "pass", "No registry setting"),
        ("D15", words(None, 'options nvidia NVreg_RegistryDwords="ForceP2P=0x11"'), "warn", "is configured"),
        ("D15", words(None, 'options nvidia NVreg_RegistryDwords="ForceP2P=0x1'), "unknown", "not read"),
        ("D15", words(None, "options nvidia NVreg_Foo=1"), "unknown", "not read"),
        # D17
        ("D17", tree(switch="10b5:9797"), "info", "takes for a common switch"),
        ("D17", tree(), "info", "the firmware of the GPUs decides"),
        ("D17", tree(switch="104c:8232"), "info", "does not count"),
        ("D17", tree(depth=1), "not_applicable", "meet at the host bridge"),
        ("D17", tree(depth=0), "unknown", "no parent"),
        ("D17", b.snapshot("bare_metal"), "unknown", "not collected"),
        ("D17", b.guest(), "not_applicable", "a guest"),
    ],
)
def test_fabric(rule: str, judged: Snapshot, state: str, said: str) -> None:
    found = b.findings(rule, judged)
    assert [one.state for one in found] == [state]
    assert said in f"{found[0].title} {found[0].reason}"


def test_a_forced_grant_is_the_cause_of_the_drivers_answer() -> None:
    judged = words('"ForceP2P=0"', p2p=b.granted(2, "DR"))
    assert b.findings("D15", judged)[0].explains == ("D5",)


def test_every_finding_about_the_engines_kernel_says_that_nccl_is_another_matter() -> None:
    (found,) = b.findings("D14", b.snapshot(None, services=log(custom_all_reduce="failed")))
    assert "no error of NCCL" in found.why
    assert found.fix.steps == ("# append to the engine's arguments: --disable-custom-all-reduce",)
