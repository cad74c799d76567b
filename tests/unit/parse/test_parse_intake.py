"""What people give: folders, fleets, loose files, pastes with prompts and fences, and bad input."""

from __future__ import annotations

import os
import time

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core import evidence
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.evidence import Evidence, EvidenceSet
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.recognise import recognise

TOPO = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nGPU1\tPHB\t X \t0-7\n"
P2P = " \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n"


@pytest.mark.parametrize(
    ("name", "text", "source"),
    [
        ("a.txt", TOPO, "nvidia_smi.topo_m"),
        ("topo-p2p-w.txt", P2P, "nvidia_smi.topo_p2p_w"),
        ("p2p_rw.txt", P2P, "nvidia_smi.topo_p2p_rw"),
        ("a.txt", "GPU 0: NVIDIA A30 (UUID: GPU-1)\n", "nvidia_smi.L"),
        ("a.txt", "GPU 0: NVIDIA A30 (UUID: GPU-1)\n\t Link 0: 25 GB/s\n", "nvidia_smi.nvlink_s"),
        ("a.txt", "name, pci.bus_id, memory.total [MiB]\nA30, 00000000:01:00.0, 5 MiB\n", "nvidia_smi.query_gpu"),
        ("a.txt", "Failed to initialize NVML: Unknown Error\n", "nvidia_smi"),
        ("a.txt", "[    1.165960] pcieport 0000:00:1d.4: BAR 15: no space\n", "kernel_log"),
        ("a.txt", "Sep 19 16:18:02 host kernel: [68183.6] pcieport 0000:00:03.1: AER: x\n", "kernel_log"),
        ("a.txt", "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service\n", "kernel_log"),
        ("a.txt", "kvm: -device vfio-pci: vfio 0000:01:00.0: group 1 is not viable\n", "qemu.log"),
        ("a.txt", "01:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)\n", "lspci.vvv"),
        ("a.txt", "-+-[0000:00]-+-00.0\n |           +-01.1-[01]----00.0\n", "lspci.t"),
        ("a.txt", "IOMMU group 7\n\t00:1b.0 Audio device: X\n", "iommu.groups"),
        ("408.conf", "machine: q35\nmemory: 8192\nhostpci0: 01:00,pcie=1\n", "pve.conf.408"),
        ("right.conf", "cpu: host\nhostpci0: 0000:81:00.0,pcie=1\n", "pve.conf.right"),
        ("vfio.conf", "options vfio-pci ids=10de:21c4\n", "modprobe.d"),
        ("etc-modules-load.d-vfio.conf", "vfio\nvfio_pci\n", "modules_load.d"),
        ("nccl.conf", "# x\nNCCL_P2P_LEVEL=PHB\n", "etc.nccl.conf"),
        ("proc-cmdline.txt", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro\n", "proc.cmdline"),
        ("etc-kernel-cmdline.txt", "root=ZFS=rpool/ROOT/pve-1 boot=zfs\n", "etc.kernel.cmdline"),
        ("grub", 'GRUB_CMDLINE_LINUX_DEFAULT="quiet"\n', "etc.default.grub"),
        ("a.txt", "nvidia/595.58.03, 6.17.13-2-pve, x86_64: installed\n", "dkms.status"),
        ("a.txt", "Error! Your kernel headers for kernel 6.2.16-3-pve cannot be found.\n", "dkms.log"),
        ("a.txt", "Reading package lists... Done\nE: Unable to locate package x\n", "apt.output"),
        ("history.log", "Start-Date: 2026-01-01  00:00:00\n", "apt.history"),
        ("a.txt", "SecureBoot enabled\n", "mokutil.sb_state"),
        ("detect-virt.txt", "kvm\n", "detect_virt.vm"),
        ("a.txt", "h:1:2 [0] NCCL INFO Bootstrap: Using eth0\n", "nccl.log"),
        ("a.txt", "ERROR 07-28 15:07:22 [core.py:632] RuntimeError: CUDA error\n", "engine.log"),
        ("a.txt", "Unidirectional P2P=Disabled Bandwidth Matrix (GB/s)\n", "p2p_bandwidth_latency"),
        ("a.txt", "nvbandwidth Version: v0.8\n", "nvbandwidth"),
        ("a.txt", "# nThread 1 nGpus 2 minBytes 8\n", "nccl_tests"),
        ("a.txt", 'PRETTY_NAME="Debian GNU/Linux 13"\nID=debian\n', "os_release"),
        ("a.txt", "proxmox-ve: 9.1.0 (running kernel: 6.17.13-2-pve)\n", "pve.version"),
    ],
)
def test_each_output_is_recognised(name, text, source):
    assert [one.source for one in recognise(text, name)] == [source]


@pytest.mark.parametrize("prompt", ["root@node1:~# ", "[user@node1 ~]$ ", "$ ", "# ", "user@node1:/tmp$ sudo "])
def test_a_prompt_names_the_command(prompt):
    (one,) = recognise(f"{prompt}nvidia-smi topo -p2p r\n{P2P}", "paste.txt")

    assert (one.source, one.segment.command) == ("nvidia_smi.topo_p2p_r", "nvidia-smi topo -p2p r")


def test_several_outputs_in_one_paste_are_told_apart():
    text = (
        f"$ nvidia-smi topo -m\n{TOPO}\n$ nvidia-smi topo -p2p r\n{P2P}\n"
        f"$ systemd-detect-virt\nkvm\n$ cat /proc/cmdline\nquiet splash\n"
    )

    assert [one.source for one in recognise(text, "")] == [
        "nvidia_smi.topo_m",
        "nvidia_smi.topo_p2p_r",
        "detect_virt.vm",
        "proc.cmdline",
    ]


def test_outputs_behind_each_other_without_a_prompt_are_both_read():
    text = f"  Operating System: Debian GNU/Linux 13\n    Kernel: Linux 6.12.1-amd64\n| NVIDIA-SMI 590.44.01 |\n{TOPO}"

    assert {one.source for one in recognise(text, "a.txt")} == {"nvidia_smi.topo_m", "nvidia_smi", "hostnamectl"}


def test_a_quotation_in_a_log_is_no_output():
    log = "[    1.165960] systemd[1]: | NVIDIA-SMI 590.44.01 | GPU 0: X (UUID: GPU-1)\n"
    engine = "INFO 07-28 15:07:22 [core.py:1] | NVIDIA-SMI 590.44.01 |\n"

    assert [one.source for one in recognise(log, "a.txt")] == ["kernel_log"]
    assert [one.source for one in recognise(engine, "a.txt")] == ["engine.log"]


def test_prose_around_markdown_fences_is_dropped():
    text = (
        f"My GPUs with NVRM: Xid (PCI:0000:01:00): 79 in prose\n\n```\n"
        f"{TOPO}```\n\nand\n\n```console\n$ nvidia-smi topo -p2p w\n{P2P}```\n"
    )

    assert [one.source for one in recognise(text, "issue.md")] == ["nvidia_smi.topo_m", "nvidia_smi.topo_p2p_w"]


def test_a_comment_is_no_prompt():
    (one,) = recognise("# If you change this file, run update-grub\n# cat is not run here\nGRUB_DEFAULT=0\n", "grub")

    assert one.source == "etc.default.grub"


def test_a_matrix_without_its_mode_says_what_to_do():
    (one,) = recognise(P2P, "matrix.txt")

    assert (one.source, "topo -p2p r" in one.reason) == ("", True)


@pytest.fixture
def folder(tmp_path):
    def make(name, files):
        place = tmp_path / name
        place.mkdir(parents=True)
        for file, text in files.items():
            (place / file).write_text(text, encoding="utf-8")
        return place

    return make


def test_a_folder_of_loose_files_is_one_host(folder):
    place = folder(
        "node1", {"topo.txt": TOPO, "README.md": "nvidia-smi topo -m", "case.yml": "NVRM: x", "notes.txt": "hello\n"}
    )

    (host,) = intake.read([place])

    assert (host.host, set(host.entries)) == ("node1", {"nvidia_smi.topo_m"})
    assert host.unrecognised == ("notes.txt: no output that Peerlane knows",)


def test_two_files_of_one_source_are_both_kept(folder):
    log = "[    1.165960] pci: {}\n"
    place = folder("node1", {"dmesg.txt": log.format(1), "guest dmesg.txt": log.format(2)})

    (host,) = intake.read([place])

    assert list(host.entries) == ["kernel_log", "kernel_log@guest-dmesg"]
    assert [entry.source for entry in host] == list(host.entries)


def test_a_snapshot_folder_and_a_fleet(folder, tmp_path):
    for name in ("a", "b"):
        evidence.save(
            EvidenceSet(name, entries={"uname": Evidence("uname", "Linux a 6.1.0 x\n")}), tmp_path / "fleet" / name
        )

    assert [host.host for host in intake.read([tmp_path / "fleet"])] == ["a", "b"]
    assert [host.host for host in intake.read([tmp_path / "fleet" / "b" / "manifest.json"])] == ["b"]


def test_single_files_make_one_host_named_after_their_folder(folder):
    place = folder("node7", {"topo.txt": TOPO, "virt.txt": "x", "list.txt": "GPU 0: NVIDIA A30 (UUID: GPU-1)\n"})

    (host,) = intake.read([place / "topo.txt", place / "list.txt"])
    (alone,) = intake.read([place / "topo.txt"])

    assert (host.host, set(host.entries)) == ("node7", {"nvidia_smi.topo_m", "nvidia_smi.L"})
    assert alone.host == "topo"


def test_standard_input_is_a_host():
    (host,) = intake.read([], stdin=TOPO)

    assert (host.host, set(host.entries)) == ("stdin", {"nvidia_smi.topo_m"})


def test_utf16_of_a_windows_clipboard_is_read(tmp_path):
    (tmp_path / "topo.txt").write_bytes(TOPO.encode("utf-16"))

    (host,) = intake.read([tmp_path / "topo.txt"])

    assert set(host.entries) == {"nvidia_smi.topo_m"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda place: [place / "missing"], "does not exist"),
        (lambda place: [place / "empty"], "is an empty folder"),
        (lambda place: [place / "pipe"], "neither a file nor a folder"),
        (lambda place: [place / "notes.txt"], "holds nothing that Peerlane knows"),
        (lambda place: [place / "junk.bin"], "is binary"),
        (lambda place: [place / "logs.tar.gz"], "is cut or broken"),
        (lambda place: [], "no input"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, make, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello\n", encoding="utf-8")
    (tmp_path / "junk.bin").write_bytes(b"\x00\x01\x02" * 100)
    (tmp_path / "logs.tar.gz").write_bytes(b"\x1f\x8b\x08\x00" * 10)
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(InputError, match=words) as error:
        intake.read(make(tmp_path))

    assert "\n" not in error.value.line()


def test_empty_standard_input_is_refused():
    with pytest.raises(InputError, match="standard input"):
        intake.read([], stdin=" \n")


def test_a_bad_file_beside_good_ones_is_named_and_the_rest_is_read(folder):
    place = folder("node1", {"topo.txt": TOPO, "empty.txt": ""})
    (place / "junk.bin").write_bytes(b"\x00" * 10)
    os.mkfifo(place / "pipe")
    (place / "out").symlink_to("/etc/hostname")
    problems = []

    (host,) = intake.read([place, place / "missing"], problems=problems)

    assert set(host.entries) == {"nvidia_smi.topo_m"}
    assert host.unrecognised == ("empty.txt: is empty", "junk.bin: is binary")
    assert [line.rpartition("/")[2].split(";")[0] for line in problems] == [
        "out: is a link that leaves the folder, and is not followed",
        "pipe: is no regular file, and is not read",
        "missing: does not exist",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="changes to another user")
def test_a_file_without_the_right_to_read_it_is_named(folder, as_another_user):
    place = folder("node1", {"topo.txt": TOPO, "secret.txt": TOPO})
    (place / "secret.txt").chmod(0)

    def say():
        (host,) = intake.read([place])
        return "\n".join([*host.entries, *host.unrecognised])

    assert as_another_user(place, say).split("\n") == [
        "nvidia_smi.topo_m",
        "secret.txt: cannot be read: Permission denied",
    ]


def test_two_hosts_of_one_name_are_both_judged_and_told_apart(folder):
    first, second = folder("x/node1", {"a.txt": TOPO}), folder("y/node1", {"a.txt": TOPO})
    problems = []

    hosts = intake.read([first, second], problems=problems)

    assert [host.host for host in hosts] == ["node1", "node1-2"]
    assert problems == [
        f"{second}: is a second host named 'node1' (the first: {first}); shown as 'node1-2'",
    ]


def test_a_large_log_is_judged_by_its_head_and_tail(tmp_path, monkeypatch):
    line = "[    1.165960] pci: {}\n"
    text = "".join(line.format(number) for number in range(400))
    (tmp_path / "dmesg.txt").write_text(text)
    monkeypatch.setattr(intake, "MAX_TEXT", 4000)
    monkeypatch.setattr(intake, "_LOG_HEAD", 1000)

    (host,) = intake.read([tmp_path / "dmesg.txt"])
    entry = host.entries["kernel_log"]
    rows = entry.stdout.splitlines()

    assert entry.truncated
    assert rows[0] == line.format(0).strip()
    assert rows[-1] == line.format(399).strip()
    assert 3000 < len(entry.stdout) <= 4000
    assert all(row.startswith("[    1.165960] pci: ") for row in rows)
    assert "dmesg.txt: is large" in host.unrecognised[0]


def test_a_file_of_hundreds_of_megabytes_is_bounded(tmp_path):
    place = tmp_path / "dmesg.txt"
    block = b"".join(b"[%12.6f] pci 0000:01:00.0: message %d\n" % (at, at) for at in range(20000))
    with place.open("wb") as stream:
        stream.write(b"[    0.000000] Linux version 6.8.0-1-generic (builder@x)\n")
        while stream.tell() < 200 * 1024 * 1024:
            stream.write(block)
        stream.write(b"[99999.000001] the very last line\n")
    started = time.monotonic()

    (host,) = intake.read([place])

    assert time.monotonic() - started < 20
    text = host.entries["kernel_log"].stdout
    assert len(text) <= intake.MAX_TEXT
    assert "Linux version 6.8.0-1-generic" in text
    assert text.endswith("the very last line\n")
    assert "MiB in the middle" in host.unrecognised[0]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("BOOT_IMAGE=/vmlinuz root=/dev/sda1 iommu=p", {}),
        ("machine: q35\nmemory: 8192\nhostpci0: 01:00,pci", {"pve.conf.101": "machine: q35\nmemory: 8192\n"}),
        # broken at 80 columns: the last whole line goes on in the one that was cut
        (f"machine: q35\nmemory: 8192\nargs: {'x' * 74}\nhalf of", {"pve.conf.101": "machine: q35\nmemory: 8192\n"}),
        ('{"nvbandwidth": {"git_version": "v0.8"}}', None),
    ],
)
def test_half_a_line_at_the_end_is_not_judged_and_said(tmp_path, text, kept):
    (tmp_path / "101.conf").write_text(text)
    (tmp_path / "topo.txt").write_text(TOPO)

    (host,) = intake.read([tmp_path])

    if kept is None:
        assert not any("no line end" in line for line in host.unrecognised)
        return
    assert {source: entry.stdout for source, entry in host.entries.items() if source != "nvidia_smi.topo_m"} == kept
    assert "101.conf: its last line has no line end" in host.unrecognised[0]


