"""Redacted evidence tells nobody who and where it is from, gives the same verdicts, and still joins."""

from __future__ import annotations

from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core import redact
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import Evidence, EvidenceSet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

EXAMPLE = Path(__file__).parents[3] / "docs/examples/eight-gpu-guest"
KEY = b"k" * 32


def masked(text: str, source: str = "kernel_log", host: str = "blue-whale", key: bytes = KEY) -> str:
    given = EvidenceSet(host, entries={source: Evidence(source, stdout=text)})
    (one,) = redact.redacted([given], key)
    return next(iter(one)).stdout


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("GPU 0: NVIDIA A30 (UUID: GPU-0a1b2c3d-1111-4222-8333-444455556666)\n", "0a1b2c3d-1111"),
        ("    Serial Number                         : 1652823054321\n", "1652823054321"),
        ("    Chassis Serial Number                 : ABC 77\n", "ABC 77"),
        ("<serial>165</serial>\n", "165"),
        ("Capabilities: [150 v1] Device Serial Number 04-3f-72-ff-fe-b1-c0-de\n", "04-3f-72"),
        ("index, serial, name\n0, 1652823054321, NVIDIA A30\n", "1652823054321"),
        ("scsi0: local:vm-101-disk-0,serial=DISK77,size=8G\n", "DISK77"),
        ("Linux blue-whale 6.8.0-1-generic #1 SMP\n", "blue-whale"),
        ("Sep 19 16:18:02 red7.corp.example kernel: pci: x\n", "red7"),
        ("2026-01-01T00:00:00+00:00 red7 kernel: pci: x\n", "red7"),
        ("copied from blue-whale to disk\n", "blue-whale"),
        ("red-ant:77:99 [0] NCCL INFO Bootstrap\n", "red-ant"),
        ("-name\nsecret-vm,debug-threads=on\n", "secret-vm"),
        ("name: secret-vm\n", "secret-vm"),
        ("alice@secret-vm:~# lspci\n", "secret-vm"),
        ("/home/alice/models\n", "alice"),
        ("net0: virtio=BC:24:11:0A:0B:0C,bridge=vmbr0\n", "BC:24:11"),
        ("ibp1 80:00:00:48:fe:80:00:00:00:00:00:00:0c:42:a1:03:00:1d:22:10\n", "0c:42:a1"),
        ("node_guid: 0c42:a103:0012:3456\n", "0c42:a103"),
        ("NET/Socket : Using [0]eth0:10.1.2.3<0>\n", "10.1.2.3"),
        ("listening on 192.168.7.9:8000\n", "192.168.7.9"),
        ("from fe80::a8bb:ccff:fe00:1 port\n", "fe80::a8bb"),
        ("2a01:4f8:c0c:1234::1/64\n", "2a01:4f8"),
        ("http://proxy.corp.example:3128/\n", "proxy.corp"),
        ("https://alice:geheim@mirror.corp.example/x\n", "geheim"),
    ],
)
def test_what_tells_who_and_where_is_masked(text, secret):
    once = masked(text)

    assert secret not in once
    assert once == masked(text), "the same value gives the same mask"
    assert once != masked(text, key=b"other" * 7), "another key gives another mask"
    assert once.count("\n") == text.count("\n")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("lspci.vvv", "0000:01:00.0 3D controller [0302]: NVIDIA Corporation Device [10de:2bb5] (rev a1)\n"),
        ("nvidia_smi.q", "    VBIOS Version                         : 98.02.52.00.02\n"),
        ("nvidia_smi.q", "    GSP Firmware Version                  : 595.58.3.1\n"),
        ("nvidia_smi.q", "    Serial Number                         : N/A\n"),
        ("nvidia_smi", "| NVIDIA-SMI 595.58.03    Driver Version: 595.58.03    CUDA Version: 13.2 |\n"),
        ("dpkg", "ii \tlibcublas-12-4\t12.4.5.8-1\n"),
        ("apt.output", "Setting up libcublas-12-4 (12.4.5.8) ...\n"),
        ("engine.log", "nvidia-cublas-cu12==12.4.5.8\n"),
        ("kernel_log", "[    1.165960] vfio-pci 0000:41:00.0: BAR 1 [mem 0x20000000-0x3fffffff]\n"),
        (
            "kernel_log",
            "[Tue Sep 19 16:18:02 2026] NVRM: Xid (PCI:0000:9b:00): 79, pid=1, GPU has fallen off the bus.\n",
        ),
        ("proc.cmdline", "BOOT_IMAGE=/vmlinuz-6.8.0 root=/dev/mapper/pve-root ro iommu=pt\n"),
        ("nvidia_smi.topo_m", "GPU0\t X \tNODE\t0-23\t0\nGPU1\tNODE\t X \t24-47\t1\n"),
        ("pve.conf.101", "hostpci0: 0000:41:00.0,pcie=1\nmemory: 8192\nname: gpu\n".replace("name: gpu\n", "")),
        ("engine.log", "INFO 07-28 15:07:22 [core.py:1] http://localhost:8000 c10::Error a::b\n"),
        ("nccl.log", "NET/Socket : Using lo:127.0.0.1<0> and ::1\n"),
        ("apt.output", "Get:1 https://developer.download.nvidia.com/compute/cuda 12 amd64\n"),
    ],
)
def test_what_verdicts_need_stays(source, text):
    assert masked(text, source) == text


