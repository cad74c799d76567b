"""libvirt: domain XML in the words of a Proxmox configuration."""

from __future__ import annotations

import re

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake, libvirt, snapshot
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

CLIQUE = "x-nv-gpudirect-clique"


@pytest.fixture
def markup(recorded):
    return recorded("libvirt.llm1.xml")


def read(text):
    return libvirt.domain(text, "libvirt.domains")


def small(inside: str) -> str:
    return f"<domain type='kvm'><name>g</name>{inside}</domain>"


def setting(key: str, inside: str) -> str | None:
    return read(small(inside)).settings.get(key)


def test_a_domain_comes_in_the_words_of_a_vm(markup):
    config = read(markup)

    assert (config.vmid, config.manager, config.whole) == ("llm1", "libvirt", True)
    assert dict(config.settings) == {
        "cpu": "host,phys-bits=42,hidden=1,hv-vendor-id=somebody",
        "machine": "pc-q35-9.2,viommu=intel",
        "bios": "ovmf",
        "memory": "131072",
        "balloon": "65536",
        "cores": "16",
        "affinity": "8-15,16",
        "hugepages": "1024",
        "smbios1": "uuid=CCCCCCCC-0000-0000-0000-000000000301",
        "numa": "1",
        "numa0": "cpus=0-7,hostnodes=0-1,policy=bind",
        "numa1": "cpus=8-11;12-15,hostnodes=1,policy=preferred",
        "net0": "virtio=52:54:00:AB:CD:01",
        "efidisk0": "nvram,pre-enrolled-keys=1",
        "args": "-fw_cfg name=opt/ovmf/X-PciMmio64Mb,string=262144 "
        f"-set device.hostdev1.{CLIQUE}=0 -set device.hostdev2.{CLIQUE}=3",
    }


def test_passed_devices_are_numbered_as_qemu_numbers_them(markup):
    first, second, third = read(markup).hostpci

    assert (first.name, first.paths, first.options) == ("hostdev1", ("0000:41:00.0",), {"pcie": "1", "rombar": "0"})
    assert (second.name, second.paths, second.options) == ("ua-right", ("0001:c1:00.0",), {"pcie": "0"})
    assert (third.name, third.paths, third.options) == ("hostdev3", ("0000:42:00.0",), {})


def test_evidence_is_the_xml_itself(markup):
    lines = read(markup).lines

    assert '<hidden state="on" />' in lines["cpu"]
    assert lines["machine"].startswith('<type arch="x86_64" machine="pc-q35-9.2">hvm</type>\n<iommu model="intel"')
    assert '<qemu:device alias="ua-right">' in lines["args"]
    assert "xmlns" not in lines["args"]


@pytest.mark.parametrize(
    ("key", "inside", "value"),
    [
        ("cpu", "<cpu mode='host-model'/>", "host-model"),
        ("cpu", "<cpu mode='maximum'/>", "host"),
        ("cpu", "<cpu mode='custom'><model>EPYC-Milan</model></cpu>", "EPYC-Milan"),
        ("cpu", "<cpu><model>EPYC</model><maxphysaddr mode='emulate' bits='46'/></cpu>", "EPYC,phys-bits=46"),
        ("cpu", "<cpu mode='host-passthrough'><maxphysaddr mode='passthrough'/></cpu>", "host,phys-bits=host"),
        ("cpu", "<features><kvm><hidden state='on'/></kvm></features>", "qemu64,hidden=1"),
        ("cpu", "<features><kvm><hidden state='off'/></kvm></features>", None),
        ("cpu", "", None),
        ("bios", "<os><loader type='pflash'>/x/OVMF_CODE.fd</loader></os>", "ovmf"),
        ("bios", "<os><loader type='rom'>/x/bios.bin</loader></os>", "seabios"),
        ("efidisk0", "<os firmware='efi'/>", "nvram"),
        ("efidisk0", "<os><nvram template='/x/OVMF_VARS.secboot.fd'/></os>", "nvram,pre-enrolled-keys=1"),
        (
            "efidisk0",
            "<os firmware='efi'><firmware><feature enabled='no' name='enrolled-keys'/></firmware></os>",
            "nvram",
        ),
        ("memory", "<memory>2097152</memory>", "2048"),
        ("memory", "<memory unit='GiB'>3</memory>", "3072"),
        ("memory", "<memory unit='parsec'>3</memory>", None),
        ("memory", "<memory>many</memory>", None),
        ("balloon", "<devices><memballoon model='none'/></devices>", "0"),
        ("hugepages", "<memoryBacking><hugepages/></memoryBacking>", "any"),
        ("affinity", "<vcpu cpuset='4-7'>4</vcpu>", "4-7"),
        ("numa0", "<numatune><memory mode='strict' nodeset='1'/></numatune>", "cpus=,hostnodes=1,policy=bind"),
    ],
)
def test_elements_have_one_meaning(key, inside, value):
    assert setting(key, inside) == value


