"""One paste, two machines: a hypervisor's configuration beside the outputs of its guest's driver."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import EvidenceSet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

MATRIX = " \tGPU0\tGPU1\t\n GPU0\tX\tNS\t\n GPU1\tNS\tX\t\n\nLegend:\n\n  X    = Self\n"
CONF = "cpu: host,hidden=1\nmachine: q35\nhostpci0: 0000:01:00,pcie=1\nhostpci1: 0000:02:00,pcie=1\nmemory: 65536\n"
LOCAL_CONF = "cpu: host\nmachine: q35\nmemory: 4096\nscsi0: local:vm-102-disk-0\n"
GUEST_LOG = "[    0.000000] Hypervisor detected: KVM\n[    9.100000] NVRM: loading NVIDIA UNIX Open Kernel Module\n"
HOST_LOG = "[    0.000000] Linux version 6.17.2-1-pve\n[    8.000000] vfio-pci 0000:01:00.0: resetting\n"


def read(*parts: tuple[str, str]) -> dict[str, set[str]]:
    text = "".join(f"{prompt} {text}" for prompt, text in parts)
    return {one.host: {entry.source for entry in one} for one in intake.read([], text)}


P2P, CAT, LOG = "nvidia-smi topo -p2p r\n" + MATRIX, "cat /etc/pve/qemu-server/101.conf\n" + CONF, "dmesg\n"


def test_the_driver_of_a_guest_is_not_the_hypervisors() -> None:
    found = read(("$", P2P), ("#", CAT), ("$", LOG + GUEST_LOG))

    assert found == {"stdin": {"pve.conf.101"}, "stdin-guest": {"nvidia_smi.topo_p2p_r", "kernel_log"}}


def test_prompts_name_the_machines() -> None:
    found = read(
        ("me@llm1:~$", P2P), ("root@pve1:~#", CAT), ("root@pve1:~#", LOG + HOST_LOG), ("me@llm1:~$", "uname -r\n")
    )

    assert found["llm1"] >= {"nvidia_smi.topo_p2p_r"}
    assert found["stdin"] == {"pve.conf.101", "kernel_log"}


@pytest.mark.parametrize(
    "parts",
    [
        [("root@box:~#", P2P), ("root@box:~#", CAT)],
        [("$", P2P), ("#", "cat /etc/pve/qemu-server/102.conf\n" + LOCAL_CONF)],
        [("$", P2P), ("$", LOG + GUEST_LOG)],
        [("#", CAT), ("#", LOG + HOST_LOG)],
    ],
    ids=["one-prompt", "no-gpu-is-passed", "a-guest-alone", "a-hypervisor-alone"],
)
def test_one_machine_stays_one(parts: list[tuple[str, str]]) -> None:
    assert len(read(*parts)) == 1


def test_file_names_say_where_an_output_comes_from(tmp_path) -> None:
    for name, text in {"guest-dmesg.txt": GUEST_LOG, "host-dmesg.txt": HOST_LOG, "p2p-r.txt": MATRIX}.items():
        (tmp_path / name).write_text(text)

    found = {one.host: len(one.entries) for one in intake.read([tmp_path])}

    assert found[f"{tmp_path.name}-guest"] >= 1 and len(found) == 2


def test_the_guests_refusal_is_explained_by_its_vm() -> None:
    sets: list[EvidenceSet] = intake.read([], f"$ {P2P}# {CAT}")
    fleet = {one.host: snapshot.build(one) for one in sets}
    findings = engine.judge(fleet)

    assert fleet["stdin-guest"].role.value == "guest"
    (cause,) = [one for one in findings["stdin"] if one.rule == "B1"]
    assert "stdin-guest/D5" in cause.explains
