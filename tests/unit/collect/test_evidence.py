"""The collector reads what a machine offers, bounds everything, and lists what it could not read with the reason."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import bounded, evidence, evidence_probes
from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_sources import SOURCES
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core import evidence as evidence_room
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import join


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small /sys and /proc: one GPU below a root port, one IOMMU group, one Proxmox VM."""
    port = tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    gpu = port / "0000:41:00.0"
    gpu.mkdir(parents=True)
    devices = tmp_path / "sys/bus/pci/devices"
    devices.mkdir(parents=True)
    for place, vendor, device, kind in ((port, "0x1022", "0x1483", "0x060400"), (gpu, "0x10de", "0x2bb5", "0x030200")):
        (place / "vendor").write_text(f"{vendor}\n")
        (place / "device").write_text(f"{device}\n")
        (place / "class").write_text(f"{kind}\n")
        (devices / place.name).symlink_to(os.path.relpath(place, devices))
    (gpu / "resource").write_text("0x1 0x2 0x3\n0x0 0x0 0x0\n")
    (gpu / "config").write_bytes(bytes.fromhex("de10b52b") + bytes(60))
    driver = tmp_path / "sys/bus/pci/drivers/vfio-pci"
    driver.mkdir(parents=True)
    (gpu / "driver").symlink_to(os.path.relpath(driver, gpu))
    group = tmp_path / "sys/kernel/iommu_groups/14"
    (group / "devices").mkdir(parents=True)
    (group / "type").write_text("DMA-FQ\n")
    (group / "devices/0000:41:00.0").write_text("")
    (tmp_path / "sys/class/iommu/dmar0").mkdir(parents=True)
    conf = tmp_path / "etc/pve/qemu-server"
    conf.mkdir(parents=True)
    (conf / "101.conf").write_text("cpu: host\n")
    (conf / "102.conf").write_text("cpu: kvm64\n")
    return tmp_path


def by_source(entries: list[dict[str, object]]) -> dict[str, dict[str, object]]:
    return {str(entry["source"]): entry for entry in entries}


def test_a_function_tells_its_ids_driver_port_and_config_space(tree):
    blocks = evidence_probes.pci(str(tree)).split("\n\n")

    gpu = next(block for block in blocks if block.startswith("[0000:41:00.0]"))
    assert "vendor: 0x10de" in gpu
    assert "driver: vfio-pci" in gpu
    assert "parent: 0000:00:01.0" in gpu
    assert "resource: 0x1 0x2 0x3;0x0 0x0 0x0" in gpu
    assert "config_bytes: 64\nconfig: de10b52b\n" in gpu
    assert "aer_dev_fatal: absent" in gpu


def test_a_function_without_a_driver_says_so_with_an_empty_value(tree):
    port = next(block for block in evidence_probes.pci(str(tree)).split("\n\n") if block.startswith("[0000:00:01.0]"))

    assert "driver: \n" in port + "\n"
    assert "parent:" not in port


def test_iommu_groups_and_units_are_listed_with_their_number(tree):
    assert evidence_probes.iommu(str(tree)) == "unit dmar0\ngroup 14 type DMA-FQ devices 0000:41:00.0\ngroups 1\n"


def test_each_vm_file_is_a_source_of_its_own(tree):
    wanted = [source for source in SOURCES if source["source"] == "pve.conf"]

    entries = by_source(evidence.collect(5, str(tree), wanted))

    assert entries["pve.conf.101"]["stdout"] == "cpu: host\n"
    assert entries["pve.conf.102"]["stdout"] == "cpu: kvm64\n"


def test_every_source_is_listed_even_where_the_machine_cannot_have_it(tmp_path):
    entries = evidence.collect(5, str(tmp_path), [one for one in SOURCES if one.get("where")])

    assert {entry["source"] for entry in entries} == {one["source"] for one in SOURCES if one.get("where")}
    assert all(entry["reason"] for entry in entries)