def test_a_fragment_with_an_undeclared_prefix_is_read():
    config = read(small("<qemu:commandline><qemu:arg value='-set'/></qemu:commandline>"))

    assert config.settings["args"] == "-set"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no complete <domain>"),
        ("<domain type='kvm'><name>g</name>", "no complete <domain>"),
        ("<domain type='kvm'><os></domain>", "not well-formed"),
        (small("").replace("<name>g</name>", ""), "without a name"),
        ("<!DOCTYPE d [<!ENTITY e 'x'>]>" + small("&e;"), "document type or entities"),
        ("<!doctype d SYSTEM 'file:///etc/hostname'>" + small(""), "document type or entities"),
        (small("<a>" * 900 + "</a>" * 900 + "<os>" + "<a>" * 5000 + "</a>" * 5000 + "</os>"), "nested"),
        (small("x" * (1 << 20)), "too long"),
    ],
    ids=["empty", "cut", "broken", "nameless", "entity", "external", "deep", "long"],
)
def test_what_is_no_domain_is_refused_with_the_reason(text, why):
    with pytest.raises(RefusedError, match=why):
        read(text)


def test_an_element_with_odd_numbers_is_left_out():
    device = "<devices><hostdev type='pci'><source><address bus='zz' slot='0'/></source></hostdev></devices>"
    assert read(small(device)).hostpci == ()


def test_files_and_processes_of_a_libvirt_host_become_vms(markup, built):
    running = "# ==> vm llm1 pid 77 started 1700000000 cpus 0-31 <==\n/usr/bin/qemu-system-x86_64\n-cpu\nhost,kvm=off\n"
    other = small("").replace("<name>g<", "<name>other<")
    files = f"# ==> /etc/libvirt/qemu/llm1.xml <==\n{markup}# ==> /etc/libvirt/qemu/other.xml <==\n{other}\n"
    made = built({"libvirt.domains": files, "libvirt.running": running})

    assert made.role.value == "hypervisor"
    one, two = made.vm.configs.value["llm1"], made.vm.configs.value["other"]
    assert (one.running.value, one.started_at.value, one.running_cpus.value) == (True, 1700000000, "0-31")
    assert (two.running.value, one.running_arguments.value[1:]) == (False, ("-cpu", "host,kvm=off"))


def test_libvirt_without_passed_devices_makes_no_hypervisor(built):
    made = built({"libvirt.domains": small(""), "detect_virt.vm": "none\n"})
    assert made.role.value == "bare_metal"


def test_a_pasted_domain_is_known_by_its_content_and_judged_in_libvirts_words(tmp_path, markup):
    (tmp_path / "dump.txt").write_text(f"$ virsh dumpxml llm1\n{markup}")
    (evidence,) = intake.read([tmp_path / "dump.txt"])
    assert list(evidence.entries) == ["libvirt.domains"]

    found = engine.judge({"h": snapshot.build(evidence)})["h"]
    bad = {one.rule: one for one in found if one.bad and one.subject == "vm llm1"}
    assert {"B1", "B16", "B17", "D3"} <= bad.keys()
    for one in bad.values():
        steps = " ".join(one.fix.steps)
        assert not re.search(r"\bqm (?:set|shutdown)|/etc/pve", steps), (one.rule, steps)
    hidden = " ".join(bad["B1"].fix.steps)
    assert "remove <hidden state='on'/>" in hidden
    assert "virsh edit llm1" in hidden
    assert "alias='ua-right'" in " ".join(bad["D3"].fix.steps)
    assert "hostdev3" in bad["D3"].title


@pytest.mark.parametrize("changed", ["\r\n", "indent", "quote"])
def test_a_pasted_domain_survives_copying(markup, changed):
    rows = markup.split("\n")
    text = {
        "\r\n": "\r\n".join(rows),
        "indent": "\n".join(f"    {row}" for row in rows),
        "quote": "\n".join(f"> {row}" for row in rows),
    }[changed]
    assert read(text).settings == read(markup).settings


def test_every_cut_of_a_domain_is_refused_without_a_verdict(markup):
    for end in range(0, len(markup) - 10, 97):
        with pytest.raises(RefusedError):
            read(markup[:end])
