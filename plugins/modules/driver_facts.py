#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: read what a driver installation depends on, in one round trip."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: driver_facts
short_description: Read what the installation of an NVIDIA driver depends on
description:
  - Reads the GPUs on the PCI bus, the installed kernels and their headers, the package lists, held and half-installed
    packages, DKMS, Secure Boot and its keys, and the loaded kernel module.
  - Judges nothing and changes nothing. The filter P(peerlane.gpu.driver_plan#filter) turns the facts into a plan.
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
options:
  packages:
    description:
      - Further packages whose versions and origins are to be read.
    type: list
    elements: str
    default: []
  timeout_s:
    description:
      - Seconds that one command may take.
    type: int
    default: 30
attributes:
  check_mode:
    description: Reads only, so check mode returns the same facts.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Read what the driver depends on
  peerlane.gpu.driver_facts:

- name: Show which GPUs there are
  ansible.builtin.debug:
    msg: "{{ ansible_facts['peerlane_driver']['gpus'] }}"
"""

RETURN = r"""
ansible_facts:
  description: What was read, mostly the text of commands in the C locale.
  returned: success
  type: dict
  contains:
    peerlane_driver:
      description: The facts, one key for each source.
      returned: success
      type: dict
      contains:
        os_release: {description: Text of C(/etc/os-release)., returned: success, type: str}
        architecture: {description: Architecture of the packages., returned: success, type: str, sample: amd64}
        container: {description: Kind of container, or empty., returned: success, type: str, sample: systemd-nspawn}
        gpus:
          description: NVIDIA display functions with C(address), C(device) (4 hexadecimal digits) and C(driver).
          returned: success
          type: list
          elements: dict
        kernels:
          description: Installed kernels with C(release), C(headers) and C(running).
          returned: success
          type: list
          elements: dict
        packages: {description: State, name and version of related packages., returned: success, type: str}
        holds: {description: Packages that are held., returned: success, type: str}
        repositories: {description: Output of C(apt-cache policy)., returned: success, type: str}
        policy: {description: Output of C(apt-cache policy) for related packages., returned: success, type: str}
        asked: {description: The packages that C(policy) was asked for., returned: success, type: list}
        lists_present: {description: Whether apt has package lists., returned: success, type: bool}
        dkms_status: {description: Output of C(dkms status)., returned: success, type: str}
        make_logs: {description: Path to text of DKMS build logs., returned: success, type: dict}
        audit: {description: Output of C(dpkg --audit)., returned: success, type: str}
        alternatives: {description: Output of C(update-alternatives --query cuda)., returned: success, type: str}
        secure_boot: {description: Whether Secure Boot is on; none where unknown., returned: success, type: bool}
        secure_boot_reason: {description: Why that is unknown., returned: success, type: str}
        keys:
          description: Keys that DKMS signs with, with C(path), C(enrolled) and C(reason).
          returned: success
          type: list
          elements: dict
        loaded_version: {description: Version of the loaded NVIDIA module, or empty., returned: success, type: str}
        other_drivers: {description: Loaded drivers that take NVIDIA GPUs., returned: success, type: list}
        runfile: {description: Whether a C(.run) driver is in place., returned: success, type: bool}
        initramfs: {description: Whether C(update-initramfs) exists., returned: success, type: bool}
"""

import glob
import os
import shutil

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.peerlane.gpu.plugins.module_utils.bounded import SEARCH_PATH, read, run, value

MAX_BYTES = 2 * 1024 * 1024
# The head of a build log names its kernel; the failure is near its end.
LOG_HEAD_BYTES = 2000
LOG_TAIL_BYTES = 256 * 1024

PCI = "/sys/bus/pci/devices"
EFI = "/sys/firmware/efi"
# UEFI specification 2.10, section 3.3 (global variables), and shim's variable that mirrors its key list.
SECURE_BOOT = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
MOK_LIST = "MokListRT-605dab50-e046-4300-abb6-3dd810dd8b23"
# Where dkms (mok_certificate in framework.conf) and Ubuntu's shim-signed keep the public key, in DER form.
KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")

PATTERNS = (
    "*nvidia*",
    "cuda-*",
    # The parts of one CUDA toolkit: libcublas-12-8, gds-tools-13-0.
    "*-[0-9][0-9]-[0-9]*",
    "libcuda1",
    "libcudadebugger1",
    "libnvcuvid1",
    "libnvoptix1",
    "libxnvctrl*",
    "dkms",
    "libc6",
    "linux-headers-*",
    "pve-headers-*",
    "proxmox-headers-*",
)


def gpus() -> list[dict[str, str]]:
    """Return the NVIDIA display functions (class 0x03) on the bus."""
    found = []
    for path in sorted(glob.glob(PCI + "/*")):
        if value(path + "/vendor") == "0x10de" and (value(path + "/class") or "").startswith("0x03"):
            driver = os.path.join(path, "driver")
            found.append(
                {
                    "address": os.path.basename(path),
                    "device": (value(path + "/device") or "0x0000")[2:],
                    "driver": os.path.basename(os.readlink(driver)) if os.path.islink(driver) else "",
                }
            )
    return found


def kernels(root: str = "/lib/modules") -> list[dict[str, object]]:
    """Return the installed kernels: folders that hold modules, not only what DKMS or headers left there."""
    running = os.uname().release
    found: list[dict[str, object]] = []
    for path in sorted(glob.glob(root + "/*")):
        release = os.path.basename(path)
        if os.path.isdir(path + "/kernel") or os.path.exists(path + "/modules.builtin"):
            headers = os.path.exists(path + "/build/Makefile")
            found.append({"release": release, "headers": headers, "running": release == running})
    return found


def secure_boot() -> tuple[object, str]:
    """Return whether Secure Boot is on, or None and why that cannot be told."""
    if not os.path.isdir(EFI):
        return False, ""
    path = "{0}/efivars/{1}".format(EFI, SECURE_BOOT)
    try:
        with open(path, "rb") as stream:
            return stream.read()[4:5] == b"\x01", ""
    except OSError as error:
        return None, "{0}: {1}".format(path, error.strerror)


def keys() -> list[dict[str, object]]:
    """Return the public keys for module signing that exist here, and whether the firmware's shim knows them."""
    path = "{0}/efivars/{1}".format(EFI, MOK_LIST)
    enrolled, reason = None, ""
    try:
        with open(path, "rb") as stream:
            enrolled = stream.read()
    except FileNotFoundError:
        enrolled = b""
    except OSError as error:
        reason = "{0}: {1}".format(path, error.strerror)
    found: list[dict[str, object]] = []
    for name in KEYS:
        try:
            with open(name, "rb") as stream:
                key = stream.read()
        except OSError:
            continue
        known = None if enrolled is None else bool(key) and key in enrolled
        found.append({"path": name, "enrolled": known, "reason": reason})
    return found


def make_logs() -> dict[str, str]:
    """Return the DKMS build logs of NVIDIA modules."""
    found = {}
    for pattern in ("/var/lib/dkms/nvidia*/*/build/make.log", "/var/lib/dkms/nvidia*/*/*/*/log/make.log"):
        for path in sorted(glob.glob(pattern)):
            with open(path, "rb") as stream:
                text = stream.read(LOG_HEAD_BYTES)
                size = os.fstat(stream.fileno()).st_size
                stream.seek(max(LOG_HEAD_BYTES, size - LOG_TAIL_BYTES))
                text += stream.read()
            found[path] = text.decode("utf-8", "replace")
    return found


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "packages": {"type": "list", "elements": "str", "default": []},
            "timeout_s": {"type": "int", "default": 30},
        },
        supports_check_mode=True,
    )

    def say(*argv: str) -> str:
        text: str = run(list(argv), module.params["timeout_s"], MAX_BYTES)["stdout"]
        return text

    if shutil.which("dpkg-query", path=SEARCH_PATH) is None:
        module.fail_json(msg="dpkg-query: not found; the NVIDIA driver role needs Debian, Ubuntu or Proxmox VE")
    # apt writes its cache files as root; check mode leaves even those alone.
    no_cache = ["-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache="] if module.check_mode else []
    here = kernels()
    packages = say("dpkg-query", "-W", "-f", "${db:Status-Abbrev}\\t${Package}\\t${Version}\\n", *PATTERNS)
    names = [line.split("\t")[1] for line in packages.splitlines() if line.count("\t") == 2 and line[1:2] not in "nc"]
    for one in here:
        names += [prefix + str(one["release"]) for prefix in ("linux-headers-", "proxmox-headers-", "pve-headers-")]
    names += module.params["packages"]
    on, reason = secure_boot()
    container = say("systemd-detect-virt", "--container").strip()
    facts = {
        "os_release": read("/etc/os-release", MAX_BYTES)["stdout"],
        "architecture": say("dpkg", "--print-architecture").strip(),
        "container": "" if container == "none" else container,
        "gpus": gpus(),
        "kernels": here,
        "packages": packages,
        "holds": say("apt-mark", *no_cache, "showhold"),
        "repositories": say("apt-cache", *no_cache, "policy"),
        "policy": say("apt-cache", *no_cache, "policy", *sorted(set(names))),
        "asked": sorted(set(names)),
        "lists_present": bool(glob.glob("/var/lib/apt/lists/*_Packages*")),
        "dkms_status": say("dkms", "status"),
        "make_logs": make_logs(),
        "audit": say("dpkg", "--audit"),
        "alternatives": say("update-alternatives", "--query", "cuda"),
        "secure_boot": on,
        "secure_boot_reason": reason,
        "keys": keys(),
        "loaded_version": value("/sys/module/nvidia/version") or "",
        "other_drivers": [name for name in ("nouveau", "nova_core") if os.path.isdir("/sys/module/" + name)],
        "runfile": os.path.exists("/usr/bin/nvidia-uninstall"),
        "initramfs": shutil.which("update-initramfs", path=SEARCH_PATH) is not None,
    }
    module.exit_json(changed=False, ansible_facts={"peerlane_driver": facts})


if __name__ == "__main__":
    main()