def test_a_folder_of_folders_keeps_each_hosts_nested_files_together(folder):
    place = folder("fleet", {})
    folder("fleet/a", {"topo.txt": TOPO})
    folder("fleet/a/more", {"list.txt": "GPU 0: NVIDIA A30 (UUID: GPU-1)\n"})
    folder("fleet/b/proc", {"cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro\n"})
    folder("fleet/c", {})
    problems = []

    hosts = intake.read([place], problems=problems)

    assert {host.host: set(host.entries) for host in hosts} == {
        "a": {"nvidia_smi.topo_m", "nvidia_smi.L"},
        "b": {"proc.cmdline"},
    }
    assert [line for line in problems if "is an empty folder" in line] == problems
    assert len(problems) == 1


REPORT = """\
Since the upgrade P2P is broken. My `dmesg` says NVRM: Xid (PCI:0000:01:00): 79 by the way.

<details>
<summary>topology</summary>

~~~text
$ nvidia-smi topo -m
{topo}
$ systemd-detect-virt
kvm
~~~

</details>

Output of `nvidia-smi topo -p2p w`:

> ```
> {p2p}> ```

Something else:

````
```
free words
```
````

And the config of the VM (`cat /etc/pve/qemu-server/101.conf`), cut off:

```ini
machine: q35
memory: 8192
hostpci0: 01:00,pcie=1
"""


