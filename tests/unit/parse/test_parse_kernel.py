"""The kernel: command lines, GRUB's file, boot loaders, logs in every style of stamp, Xids."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import kernel, kernel_log
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse.text import RefusedError


def test_a_command_line_keeps_order_repetition_and_quotes():
    line = kernel.command_line(
        'BOOT_IMAGE=(hd9,gpt2)/vmlinuz-6.13.9 root=UUID=aa-bb ro crashkernel=1G-2G:192M,2G-:256M dyndbg="file a b +p" '
        "iommu=off video=vesafb:off video=efifb:off iommu=pt\n"
    )

    assert line.last("BOOT_IMAGE") == "(hd9,gpt2)/vmlinuz-6.13.9"
    assert (line.all("iommu"), line.last("iommu")) == (("off", "pt"), "pt")
    assert line.all("video") == ("vesafb:off", "efifb:off")
    assert (line.has("ro"), line.last("ro"), line.last("dyndbg"), line.last("root")) == (
        True,
        None,
        "file a b +p",
        "UUID=aa-bb",
    )


def test_an_empty_command_line_is_refused():
    with pytest.raises(RefusedError):
        kernel.command_line(" \n")


GRUB = """# /etc/default/grub
GRUB_DEFAULT="saved"
GRUB_CMDLINE_LINUX="console=ttyS0" # serial
GRUB_CMDLINE_LINUX_DEFAULT='quiet iommu=on'
#GRUB_CMDLINE_LINUX_DEFAULT="never"
GRUB_CMDLINE_LINUX_DEFAULT="quiet \\
 iommu=pt dyndbg=\\"a b\\""
