"""From what the tools print to what a user reads: GPU outputs through parsers and rules. All values are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import Evidence, EvidenceSet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.finding import Finding
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

GPU = """GPU 00000000:{bus}:00.0
    Product Name                          : NVIDIA RTX PRO 6000 Blackwell Server Edition
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Disabled
        Pending                           : Disabled
    GPU UUID                              : GPU-{bus}
    GPU Recovery Action                   : None
    GSP Firmware Version                  : 590.44.01
    Performance State                     : P8
    Clocks Event Reasons
        Idle                              : Active
        HW Slowdown                       : Not Active
    FB Memory Usage
        Total                             : 97887 MiB
    BAR1 Memory Usage
        Total                             : 131072 MiB
    Conf Compute Protected Memory Usage
        Total                             : 0 MiB
    Compute Mode                          : Default
    Utilization
        GPU                               : 0 %
    ECC Mode
        Current                           : Enabled
        Pending                           : Enabled
    ECC Errors
        Volatile
            DRAM Uncorrectable            : 0
    Remapped Rows
        Pending                           : No
        Remapping Failure Occurred        : No
    GPU Power Readings
        Average Power Draw                : 31.00 W
        Current Power Limit               : 600.00 W
        Default Power Limit               : 600.00 W
        Min Power Limit                   : 300.00 W
    Clocks
        SM                                : 180 MHz
    Max Clocks
        SM                                : 2430 MHz
    Processes                             : None
"""
HEALTHY = "Attached GPUs                             : 2\n" + GPU.format(bus="01") + GPU.format(bus="02")
JUDGED = ("F7", "F8", "F13", "F14", "F16", "F17", "F18", "F21", "F24", "F25", "D16", "D18")


def judge(host: str = "guest", **texts: str) -> dict[str, list[Finding]]:
    entries = {name.replace("__", "."): Evidence(name.replace("__", "."), stdout=text) for name, text in texts.items()}
    made = snapshot.build(EvidenceSet(host=host, entries={"detect_virt.vm": KVM, **entries}))
    found: dict[str, list[Finding]] = {}
    for one in engine.judge({host: made})[host]:
        found.setdefault(one.rule, []).append(one)
    return found


KVM = Evidence("detect_virt.vm", stdout="kvm\n")


def test_healthy_gpus_pass_every_rule_about_their_state() -> None:
    found = judge(nvidia_smi__q=HEALTHY)
    assert {rule: [one.state for one in found[rule]] for rule in JUDGED} == {rule: ["pass"] for rule in JUDGED}


@pytest.mark.parametrize(
    ("before", "after", "rule", "state", "words"),
    [
        (
            "Recovery Action                   : None",
            "Recovery Action                   : Reset",
            "F16",
            "fail",
            "reset",
        ),
        ("DRAM Uncorrectable            : 0", "DRAM Uncorrectable            : 2", "F14", "fail", "counted 2"),
        (
            "Pending                           : No",
            "Pending                           : Yes",
            "F14",
            "fail",
            "row remap",
        ),
        (
            "HW Slowdown                       : Not Active",
            "HW Thermal Slowdown           : Active",
            "F18",
            "fail",
            "heat",
        ),
        (
            "Compute Mode                          : Default",
            "Compute Mode          : Prohibited",
            "F24",
            "fail",
            "Prohib",
        ),
        ("Mode                      : Enabled", "Mode                      : Disabled", "F8", "warn", "Persistence"),
        ("Total                             : 131072 MiB", "Total             : 256 MiB", "F21", "fail", "256 MiB"),
        ("Current Power Limit               : 600.00 W", "Current Power Limit : 300.00 W", "F17", "warn", "lowest"),
        ("GPU                               : 0 %", "GPU                               : 90 %", "F19", "fail", "in P8"),
    ],
)
def test_one_line_that_differs_is_found(before: str, after: str, rule: str, state: str, words: str) -> None:
    assert before in HEALTHY
    first, second = HEALTHY.split("GPU 00000000:02")
    found = judge(nvidia_smi__q=f"{first.replace(before, after, 1)}GPU 00000000:02{second}")[rule]
    assert state in [one.state for one in found]
    assert any(words in one.title for one in found)
    assert not any("0000:02:00.0" in one.title for one in found if one.bad)


@pytest.mark.parametrize("cut", range(0, len(HEALTHY), 97))
def test_no_part_of_the_output_is_called_well_as_a_whole(cut: int) -> None:
    """The second GPU fails in everything; no cut of the text may say that all is well."""
    first, second = HEALTHY.split("GPU 00000000:02")
    for before, after in (
        ("Action                   : None", "Action                   : Reset"),
        ("Uncorrectable            : 0", "Uncorrectable            : 9"),
        ("Current                           : Disabled", "Current                           : Enabled"),
    ):
        second = second.replace(before, after)
    text = f"{first}GPU 00000000:02{second}"[:cut]
    found = judge(nvidia_smi__q=text)
    for rule in ("F13", "F14", "F16"):
        assert "pass" not in [one.state for one in found.get(rule, [])], rule


def test_a_paste_of_several_outputs_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text(
        "My box hangs.\n\n```\n[ 12.5] NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus.\n"
        "[ 12.6] NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot "
        "Required)\n```\n\n```\n$ nvidia-smi nvlink -s\nGPU 0: NVIDIA GeForce RTX 3090 (UUID: GPU-a)\n"
        "\t Link 0: 14.062 GB/s\n\t Link 1: <inactive>\n```\n"
    )
    (evidence,) = intake.read([tmp_path])
    found = engine.judge({"h": snapshot.build(evidence)})["h"]
    bad = {(one.rule, one.subject): one.state for one in found if one.bad}
    assert bad == {("F15", "0000:02:00"): "fail", ("F15", "0000:01:00"): "warn", ("F10", ""): "fail"}
