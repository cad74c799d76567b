# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``nccl_plan``: a thin door to the room ``model.nccl_env``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import nccl_env

DOCUMENTATION = r"""
name: nccl_plan
short_description: Plan the NCCL variables of a host
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Joins what an audit justifies with what a user asks for, and refuses what NCCL would ignore without a word.
positional: extra
options:
  _input:
    description: The C(advice) of the C(peerlane) facts; an empty dictionary where the audit is not to be heard.
    type: dict
    required: true
  extra:
    description: Further NCCL variables, name to value. They win over the audit's.
    type: dict
    default: {}
"""

EXAMPLES = r"""
- name: Show what would be written
  ansible.builtin.debug:
    msg: "{{ ansible_facts['peerlane']['advice'] | peerlane.gpu.nccl_plan(nccl_settings_extra) }}"
"""

RETURN = r"""
_value:
  description: C(text) of the environment file, C(provenance) text of the side file, and the variable C(names).
  type: dict
"""


def nccl_plan(advice: Mapping[str, Any] | None, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the texts of the two files and the names of the variables."""
    try:
        variables = nccl_env.plan(advice, extra or {})
    except InputError as error:
        raise AnsibleFilterError(error.line()) from None
    return {
        "text": nccl_env.file_text(variables),
        "provenance": nccl_env.provenance_text(variables),
        "names": [one.name for one in variables],
    }


class FilterModule:
    """Filters of the NCCL settings."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters by name."""
        return {"nccl_plan": nccl_plan}
