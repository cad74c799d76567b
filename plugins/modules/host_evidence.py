#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: read everything that an audit needs, in one round trip."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: host_evidence
short_description: Read what a GPU host, a guest or a hypervisor says about itself
description:
  - Reads kernel, PCI, IOMMU, driver, package and Proxmox sources side by side in one call, each with a limit on time
    and size.
  - Changes nothing on the host, and judges nothing there. The action plugin of the same name parses and judges on the
    controller.
  - Never reads whole process environments, keys or tokens.
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
options:
  timeout_s:
    description:
      - Seconds that one source may take. C(nvidia-smi) hangs where a GPU fell off the bus.
    type: int
    default: 20
  serial_numbers:
    description:
      - Whether serial numbers of GPUs, chassis and PCI devices may leave the host. No verdict needs them.
    type: bool
    default: false
  save_to:
    description:
      - Folder on the controller. The snapshot goes to a folder of the host's inventory name in it.
    type: path
attributes:
  check_mode:
    description: Reads only, so check mode returns the same.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
notes:
  - Run it with C(become) to read PCI config space, the kernel log and the Proxmox configuration. Without it these
    sources are listed with the reason why they are missing.
"""

EXAMPLES = r"""
- name: Read and judge the host
  peerlane.gpu.host_evidence:
    save_to: snapshots
  become: true

- name: Stop where a finding forbids a deployment
  ansible.builtin.assert:
    that: ansible_facts['peerlane']['blocking'] | length == 0
"""

RETURN = r"""
ansible_facts:
  description: The facts that later tasks branch on.
  returned: success
  type: dict
  contains:
    peerlane:
      description: Role, GPUs, links, driver, findings and advice of this host, judged on its own.
      returned: success
      type: dict
      sample: {role: guest, blocking: []}
collected_at:
  description: When the collection ended, ISO 8601 in UTC.
  returned: success
  type: str
  sample: "2026-12-01T12:00:00Z"
elapsed_ms:
  description: Time that the collection took on the host, in milliseconds.
  returned: success
  type: int
  sample: 900
privileged:
  description: Whether the sources were read as root.
  returned: success
  type: bool
  sample: true
snapshot:
  description: Folder on the controller that holds the snapshot.
  returned: when O(save_to) is given
  type: str
  sample: snapshots/gpu1
source_count:
  description: Number of sources that were asked.
  returned: success
  type: int
  sample: 46
"""

import os
import time

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.peerlane.gpu.plugins.module_utils.evidence import collect
from ansible_collections.peerlane.gpu.plugins.module_utils.evidence_sources import TIMEOUT_S


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "timeout_s": {"type": "int", "default": 20},
            "serial_numbers": {"type": "bool", "default": False},
            "save_to": {"type": "path"},
        },
        supports_check_mode=True,
    )
    timeout_s = module.params["timeout_s"] or TIMEOUT_S
    started = time.monotonic()
    entries = collect(timeout_s, serials=module.params["serial_numbers"])
    module.exit_json(
        changed=False,
        collected_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        privileged=os.geteuid() == 0,
        elapsed_ms=int((time.monotonic() - started) * 1000),
        source_count=len(entries),
        evidence=entries,
    )


if __name__ == "__main__":
    main()
