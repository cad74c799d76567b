# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``cuda_toolkit_plan``: a thin door to the room ``model.cuda_plan``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import cuda_plan as room

DOCUMENTATION = r"""
name: cuda_toolkit_plan
short_description: Plan the CUDA toolkits of a host
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Names the packages of several toolkits side by side, what to remove, and what the alternative C(cuda) lacks.
positional: options
options:
  _input:
    description: The fact C(peerlane_driver) of P(peerlane.gpu.driver_facts#module).
    type: dict
    required: true
  options:
    description: C(versions), C(default_version) and C(absent_versions).
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Show what would be installed
  ansible.builtin.debug:
    msg: "{{ (ansible_facts['peerlane_driver'] | peerlane.gpu.cuda_toolkit_plan({'versions': ['12.8']}))['install'] }}"
"""

RETURN = r"""
_value:
  description: C(wanted), C(default), C(stops), C(notes), C(install), C(remove), C(register) and C(default_path).
  type: dict
"""


def cuda_toolkit_plan(facts: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan as plain types."""
    try:
        return room.plan(facts, options).as_dict()
    except InputError as error:
        raise AnsibleFilterError(error.line()) from None


class FilterModule:
    """The filter of the toolkits' plan."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by name."""
        return {"cuda_toolkit_plan": cuda_toolkit_plan}
