# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Filter ``service_plan``: a thin door to the room ``model.release``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ansible.errors import AnsibleFilterError

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import engines, release

DOCUMENTATION = r"""
name: service_plan
short_description: Plan one release of a model service
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Turns the variables of the role P(peerlane.gpu.model_service#role) and what was seen on the host into the files of
    a release, its name, and the obstacles that can be known before anything is changed.
positional: seen
options:
  _input:
    description:
      - C(service), C(engine), C(engine_home), C(model_path), C(alias), C(host), C(port), C(args), C(env), C(golden),
        C(drain_timeout_s), C(unit).
    type: dict
    required: true
  seen:
    description: What M(peerlane.gpu.model_service_info) returned.
    type: dict
    required: true
  still_to_come:
    description: Whether an engine or a model that is not there yet may be passed over, as in a check run on a new host.
    type: bool
    default: false
"""

EXAMPLES = r"""
- name: Show the name of the release
  ansible.builtin.debug:
    msg: "{{ (settings | peerlane.gpu.service_plan(seen))['id'] }}"
"""

RETURN = r"""
_value:
  description:
    - C(id), C(args), C(env), C(record), C(stop_timeout_s), C(private_devices), and C(obstacles), a list of lines.
  type: dict
"""


def service_plan(wanted: Mapping[str, Any], seen: Mapping[str, Any], still_to_come: bool = False) -> dict[str, Any]:
    """Return the plan as plain values."""
    try:
        engine = engines.engine(wanted["engine"])
        settings = release.Settings(
            service=str(wanted["service"]),
            engine_home=str(wanted["engine_home"]),
            model_path=str(wanted["model_path"]),
            alias=str(wanted["alias"]),
            host=str(wanted["host"]),
            port=int(wanted["port"]),
            arguments=wanted["args"],
            environment=wanted["env"],
            drain_timeout_s=int(wanted["drain_timeout_s"]),
        )
        record = seen.get("engine") or {}
        created_from = {
            "engine_version": record.get("version"),
            "revision": (seen.get("model") or {}).get("revision"),
            "golden": wanted.get("golden") or None,
        }
        plan = release.plan(engine, settings, str(seen.get("nccl") or ""), created_from)
        obstacles = release.obstacles(engine, settings, str(wanted["unit"]), seen, bool(still_to_come))
    except InputError as error:
        raise AnsibleFilterError(error.line()) from None
    return plan | {"obstacles": list(obstacles)}


class FilterModule:
    """Name the filter."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters of this file."""
        return {"service_plan": service_plan}