def test_a_bug_report_in_markdown_is_read_block_by_block(tmp_path):
    report = REPORT.format(topo=TOPO, p2p=P2P.replace("\n", "\n> ").removesuffix("> "))
    for name, text in (("a.md", report), ("b.md", report.replace("\n", "\r\n"))):
        (tmp_path / name).write_text(text, newline="")
        host, guest = intake.read([tmp_path / name])
        assert list(guest.entries) == ["nvidia_smi.topo_m", "detect_virt.vm", "nvidia_smi.topo_p2p_w"]
        assert list(host.entries) == ["pve.conf.101"]
        line = report.splitlines().index("````") + 2
        assert host.unrecognised == (f"{name}:{line}: no output that Peerlane knows",)


def test_a_forum_paste_with_code_tags_is_read(tmp_path):
    text = (
        f"Hello all\n[code]\n{TOPO}[/code]\nand\n<pre><code>$ cat /etc/nccl.conf\n# a &amp; b\nNCCL_P2P_LEVEL=SYS\n"
        f"</code></pre>\nbye\n"
    )

    (host,) = intake.read([], stdin=text)

    assert set(host.entries) == {"nvidia_smi.topo_m", "etc.nccl.conf"}
    assert "a & b" in host.entries["etc.nccl.conf"].stdout