def test_no_source_reads_a_whole_environment_or_a_key():
    told = " ".join(str(source.get("path", "")) + " ".join(source.get("argv", ())) for source in SOURCES)

    assert "environ" not in told
    assert "ssh" not in told
    assert "shadow" not in told


def test_a_command_that_hangs_is_ended_with_all_its_children():
    started = time.monotonic()

    answer = bounded.run(["sh", "-c", "echo first; sleep 60 & sleep 60"], 1, 1000)

    assert time.monotonic() - started < 10
    assert answer["rc"] is None
    assert answer["reason"] == "no answer within 1 s"
    assert answer["stdout"] == "first\n"


def test_a_probe_that_hangs_is_left_behind_and_the_others_are_read(monkeypatch):
    released = threading.Event()
    monkeypatch.setitem(evidence._PROBES, "hangs", lambda root: released.wait(60) and "")
    monkeypatch.setattr(evidence, "_SPARE_S", 0)
    monkeypatch.setattr(evidence, "_PROBE_SHARE", 1)
    sources = [
        {"source": "slow", "kind": "probe", "probe": "hangs"},
        {"source": "uname", "kind": "command", "argv": ["uname", "-s"]},
    ]
    started = time.monotonic()

    slow, uname = evidence.collect(1, "/", sources)
    released.set()

    assert time.monotonic() - started < 10
    assert (slow["reason"], uname["stdout"]) == ("no answer within 1 s", "Linux\n")


def test_sources_are_read_side_by_side():
    sources = [{"source": f"sleep{at}", "kind": "command", "argv": ["sleep", "0.5"]} for at in range(12)]
    started = time.monotonic()

    entries = evidence.collect(10, "/", sources)

    assert time.monotonic() - started < 4
    assert all(entry["rc"] == 0 and entry["elapsed_ms"] >= 400 for entry in entries)


def test_a_command_tells_its_status_and_complaint():
    (entry,) = evidence.collect(
        5, "/", [{"source": "x", "kind": "command", "argv": ["sh", "-c", "echo no >&2; exit 3"]}]
    )

    assert (entry["rc"], entry["stderr"], entry["stdout"], entry["reason"]) == (3, "no\n", "", "")


def test_a_probe_whose_text_is_too_long_is_cut_and_marked(monkeypatch):
    monkeypatch.setitem(evidence._PROBES, "long", lambda root: "x" * 300)
    monkeypatch.setattr(evidence, "MAX_BYTES", 100)

    (entry,) = evidence.collect(5, "/", [{"source": "long", "kind": "probe", "probe": "long"}])

    assert (len(entry["stdout"]), entry["truncated"]) == (100, True)


def test_of_a_long_log_head_and_tail_are_kept_at_line_ends():
    answer = bounded.run(["seq", "1", "5000"], 5, 1000, ends=True)
    rows = answer["stdout"].splitlines()

    assert answer["truncated"]
    assert (rows[0], rows[-1]) == ("1", "5000")
    assert len(answer["stdout"]) <= 1000
    assert all(len(row) in (1, 2, 3, 4) and row.isdigit() for row in rows)


@pytest.mark.skipif(os.geteuid() != 0, reason="changes to another user")
def test_a_folder_that_needs_root_is_told_from_one_that_is_empty(tree, as_another_user):
    wanted = [source for source in SOURCES if source["source"] in ("pve.conf", "dmi")]
    identity = tree / "sys/class/dmi/id"
    identity.mkdir(parents=True)
    (identity / "product_name").write_text("box\n")
    (identity / "product_uuid").write_text("1\n")
    (identity / "product_uuid").chmod(0o400)
    (tree / "etc/pve/qemu-server").chmod(0o700)

    def say():
        entries = by_source(evidence.collect(5, str(tree), wanted))
        return repr((entries["pve.conf"]["reason"], entries["dmi"]["stdout"], entries["dmi"]["stderr"]))

    told = as_another_user(tree, say)

    assert "qemu-server: Permission denied, needs root" in told
    assert "product_name: box" in told
    assert "product_uuid needs root" in told


