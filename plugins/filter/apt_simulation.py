# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``apt_simulation``: a thin door to the room ``model.apt_text``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import apt_text

DOCUMENTATION = r"""
name: apt_simulation
short_description: Read what apt-get -s would do
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Reads the output of C(apt-get -s) in the C locale, and tells driver packages from others.
options:
  _input:
    description: Standard output and standard error of C(apt-get -s).
    type: str
    required: true
"""

EXAMPLES = r"""
- name: Ask apt what it would do
  ansible.builtin.command:
    argv: [apt-get, -s, install, cuda-toolkit-12-8]
  register: simulated
  changed_when: false

- name: Refuse a driver that comes along
  ansible.builtin.assert:
    that: (simulated.stdout | peerlane.gpu.apt_simulation)['drivers'] | length == 0
"""

RETURN = r"""
_value:
  description:
    - C(install) and C(remove), names; C(drivers), the driver packages among the former; C(others_removed), what is
      no driver package among the latter; C(problems), one line each.
  type: dict
"""


def apt_simulation(text: str) -> dict[str, list[str]]:
    """Return the names by what would happen to them."""
    seen = apt_text.simulation(text)
    return {
        "install": [f"{name} {version}" for name, version in seen.install.items()],
        "remove": list(seen.remove),
        "drivers": [name for name in seen.install if apt_text.is_driver_package(name)],
        "others_removed": [
            name for name in seen.remove if not apt_text.is_driver_package(name) and name not in seen.install
        ],
        "problems": list(seen.problems),
    }


class FilterModule:
    """The filter of apt simulations."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filter by name."""
        return {"apt_simulation": apt_simulation}
