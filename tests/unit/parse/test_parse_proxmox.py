"""Proxmox VE: configurations, pending changes, running processes, mappings, CPU models, versions."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, proxmox, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError


@pytest.fixture
def config(recorded):
    return proxmox.conf("101", recorded("pve.101.conf"), "pve.conf.101")


def test_only_the_lines_before_the_first_section_are_active(config):
    assert (config.settings["cpu"], config.settings["memory"]) == ("host,hidden=1,flags=+pdpe1gb;+aes", "131072")
    assert "name" not in config.settings
    assert config.snapshots == ("before-upgrade",)


def test_the_last_duplicate_wins_and_is_listed(config):
    assert (config.settings["cores"], config.duplicates) == ("32", ("cores",))


def test_comments_are_the_description_and_never_settings(config):
    assert config.description == "LLM guest: two cards\nhostpci9: 0000:99:00.0,pcie=1"
    assert [device.index for device in config.hostpci] == [0, 1, 2]


def test_pending_changes_and_deletions_are_told_apart(config):
    assert (config.pending, config.pending_deletes) == ({"cpu": "host"}, ("balloon", "numa0"))


@pytest.mark.parametrize(("whole", "pending"), [(True, {}), (False, None)])
def test_no_pending_section_means_none_only_in_the_whole_file(whole, pending):
    assert proxmox.conf("7", "machine: q35\n", "x", whole=whole).pending == pending


def test_passed_devices_keep_their_form(config):
    first, second, mapped = config.hostpci

    assert (first.paths, first.all_functions, first.flag("x-vga"), first.flag("rombar")) == (
        ("0000:41:00",),
        True,
        True,
        None,
    )
    assert (second.paths, second.all_functions) == (("0000:42:00.0", "0000:42:00.1"), False)
    assert (mapped.mapping, mapped.paths, mapped.flag("pcie")) == ("gpu2", (), False)
    assert first.line == "hostpci0: 0000:41:00,pcie=1,x-vga=on"


def test_options_of_a_comma_list_are_found(config):
    assert (config.option("cpu", "cputype", "cputype"), config.option("cpu", "hidden")) == ("host", "1")
    assert config.option("machine", "viommu") is None


def test_an_indented_paste_is_the_same(recorded, config):
    text = "".join(f"    {row}\r\n" for row in recorded("pve.101.conf").split("\n"))

    assert proxmox.conf("101", text, "pve.conf.101") == config


@pytest.mark.parametrize("text", ["", "# only a comment\n", "[PENDING]\ncpu: host\n", "no colon here\n"])
def test_a_file_without_active_settings_is_refused(text):
    with pytest.raises(RefusedError):
        proxmox.conf("1", text, "x")


def test_qm_pending_is_read_for_each_vm():
    found = proxmox.qm_pending(
        "# ==> qm pending 101 <==\ncur cores: 8\nnew cpu: host\n"
        "del balloon: 512\n# ==> qm pending 102 <==\ncur cores: 4\n"
    )

    assert (found["101"].new, found["101"].deletes, found["101"].current) == (
        {"cpu": "host"},
        ("balloon",),
        {"cores": "8"},
    )
    assert (found["102"].new, found["102"].deletes) == ({}, ())


def test_a_single_qm_pending_needs_no_header():
    assert proxmox.qm_pending("cur cores: 8\nnew machine: q35\n")[""].new == {"machine": "q35"}


@pytest.mark.parametrize(
    "text",
    [
        "# ==> vm 101 pid 4242 <==\n/usr/bin/kvm\n-id\n101\n-cpu\nhost,kvm=off\n",
        "root  4242  99  ?  Sl  /usr/bin/kvm -id 101 -cpu host,kvm=off\n",
        "/usr/bin/kvm \\\n  -id 101 \\\n  -cpu 'host,kvm=off'\n",
    ],
)
def test_running_arguments_come_from_our_source_a_process_list_or_a_command(text):
    arguments = proxmox.processes(text)["101"].arguments

    assert arguments[-4:] == ("-id", "101", "-cpu", "host,kvm=off")


MAPPING = """gpu0
	description left card
	map id=10de:2bb5,iommugroup=14,node=pve1,path=0000:01:00.0
	map id=10de:2bb5,iommugroup=22,node=pve2,path=0000:81:00.0;0000:81:00.1
