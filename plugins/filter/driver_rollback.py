# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``driver_rollback``: a thin door to the room ``model.driver_result``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import driver_result as room

DOCUMENTATION = r"""
name: driver_rollback
short_description: Find the way back from a driver installation that failed
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Compares the packages before and after, and names what to purge and what to put back.
positional: before, planned
options:
  _input:
    description: The fact C(peerlane_driver) after the failure.
    type: dict
    required: true
  before:
    description: The same fact from before the installation.
    type: dict
    required: true
  planned:
    description: The C(install) list of the plan.
    type: list
    elements: str
    required: true
"""

EXAMPLES = r"""
- name: Show the way back
  ansible.builtin.debug:
    msg: "{{ ansible_facts['peerlane_driver'] | peerlane.gpu.driver_rollback(before, plan['install']) }}"
"""

RETURN = r"""
_value:
  description: C(purge), names, and C(restore), C(name=version) of what was there before.
  type: dict
"""


def driver_rollback(
    after: Mapping[str, Any], before: Mapping[str, Any], planned: Sequence[str]
) -> dict[str, list[str]]:
    """Return what to purge and what to put back."""
    return room.rollback(before, after, planned)


class FilterModule:
    """The filter of the way back."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by name."""
        return {"driver_rollback": driver_rollback}