def test_masks_look_like_what_they_replace():
    text = masked("GPU-0a1b2c3d-1111-4222-8333-444455556666 BC:24:11:0A:0B:0C bc:24:11:0a:0b:0c 10.1.2.3 2a01:4f8::1\n")
    uuid, upper, lower, ipv4, ipv6 = text.split()

    assert len(uuid) == len("GPU-0a1b2c3d-1111-4222-8333-444455556666")
    assert upper.lower() == lower
    assert lower.startswith("02:")
    assert 240 <= int(ipv4.split(".")[0]) < 248
    assert ipv6.startswith("2001:db8:")


@pytest.mark.parametrize("name", ["node1", "gpu", "nvidia", "kvm", "4"])
def test_an_ordinary_word_as_a_name_is_masked_only_where_a_name_stands(name):
    text = masked(f"Linux {name} 6.8.0-1-generic\n", host=name)
    matrix = masked(f"available: 2 nodes: {name} GPU {name}\n", host=name)

    assert name not in text.split()
    assert matrix == f"available: 2 nodes: {name} GPU {name}\n"


def test_the_serial_number_in_config_space_goes_too():
    data = bytearray(512)
    data[0x100:0x104] = (0x0003 | 1 << 16).to_bytes(4, "little")
    data[0x104:0x10C] = bytes.fromhex("1122334455667788")
    text = f"[0000:41:00.0]\nvendor: 0x10de\nconfig: {data.hex()}\n"

    assert "1122334455667788" not in masked(text, "sysfs.pci")
    assert len(masked(text, "sysfs.pci")) == len(text)


def test_all_parts_of_evidence_are_masked():
    given = EvidenceSet(
        "blue-whale",
        entries={
            "kernel_log@blue-whale": Evidence(
                "kernel_log@blue-whale",
                stdout="x\n",
                stderr="cannot reach blue-whale\n",
                command="ssh root@blue-whale dmesg",
                path="/home/alice/blue-whale/dmesg.txt",
                reason="blue-whale is away",
                pasted=True,
            )
        },
        unrecognised=("blue-whale.bin: is binary",),
        inventory={"hypervisor": "red-ant", "vmid": "101"},
    )

    (one,) = redact.redacted([given], KEY)

    assert "blue" not in repr(one)
    assert "alice" not in repr(one)
    assert "red-ant" not in repr(one)
    assert one.inventory["vmid"] == "101"


def verdicts(sets):
    fleet = {one.host: snapshot.build(one) for one in sets}
    findings = engine.judge(fleet)
    roles = {host: fleet[host].role.value for host in fleet}
    return sorted(
        (
            roles[host] or "",
            one.rule,
            one.state,
            one.severity,
            one.subject,
            tuple(name.rpartition("/")[2] for name in one.explains),
        )
        for host in fleet
        for one in findings[host]
    )


def test_a_redacted_fleet_gets_the_same_verdicts_and_still_joins():
    plain = intake.read([EXAMPLE])

    assert verdicts(redact.redacted(plain, KEY)) == verdicts(plain)


def test_hosts_that_were_redacted_one_by_one_still_join():
    alone = [redact.redacted([one], KEY)[0] for one in intake.read([EXAMPLE])]

    assert verdicts(alone) == verdicts(intake.read([EXAMPLE]))
    assert any(explained for *_, explained in verdicts(alone))


def test_nothing_of_the_example_is_left():
    told = "\n".join(entry.stdout for one in redact.redacted(intake.read([EXAMPLE]), KEY) for entry in one)

    for secret in ("llm-guest", "pve-node", "0a1b2c3d-1111", "BC:24:11:00:00:01"):
        assert secret not in told


def test_a_key_is_made_of_words_slowly_and_always_the_same():
    assert redact.key_of("a long enough secret") == redact.key_of(b"a long enough secret")
    assert redact.key_of("a long enough secret") != redact.key_of("a long enough secrets")
    assert len(redact.key_of("x")) == 32