gpu1
	map id=10de:2bb5,node=pve1,path=0000:02:00
"""


def test_a_mapping_serves_its_own_node():
    assert proxmox.mappings(proxmox.mapping_claims(MAPPING, ("pve2",))) == {
        "gpu0": ("0000:81:00.0", "0000:81:00.1"),
        "gpu1": (),
    }


def test_a_mapping_of_one_node_needs_no_name():
    assert proxmox.mappings(proxmox.mapping_claims(MAPPING.replace("pve2", "pve1"), ()))["gpu1"] == ("0000:02:00",)


def test_a_mapping_of_other_nodes_is_refused():
    with pytest.raises(RefusedError, match="pve1, pve2"):
        proxmox.mapping_claims(MAPPING, ("elsewhere",))


def test_custom_cpu_models_are_named_as_settings_name_them():
    text = (
        "cpu-model: gpu\n    flags +avx;+avx2\n    hidden 1\n"
        "    reported-model host\n\ncpu-model: other\n    phys-bits host\n"
    )

    models = proxmox.cpu_models(text)

    assert (models["custom-gpu"]["hidden"], models["custom-other"]) == ("1", {"phys-bits": "host"})


@pytest.mark.parametrize(
    ("text", "pve", "qemu", "kernel"),
    [
        (
            "proxmox-ve: 9.1.0 (running kernel: 6.17.13-2-pve)\n"
            "pve-manager: 9.1.4 (running version: 9.1.4/x)\npve-qemu-kvm: 10.1.2-4\n",
            "9.1.4",
            "10.1.2",
            "6.17.13-2-pve",
        ),
        ("pve-manager/8.4.1/abc (running kernel: 6.8.12-1-pve)", "8.4.1", None, "6.8.12-1-pve"),
        ("QEMU emulator version 9.2.0 (pve-qemu-kvm_9.2.0-5)", None, "9.2.0", None),
    ],
)
def test_versions(text, pve, qemu, kernel):
    assert (proxmox.pve_version(text), proxmox.qemu_version(text), proxmox.running_kernel(text)) == (pve, qemu, kernel)


@pytest.mark.parametrize(
    "rows",
    [
        # cut at a fixed column by a terminal
        [
            "args: -set device.hostpci0.x-nv-gpudirect-clique=0 -set device.hostpci1.x-nv-gpu",
            "direct-clique=0",
        ],
        # broken between words by a mail program
        ["args: -set device.hostpci0.x-nv-gpudirect-clique=0", "  -set device.hostpci1.x-nv-gpudirect-clique=0"],
    ],
)
def test_a_wrapped_line_is_one_setting(rows):
    found = proxmox.conf("1", "\n".join([*rows, "cpu: host", "[snap]", "args: -old"]), "x")

    assert found.settings == {
        "args": "-set device.hostpci0.x-nv-gpudirect-clique=0 -set device.hostpci1.x-nv-gpudirect-clique=0",
        "cpu": "host",
    }


def test_a_wrapped_comment_never_becomes_a_setting():
    text = f"#{'a' * 79}\nof the description\n#b\ncpu: host\n"
    found = proxmox.conf("1", text, "x")

    assert (dict(found.settings), found.description) == ({"cpu": "host"}, f"{'a' * 79}of the description\nb")


@pytest.mark.parametrize(
    ("line", "paths", "options"),
    [
        ("01:00", ("01:00",), {}),
        ("host=1234:f0:43.2,pcie=1", ("1234:f0:43.2",), {"pcie": "1"}),
        ("pcie=1,host=01:00.0", ("01:00.0",), {"pcie": "1"}),
        ("01:00.0;01:00.1,rombar=off,driver=keep", ("01:00.0", "01:00.1"), {"rombar": "off", "driver": "keep"}),
    ],
)
def test_every_form_of_a_passed_device(line, paths, options):
    (device,) = proxmox.conf("1", f"hostpci15:{line}\n", "x").hostpci

    assert (device.index, device.name, device.paths, dict(device.options)) == (15, "hostpci15", paths, options)


def test_the_collector_tells_when_a_process_started():
    text = "# ==> vm 101 pid 9 started 1700000000 changed 1700000500 cpus 0-31 <==\n/usr/bin/kvm\n-id\n101\n"
    found = proxmox.processes(text)["101"]

    assert (found.started_at, found.changed_at, found.cpus) == (1700000000, 1700000500, "0-31")
    assert found.arguments == ("/usr/bin/kvm", "-id", "101")


def test_a_command_line_with_one_argument_a_line_is_read():
    assert proxmox.processes("/usr/bin/kvm\n-id\n101\n-cpu\nhost\n")["101"].arguments[-1] == "host"


def test_a_libvirt_process_is_known_by_its_domain():
    row = "libvirt+ 7 1 0 /usr/bin/qemu-system-x86_64 -name guest=llm1,debug-threads=on -cpu host"
    assert proxmox.command_lines(row)["llm1"][-2:] == ("-cpu", "host")


def test_reservations_name_the_vm_that_holds_a_device():
    text = "0000:01:00.0 101 pid:4242\n0000:02:00.0 102 time:1700000000\nnonsense\n"
    assert proxmox.reservations(text) == {"0000:01:00.0": "101", "0000:02:00.0": "102"}


def test_lines_of_one_mapping_are_alternatives():
    text = "pool\n\tmap id=10de:2BB5,iommugroup=7,node=n,path=0000:01:00.0\n\tmap iommugroup=-1,node=n,path=02:00\n"
    first, second = proxmox.mapping_claims(text, ())

    assert (first.bdfs, first.vendor_device, first.iommu_group) == (("0000:01:00.0",), "10de:2bb5", 7)
    assert (second.bdfs, second.vendor_device, second.iommu_group) == (("0000:02:00",), "", None)


SHOWCMD = """/usr/bin/kvm \\
  -id 101 \\
  -name 'llm,debug-threads=on' \\
  -cpu 'host,+kvm_pv_eoi' \\
  -device 'vfio-pci,host=0000:01:00.0,id=hostpci0,bus=ich9-pcie-port-1,addr=0x0'