def config_space(serial: bytes) -> bytes:
    """Bytes with a PCI Express chain of two: Advanced Error Reporting, then the Device Serial Number."""
    data = bytearray(512)
    data[0:4] = bytes.fromhex("de10b52b")
    data[0x100:0x104] = (0x0001 | 2 << 16 | 0x148 << 20).to_bytes(4, "little")
    data[0x148:0x14C] = (0x0003 | 1 << 16 | 0 << 20).to_bytes(4, "little")
    data[0x14C:0x154] = serial
    return bytes(data)


def test_serial_numbers_leave_the_host_only_when_asked(tree):
    gpu = tree / "sys/devices/pci0000:00/0000:00:01.0/0000:41:00.0"
    serial = bytes.fromhex("1122334455667788")
    (gpu / "config").write_bytes(config_space(serial))
    wanted = [source for source in SOURCES if source["source"] in ("sysfs.pci",)]

    (kept,) = evidence.collect(5, str(tree), wanted, serials=True)
    (masked,) = evidence.collect(5, str(tree), wanted)

    assert serial.hex() in kept["stdout"]
    assert serial.hex() not in masked["stdout"]
    assert kept["stdout"].replace(serial.hex(), "0" * 16) == masked["stdout"]


@pytest.mark.parametrize(
    ("source", "line", "masked"),
    [
        ("nvidia_smi.q", "    Serial Number             : 1652823054321", "    Serial Number             : [masked]"),
        ("nvidia_smi.q", "    Serial Number             : N/A", "    Serial Number             : N/A"),
        ("lspci.vvv", "\tCapabilities: [150] Device Serial Number 04-3f-72-ff-fe-b1-c0-de", "[masked]"),
    ],
)
def test_serial_numbers_of_each_source(source, line, masked):
    given = next(one for one in SOURCES if one["source"] == source)
    fake = {**given, "where": "any", "argv": ["printf", "%s\n", line]}

    (entry,) = evidence.collect(5, "/", [fake])
    (asked,) = evidence.collect(5, "/", [fake], serials=True)

    assert masked in entry["stdout"]
    assert asked["stdout"] == line + "\n"


def test_a_missing_command_is_a_reason_and_not_an_error():
    answer = bounded.run(["no-such-tool-here", "-x"], 1, 1000)

    assert (answer["rc"], answer["reason"]) == (None, "no-such-tool-here: command not found")


def test_long_output_is_cut_and_marked():
    answer = bounded.run(["sh", "-c", "yes x | head -c 5000"], 5, 1000)

    assert (len(answer["stdout"]), answer["truncated"]) == (1000, True)


def test_tools_answer_in_the_c_locale(monkeypatch):
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")

    assert bounded.run(["sh", "-c", "echo $LC_ALL"], 5, 100)["stdout"] == "C\n"


def test_a_snapshot_survives_saving_and_loading(tmp_path):
    first = evidence_room.from_module(
        "gpu1",
        {
            "collected_at": "2026-01-02T03:04:05Z",
            "privileged": True,
            "evidence": [
                {"source": "uname", "command": "uname -a", "rc": 0, "stdout": "Linux\r\n", "elapsed_ms": 3},
                {"source": "pve.conf", "reason": "/etc/pve is not there"},
            ],
        },
    )

    evidence_room.save(first, tmp_path / "gpu1")

    assert evidence_room.load(tmp_path / "gpu1") == first


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is no JSON"),
        ("[]", "has schema 'list'"),
        ('{"schema": "peerlane.evidence/9"}', "peerlane.evidence/9"),
        ('{"schema": "peerlane.evidence/1", "evidence": [{}]}', "without a source"),
    ],
)
def test_a_broken_manifest_is_one_clear_line(tmp_path, text, complaint):
    (tmp_path / "manifest.json").write_text(text)

    with pytest.raises(InputError, match=complaint) as caught:
        evidence_room.load(tmp_path)

    assert "\n" not in caught.value.line()