"""


def test_grub_takes_the_last_assignment_as_the_shell_does():
    grub = kernel.grub(GRUB)

    assert grub.kernel is not None
    assert [key for key, _ in grub.kernel.tokens] == ["console", "quiet", "iommu", "dyndbg"]
    assert (grub.kernel.last("iommu"), grub.settings["GRUB_DEFAULT"]) == ("pt", "saved")


def test_grub_drop_ins_extend_and_backups_do_not_count():
    text = (
        '# ==> /etc/default/grub <==\nGRUB_CMDLINE_LINUX="iommu=pt"\n'
        '# ==> /etc/default/grub.bak <==\nGRUB_CMDLINE_LINUX="iommu=off"\n'
        "# ==> /etc/default/grub.d/50-x.cfg <==\n"
        'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX quiet"\nGRUB_CMDLINE_LINUX+=" nomodeset"\n'
    )

    grub = kernel.grub(text)

    assert grub.kernel is not None
    assert grub.kernel.tokens == (("iommu", "pt"), ("quiet", None), ("nomodeset", None))


def test_grub_without_kernel_options_says_none_and_with_empty_ones_says_that():
    assert kernel.grub("GRUB_DEFAULT=0\n").kernel is None
    empty = kernel.grub('GRUB_CMDLINE_LINUX=""\nGRUB_CMDLINE_LINUX_DEFAULT=""\n').kernel
    assert empty is not None
    assert empty.tokens == ()
    with pytest.raises(RefusedError):
        kernel.grub("# nothing\n")


@pytest.mark.parametrize(
    ("line", "boot", "status", "loader"),
    [
        ("BOOT_IMAGE=/boot/vmlinuz-6.8 root=/dev/sda1", "", "", "grub"),
        ("initrd=\\EFI\\proxmox\\6.8.12-1-pve\\initrd.img root=ZFS=rpool/ROOT/pve-1 boot=zfs", "", "", "systemd-boot"),
        ("root=ZFS=rpool/ROOT/pve-1 boot=zfs", "", "", "systemd-boot"),
        ("root=/dev/vda1 ro", "efi: yes\nloader_info: systemd-boot 252.5\n", "", "systemd-boot"),
        ("root=/dev/vda1 ro", "efi: yes\nloader_info: GRUB 2.12\n", "", "grub"),
        ("root=/dev/vda1 ro", "", "AAAA-BBBB is configured with: uefi (versions: 6.8.12-1-pve)\n", "systemd-boot"),
        ("root=/dev/vda1 ro", "", "AAAA-BBBB is configured with: grub\n", "grub"),
        (
            "root=/dev/vda1 ro",
            "",
            "System currently booted with legacy bios\n"
            "AAAA-BBBB is configured with: uefi (versions: 6.8), grub (versions: 6.8)\n",
            "grub",
        ),
        ("root=/dev/vda1 ro", "", "AAAA-BBBB is configured with: uefi (versions: 6.8), grub (versions: 6.8)\n", None),
        ("root=/dev/vda1 ro", "efi: yes\n", "", None),
    ],
)
def test_the_boot_loader_is_deduced_or_unknown(line, boot, status, loader):
    found = kernel.boot_loader(kernel.command_line(line), boot, status)

    assert (found[0] if found else None) == loader


@pytest.mark.parametrize(
    ("row", "stamp", "text"),
    [
        ("[   12.345678] pci 0000:01:00.0: x", "12.345678", "pci 0000:01:00.0: x"),
        ("[   12.345678] [ T123] pci: x", "12.345678", "pci: x"),
        ("[Fri Aug 30 11:43:09 2024] NVRM: x", "Fri Aug 30 11:43:09 2024", "NVRM: x"),
        ("<4>[   12.3] x", "12.3", "x"),
        ("kern  :warn  : [   12.3] x", "12.3", "x"),
        ("2026-02-01T12:00:00+0100 host1 kernel: NVRM: x", "2026-02-01T12:00:00+0100", "NVRM: x"),
        (
            "2026-02-01T12:00:00,123456+01:00 pcieport 0000:00:01.0: AER: x",
            "2026-02-01T12:00:00,123456+01:00",
            "pcieport 0000:00:01.0: AER: x",
        ),
        ("Aug  3 11:43:09 host1 kernel: [  9.5] NVRM: x", "Aug  3 11:43:09", "NVRM: x"),
        ("Aug 30 11:43:09 host1 nv-fabricmanager[77]: x", "Aug 30 11:43:09", "nv-fabricmanager: x"),
        ("NVRM: (PCI ID: 10de:26b5) installed", "", "NVRM: (PCI ID: 10de:26b5) installed"),
    ],
)
def test_every_style_of_stamp_is_taken_off(row, stamp, text):
    (line,) = kernel_log.parse(row).lines

    assert (line.stamp, line.text) == (stamp, text)


@pytest.mark.parametrize(
    ("row", "pci", "code", "pid", "process"),
    [
        ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", "0000:01:00", 79, None, ""),
        ("NVRM: Xid (0000:0A:00): 3, old", "0000:0a:00", 3, None, ""),
        ("NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics", "0000:cb:00", 13, None, ""),
        ("NVRM: Xid (PCI:0000:cb:00): 31, pid=<unknown>, name=<unknown>, MMU", "0000:cb:00", 31, None, ""),
        ("NVRM: Xid (PCI:0000:9b:00): 119, pid=77, name=some-tool, Timeout", "0000:9b:00", 119, 77, "some-tool"),
        ("NVRM: Xid (PCI:0000:9b:00): 43, pid=77, Ch 8", "0000:9b:00", 43, 77, ""),
        ("NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action ... Reboot", "0000:02:00", 154, None, ""),
    ],
)
def test_an_xid_is_read_in_every_spelling(row, pci, code, pid, process):
    (xid,) = kernel_log.parse(f"[  1.5] {row}").xids

    assert (xid.pci, xid.code, xid.pid, xid.process, xid.stamp) == (pci, code, pid, process, "1.5")


def test_what_follows_an_xid_is_no_xid():
    log = kernel_log.parse(
        "[1.0] NVRM: Xid (PCI:0000:9b:00): 119, pid=7, name=a, Timeout\n"
        "[1.0] NVRM: GPU0 GSP RPC buffer contains function 103\n"
        "[1.0] NVRM:      0    103  GSP_RM_ALLOC  0x2081 0x4\n"
        "[1.0] NVRM: Rate limiting GSP RPC error prints for GPU at PCI:0000:9b:00\n"
        "[2.0] amd_iommu_report_page_fault: 6 callbacks suppressed\n"
        "[2.0] nvidia 0000:81:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x001c address=0x1 flags=0x0020]\n"
    )

    assert (len(log.xids), log.suppressed) == (1, 6)
    assert len(log.matching("io_page_fault")) == 1
    assert log.matching("io_page_fault", "no such word", "io_page_fault") == log.matching("io_page_fault")
    assert log.matching("io_page_fault", "no such word") == ()


def test_a_log_that_was_not_allowed_is_refused_with_its_words():
    with pytest.raises(RefusedError, match="not permitted"):
        kernel_log.parse("dmesg: read kernel buffer failed: Operation not permitted\n")


def test_kernels_modules_and_options():
    kernels = kernel.installed_kernels(
        "release 6.8.12-1-pve modules=yes headers=no image=yes running=yes\n"
        "release 6.8.8-1-pve modules=yes headers=yes image=no running=no\n"
    )

    assert [(one.release, one.marks["headers"], one.marks["running"]) for one in kernels] == [
        ("6.8.12-1-pve", False, True),
        ("6.8.8-1-pve", True, False),
    ]
    assert kernel.loaded_modules("nvidia 9707520 3 nvidia_uvm,nvidia_modeset, Live 0x0000000000000000 (PO)\n") == {
        "nvidia": 3
    }
    assert kernel.loaded_modules("Module                  Size  Used by\nnouveau 20480 -1\n") == {"nouveau": -1}
    assert kernel.modprobe_lines(
        "# ==> /etc/modprobe.d/a.conf <==\n# no\noptions vfio-pci \\\n  ids=10de:2bb5\nblacklist nouveau\n"
    ) == (
        "options vfio-pci ids=10de:2bb5",
        "blacklist nouveau",
    )
    assert (kernel.lockdown("none [integrity] confidentiality\n"), kernel.lockdown("off")) == ("integrity", None)


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("Linux node1 6.12.118+deb13-amd64 #1 SMP x86_64 GNU/Linux", "6.12.118+deb13-amd64"),
        ("Linux version 6.8.12-1-pve (build@host) (gcc ...)", "6.8.12-1-pve"),
        ("Darwin x", None),
    ],
)
def test_the_release_is_read_in_the_words_of_uname_and_proc(text, release):
    assert kernel.release(text) == release


@pytest.mark.parametrize("kind", sorted({kind for _, kind in kernel_log.NOTES}))
def test_a_telling_line_is_kept_wherever_it_stands(kind):
    word = next(word for word, one in kernel_log.NOTES if one == kind)
    rows = [f"[ {at}.000001] something else" for at in range(5)]
    for at in (0, 4):
        rows[at] = f"[ {at}.000002] pci 0000:01:00.0: {word} x"
    notes = kernel_log.parse("\n".join(rows) + "\n").notes
    assert [line.stamp for line in notes[kind]] == ["0.000002", "4.000002"]
