# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``driver_result``: a thin door to the room ``model.driver_result``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import driver_result as room

DOCUMENTATION = r"""
name: driver_result
short_description: Judge a host after the installation of a driver
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Says for each installed kernel whether DKMS has the module, with the cause line of the build log where not, which
    packages are not held, and whether a reboot is needed.
positional: plan
options:
  _input:
    description: The fact C(peerlane_driver) of P(peerlane.gpu.driver_facts#module), read after the installation.
    type: dict
    required: true
  plan:
    description: The plan of P(peerlane.gpu.driver_plan#filter) that was carried out.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Stop where a kernel has no module
  ansible.builtin.assert:
    that: (ansible_facts['peerlane_driver'] | peerlane.gpu.driver_result(plan))['failures'] | length == 0
"""

RETURN = r"""
_value:
  description: C(version), C(built), C(missing), C(failures), C(ways_out), C(unheld), C(reboot_required), C(unproven).
  type: dict
"""


def driver_result(facts: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the judgement as plain types."""
    return room.result(facts, plan).as_dict()


class FilterModule:
    """The filter of the driver's result."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by name."""
        return {"driver_result": driver_result}