def test_a_manifest_cannot_name_a_file_outside_its_folder(tmp_path):
    (tmp_path / "secret").write_text("do not read me")
    inside = tmp_path / "snapshot"
    inside.mkdir()
    (inside / "manifest.json").write_text(
        '{"schema": "peerlane.evidence/1", "host": "h", "evidence": [{"source": "uname", "file": "../secret"}]}'
    )

    entry = evidence_room.load(inside).get("uname")

    assert entry is not None
    assert entry.stdout == ""
    assert "cannot be read" in entry.reason


def test_a_file_that_is_gone_leaves_its_reason(tmp_path):
    (tmp_path / "manifest.json").write_text(
        '{"schema": "peerlane.evidence/1", "host": "h", "evidence": [{"source": "uname", "file": "uname.txt"}]}'
    )

    assert "uname.txt cannot be read" in evidence_room.load(tmp_path).why_missing("uname")


def test_passwords_and_serial_numbers_of_vms_stay_on_the_machine(tree):
    (tree / "etc/pve/qemu-server/101.conf").write_text(
        "cipassword: $5$abc\ncpu: host\nscsi0: p:vm-disk,serial=WD-123,size=8G\nsmbios1: uuid=u,serial=SN9\n"
    )
    domains = tree / "etc/libvirt/qemu"
    domains.mkdir(parents=True)
    (domains / "llm.xml").write_text(
        "<domain type='kvm'><name>llm</name><graphics type='vnc' passwd='secret'/>"
        "<qemu:env name='TOKEN' value=\"hf_secret\"/><entry name='serial'>SN9</entry><serial>WD-123</serial></domain>"
    )
    wanted = [source for source in SOURCES if source["source"] in ("pve.conf", "libvirt.domains")]

    texts = {name: str(entry["stdout"]) for name, entry in by_source(evidence.collect(5, str(tree), wanted)).items()}

    assert texts["pve.conf.101"] == (
        "cipassword: [masked]\ncpu: host\nscsi0: p:vm-disk,serial=[masked],size=8G\nsmbios1: uuid=u,serial=[masked]\n"
    )
    for secret in ("secret", "SN9", "WD-123"):
        assert secret not in texts["libvirt.domains"]
    assert "passwd='[masked]'/>" in texts["libvirt.domains"]


@pytest.fixture
def process(tree: Path) -> Path:
    """A QEMU process of VM 101 that started 100 s after the machine."""
    place = tree / "proc/4242"
    place.mkdir(parents=True)
    (tree / "proc/stat").write_text("cpu  1 2 3 4 5 6 7 8 9 10\nintr 1 2\nbtime 1700000000\n")
    (place / "cmdline").write_bytes(b"/usr/bin/kvm\0-id\0" + b"101\0-cpu\0host\0")
    ticks = 100 * os.sysconf("SC_CLK_TCK")
    (place / "stat").write_text(f"4242 (kvm (odd) name) S {' '.join(['0'] * 18)} {ticks} 0 0\n")
    (place / "status").write_text("Name:\tkvm\nCpus_allowed_list:\t0-31\n")
    return place


@pytest.mark.parametrize(
    ("probe", "pids", "config"),
    [
        ("qemu_processes", "run/qemu-server/101.pid", "etc/pve/qemu-server/101.conf"),
        ("libvirt_processes", "run/libvirt/qemu/101.pid", "etc/libvirt/qemu/101.xml"),
    ],
)
def test_a_running_vm_tells_when_it_started_and_on_which_cpus(tree, process, probe, pids, config):
    (tree / pids).parent.mkdir(parents=True)
    (tree / pids).write_text("4242\n")
    (tree / config).parent.mkdir(parents=True, exist_ok=True)
    (tree / config).write_text("x\n")
    os.utime(tree / config, (1700000500, 1700000500))

    text = evidence_probes.PROBES[probe](str(tree))

    assert text == (
        "# ==> vm 101 pid 4242 started 1700000100 changed 1700000500 cpus 0-31 <==\n"
        "/usr/bin/kvm\n-id\n101\n-cpu\nhost\n"
    )


