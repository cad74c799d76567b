#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: documentation of the action plugin of the same name."""

from __future__ import absolute_import, annotations, division, print_function

__metaclass__ = type

DOCUMENTATION = r"""
---
module: preflight
short_description: Check a host before anything on it is changed
description:
  - Runs on the controller and asks the host in one round trip, by a shell script. It needs no Python on the host.
  - First checks the variables of the host against the options of all roles. A misspelt name fails with the name that
    was meant and the place that sets it, before the host is asked.
  - Then checks sudo, Python, clock, distribution, architecture, systemd, free space, the apt lock, half-installed
    packages, the package registries that the host itself is configured for, the port of the model service and the
    model path.
  - Fails with one line for each problem, each with what to do. Changes nothing.
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
options:
  purpose:
    description:
      - V(provision) asks everything that a change needs.
      - V(audit) asks only what reading needs. Use it for hypervisors.
    type: str
    choices: [provision, audit]
    default: provision
  lock_wait_s:
    description:
      - Seconds to wait for a held apt lock before it counts as a problem. The host is asked again every 5 seconds.
    type: int
    default: 0
attributes:
  check_mode:
    description: Reads only, so check mode does the same.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
notes:
  - Run it with C(become). Where sudo does not work it says so, and asks the rest without root.
  - The distribution, the room and the registries are warnings or stops by the limits in C(docs/cli.md).
"""

EXAMPLES = r"""
- name: Check the host before anything is changed
  peerlane.gpu.preflight:
    lock_wait_s: 60
  become: true
"""

RETURN = r"""
problems:
  description: One line for each problem that stops a change. Empty where the host is fit.
  returned: always
  type: list
  elements: str
  sample: ["port 8000 is taken by nginx (pid 812, nginx.service); stop it, or set model_service_port"]
bad_input:
  description: Whether the variables are wrong, so that the host was not even asked.
  returned: when they are
  type: bool
ansible_facts:
  description: What the host answered.
  returned: when the host was asked
  type: dict
  contains:
    preflight:
      description: What was read and what was judged.
      returned: always
      type: dict
      contains:
        fit:
          description: Whether nothing stops a change.
          returned: always
          type: bool
        os:
          description: The C(id), C(version) and C(name) of C(/etc/os-release).
          returned: always
          type: dict
        arch:
          description: Machine name of the kernel.
          returned: always
          type: str
          sample: x86_64
        container:
          description: Kind of the container. Empty outside one.
          returned: always
          type: str
        pythons:
          description: Path of each Python to its version.
          returned: always
          type: dict
        clock_offset_s:
          description: Clock of the host minus clock of the controller, in seconds. Null where it was not read.
          returned: always
          type: float
        checks:
          description: Each check with its C(name), C(state) (ok, warn, stop, unknown), C(text) and C(todo).
          returned: always
          type: list
          elements: dict
"""
