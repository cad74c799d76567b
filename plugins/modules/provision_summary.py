#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: documentation of the action plugin of the same name."""

from __future__ import absolute_import, annotations, division, print_function

__metaclass__ = type

DOCUMENTATION = r"""
---
module: provision_summary
short_description: Show the plan and the outcome of a provision
description:
  - Runs on the controller only, for the playbook C(peerlane.gpu.provision).
  - V(plan) shows what is known of a host, what each role will do there, what is off and why, and sets the fact
    C(provision) with the C(roles) to apply.
  - V(gate) fails where the plan has blocking findings that C(peerlane_accept_findings) does not name.
  - V(summary) shows which findings are gone, left and new, and what the model service answered.
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
options:
  stage:
    description:
      - What to show.
    type: str
    choices: [plan, gate, summary]
    required: true
  snapshots:
    description:
      - Folder on the controller with the snapshots that M(peerlane.gpu.host_evidence) saved. With it, a guest is judged
        together with its hypervisor. Without it, the facts of the host alone count.
    type: path
attributes:
  check_mode:
    description: Changes nothing on a host, so check mode does the same.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: Read and judge the host
  peerlane.gpu.host_evidence:
  become: true

- name: Show the plan
  peerlane.gpu.provision_summary:
    stage: plan
"""

RETURN = r"""
msg:
  description: The text.
  returned: always
  type: str
stage:
  description: The stage that was asked for.
  returned: always
  type: str
summary:
  description: Findings that are C(gone), C(left) and C(new), and what the C(service) said.
  returned: with stage V(summary)
  type: dict
ansible_facts:
  description: The plan.
  returned: with stage V(plan)
  type: dict
  contains:
    provision:
      description: The plan of the host, with the C(roles) to apply and the C(findings) before.
      returned: always
      type: dict
"""