def test_what_a_process_does_not_tell_is_left_out(tree, process):
    (process / "stat").write_text("4242 (kvm) S\n")
    (process / "status").unlink()
    (tree / "run/qemu-server").mkdir(parents=True)
    (tree / "run/qemu-server/900.pid").write_text("4242\n")
    (tree / "run/qemu-server/901.pid").write_text("5555\n")

    assert evidence_probes.qemu_processes(str(tree)).splitlines()[0] == "# ==> vm 900 pid 4242 <=="


def test_only_interfaces_with_a_device_are_cards(tree):
    for name, address, is_card in (("ens18", "bc:24:11:00:00:01", True), ("docker0", "02:42:00:00:00:01", False)):
        place = tree / "sys/class/net" / name
        place.mkdir(parents=True)
        (place / "address").write_text(f"{address}\n")
        if is_card:
            (place / "device").symlink_to("../../../devices")
            (tree / "sys/class/devices").mkdir(exist_ok=True)

    assert evidence_probes.net_cards(str(tree)) == "ens18 bc:24:11:00:00:01\n"


def test_memory_lists_pools_nodes_and_what_shares_it(tree):
    pool = tree / "sys/kernel/mm/hugepages/hugepages-2048kB"
    pool.mkdir(parents=True)
    (pool / "nr_hugepages").write_text("12\n")
    (pool / "free_hugepages").write_text("3\n")
    node = tree / "sys/devices/system/node/node1"
    node.mkdir(parents=True)
    (node / "cpulist").write_text("8-15\n")
    (node / "meminfo").write_text("Node 1 MemTotal:       1024 kB\n")
    (tree / "sys/kernel/mm/ksm").mkdir()
    (tree / "sys/kernel/mm/ksm/run").write_text("1\n")

    assert evidence_probes.memory(str(tree)) == (
        "hugepages 2048 total=12 free=3\nnode 1 cpus=8-15 mem_kib=1024\nksm_run: 1\n"
    )


def test_cpu_time_leaves_out_the_long_lines(tree, process):
    assert evidence_probes.cpu_time(str(tree)) == "cpu  1 2 3 4 5 6 7 8 9 10\nbtime 1700000000\n"


def test_what_the_inventory_says_survives_saving_and_reaches_the_join(tmp_path):
    guest = evidence_room.from_module(
        "vm",
        {
            "inventory": {"hypervisor": "pve1", "vmid": "101"},
            "evidence": [{"source": "detect_virt.vm", "rc": 0, "stdout": "kvm\n"}],
        },
    )
    conf = {"source": "pve.conf.101", "path": "/etc/pve/qemu-server/101.conf", "stdout": "cpu: host\nmemory: 4096\n"}
    for one in (guest, evidence_room.from_module("pve1", {"evidence": [conf]})):
        evidence_room.save(one, tmp_path / one.host)
    assert evidence_room.load(tmp_path / "vm") == guest

    fleet = {one.host: snapshot.build(one) for one in intake.read([tmp_path])}

    found = join.home_of(fleet["vm"], fleet)
    assert isinstance(found, join.Home)
    assert (found.key, found.how) == (("pve1", "101"), "the inventory")


@pytest.mark.parametrize("given", [["pve1"], "pve1", 7])
def test_an_inventory_of_an_odd_kind_counts_as_none(tmp_path, given):
    (tmp_path / "manifest.json").write_text(
        json.dumps({"schema": "peerlane.evidence/1", "host": "h", "inventory": given, "evidence": []})
    )
    assert evidence_room.load(tmp_path).inventory == {}