"""
CONF = "cpu: host\nhostpci0: 0000:01:00.0,pcie=1\n"


def test_the_next_start_is_never_taken_for_what_runs(tmp_path):
    (tmp_path / "101.conf").write_text(CONF)
    (tmp_path / "next.txt").write_text(SHOWCMD)
    (tmp_path / "again.txt").write_text(f"root@n:~# qm showcmd 101\n{' '.join(SHOWCMD.replace(chr(92), '').split())}\n")
    (evidence,) = intake.read([tmp_path])
    config = snapshot.build(evidence).vm.configs.value["101"]

    assert config.running_arguments.value is None
    assert config.planned_arguments.value[3:5] == ("-name", "llm,debug-threads=on")


def test_a_process_list_is_what_runs(tmp_path):
    (tmp_path / "101.conf").write_text(CONF)
    (tmp_path / "ps.txt").write_text(
        "root 42 99 ? Sl /usr/bin/kvm -id 101 -name llm,debug-threads=on -cpu host,kvm=off\n"
    )
    (evidence,) = intake.read([tmp_path])
    config = snapshot.build(evidence).vm.configs.value["101"]

    assert config.running_arguments.value[-1] == "host,kvm=off"


def test_a_pending_list_alone_is_a_configuration_with_what_waits(tmp_path):
    (tmp_path / "report.txt").write_text(
        "root@n:~# qm pending 101\ncur cpu: host,hidden=1\nnew cpu: host\ncur hostpci0: 0000:01:00.0,pcie=1\n"
        "cur memory: 65536\ndel balloon: 512\n"
    )
    (evidence,) = intake.read([tmp_path / "report.txt"])
    config = snapshot.build(evidence).vm.configs.value["101"]

    assert (config.settings["cpu"], dict(config.pending), config.pending_deletes) == (
        "host,hidden=1",
        {"cpu": "host"},
        ("balloon",),
    )
    assert config.hostpci[0].line == "cur hostpci0: 0000:01:00.0,pcie=1"


def test_a_process_list_of_one_vm_does_not_stop_the_others(built):
    made = built({"pve.conf.101": CONF, "pve.conf.102": CONF, "pve.running": "/usr/bin/kvm -id 101 -cpu host\n"})
    assert made.vm.configs.value["102"].running.value is None

    whole = built({"pve.conf.101": CONF, "pve.conf.102": CONF, "pve.running": "# ==> vm 101 pid 1 <==\n-id\n101\n"})
    assert whole.vm.configs.value["102"].running.value is False
