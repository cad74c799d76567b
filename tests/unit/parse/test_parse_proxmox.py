"""Proxmox VE: configurations, pending changes, running processes, mappings, CPU models, versions."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import proxmox
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
    assert proxmox.mappings(proxmox.mapping_claims(MAPPING, ("pve2",))) == {"gpu0": ("0000:81:00.0", "0000:81:00.1"), "gpu1": ()}


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
