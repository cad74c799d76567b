# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``driver_plan``: a thin door to the room ``model.driver_plan``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import driver_plan as room

DOCUMENTATION = r"""
name: driver_plan
short_description: Plan the NVIDIA driver of a host
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Chooses source, flavour, branch, exact version and packages from the facts of a host, and says in one line each why
    nothing should be installed.
positional: options
options:
  _input:
    description: The fact C(peerlane_driver) of P(peerlane.gpu.driver_facts#module).
    type: dict
    required: true
  options:
    description: What the user wishes, by the names of the role's variables without C(nvidia_driver_).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Show what would be installed
  ansible.builtin.debug:
    msg: "{{ (ansible_facts['peerlane_driver'] | peerlane.gpu.driver_plan({'source': 'nvidia'}))['install'] }}"
"""

RETURN = r"""
_value:
  description:
    - C(enabled), C(reason), C(stops), C(notes), C(source), C(flavour), C(branch), C(version), C(install)
      and more.
  type: dict
"""


def driver_plan(facts: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan as plain types."""
    try:
        return room.plan(facts, options).as_dict()
    except InputError as error:
        raise AnsibleFilterError(error.line()) from None


class FilterModule:
    """The filter of the driver's plan."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by name."""
        return {"driver_plan": driver_plan}
