# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``engine_profile``: a thin door to the room ``model.engines``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import engines

DOCUMENTATION = r"""
name: engine_profile
short_description: Say what an inference engine needs
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Returns what Peerlane knows of an engine at a version.
  - Fails with one line where this release has no such engine or version.
positional: version
options:
  _input:
    description: Name of the engine.
    type: str
    required: true
  version:
    description: Version to install. Empty for the newest that this release has a lock for.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Show which CPU features the engine needs
  ansible.builtin.debug:
    msg: "{{ ('llama_cpp' | peerlane.gpu.engine_profile)['cpu_flags'] }}"
"""

RETURN = r"""
_value:
  description:
    - C(version), C(lock) and C(launcher) (files of the role), C(module), C(oldest_python), C(cpu_flags), C(formats),
      C(arguments), C(packages), C(disk_mb), C(stop_margin_s), C(wants_gpu), C(environment).
  type: dict
"""


def engine_profile(name: str, version: str = "") -> dict[str, Any]:
    """Return the engine as plain values, for one version."""
    try:
        one = engines.engine(name)
        chosen = engines.version_of(one, str(version or ""))
    except InputError as error:
        raise AnsibleFilterError(error.line()) from None
    profile = asdict(one)
    del profile["versions"]
    profile["oldest_python"] = ".".join(str(part) for part in one.oldest_python)
    return profile | {"version": chosen, "lock": one.versions[chosen]}


class FilterModule:
    """Name the filter."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters of this file."""
        return {"engine_profile": engine_profile}
