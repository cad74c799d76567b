#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: see what a model service would meet on a host."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: model_service_info
short_description: See what a model service would meet on a host
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Looks at the engine, the model, the port, the unit and the NCCL settings in one call. Judges nothing.
options:
  unit:
    description: Unit of the service.
    type: str
    required: true
  service_root:
    description: Folder of the service with its releases.
    type: path
    required: true
  engine_home:
    description: Folder of the engine.
    type: path
    required: true
  model_path:
    description: Folder or file of the model.
    type: path
    required: true
  host:
    description: Address that the service will listen on.
    type: str
    default: 127.0.0.1
  port:
    description: Port that the service will listen on.
    type: int
    required: true
  user:
    description: User that the service runs as.
    type: str
    default: peerlane
  nccl_env:
    description: File with NCCL variables that the unit loads.
    type: path
    default: /etc/peerlane/nccl.env
attributes:
  check_mode:
    description: Reads only, so check mode returns the same.
    support: full
  diff_mode:
    description: Changes nothing, so there is no difference to show.
    support: none
"""

EXAMPLES = r"""
- name: See what is there
  peerlane.gpu.model_service_info:
    unit: peerlane-model@chat.service
    service_root: /opt/peerlane/services/chat
    engine_home: /opt/peerlane/engines/llama_cpp-2026.10.11549+1a2b3c4d
    model_path: /opt/peerlane/models/small-model@1f3c2b9
    port: 8000
"""

RETURN = r"""
engine:
  description: What C(engine.json) says; empty where there is no engine.
  returned: success
  type: dict
model:
  description:
    - C(exists), C(formats) (V(gguf), V(safetensors)), C(complaint) about a weight file that is not whole, and the
      C(revision) of its manifest.
  returned: success
  type: dict
port_owner:
  description: C(pid), C(command), C(unit) of who listens on the port; empty where nobody does.
  returned: success
  type: dict
service:
  description: Properties of the unit, as C(systemctl show) gives them.
  returned: success
  type: dict
current:
  description: Release that is switched to, and the C(previous) one; empty where there is none.
  returned: success
  type: str
previous:
  description: Release before the current one.
  returned: success
  type: str
nccl:
  description: Text of the NCCL settings.
  returned: success
  type: str
user_exists:
  description: Whether the service user is there.
  returned: success
  type: bool
systemd:
  description: Whether the host runs systemd.
  returned: success
  type: bool
nvidia:
  description: Whether the host has device nodes of the NVIDIA driver.
  returned: success
  type: bool
"""

import glob
import json
import os
import pwd

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.peerlane.gpu.plugins.module_utils import bounded, model_files, service_state
from ansible_collections.peerlane.gpu.plugins.module_utils.weight_files import weight_complaint


def read_json(path):
    """Return a JSON object from a file, or {}."""
    try:
        value = json.loads(bounded.read(path, 1024 * 1024)["stdout"] or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def model_state(path):
    """Return what is at the model's path."""
    if not os.path.exists(path):
        return {"exists": False, "formats": [], "complaint": "", "revision": None}
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    names = sorted(os.listdir(path)) if os.path.isdir(path) else [os.path.basename(path)]
    formats = [kind for kind in ("gguf", "safetensors") if kind in _formats(names)]
    complaint = ""
    for name in names:
        full = os.path.join(folder, name)
        said = weight_complaint(full) if os.path.isfile(full) else ""
        if said:
            complaint = "{0} {1}".format(name, said)
            break
    manifest = model_files.read_manifest(folder)
    damaged = model_files.damage(folder, manifest, False) if manifest and not complaint else {}
    for name, said in sorted(damaged.items()):
        complaint = complaint or "{0} {1}".format(name, said)
    return {"exists": True, "formats": formats, "complaint": complaint, "revision": manifest.get("revision")}


def _formats(names):
    weights = [[name for name in names if not name.endswith(".gguf")], [n for n in names if n.endswith(".gguf")]]
    return {model_files.model_format(some) for some in weights}


def user_exists(name):
    """Tell whether the host knows a user."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def link_name(path):
    """Return the last part of where a link points, or "" where it points to no folder."""
    return os.path.basename(os.readlink(path)) if os.path.islink(path) and os.path.isdir(path) else ""


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "service_root": {"type": "path", "required": True},
            "engine_home": {"type": "path", "required": True},
            "model_path": {"type": "path", "required": True},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "user": {"type": "str", "default": "peerlane"},
            "nccl_env": {"type": "path", "default": "/etc/peerlane/nccl.env"},
        },
        supports_check_mode=True,
    )
    options = module.params
    module.exit_json(
        changed=False,
        engine=read_json(os.path.join(options["engine_home"], "engine.json")),
        model=model_state(options["model_path"]),
        port_owner=service_state.port_owner(options["port"], options["host"]),
        service=service_state.service_properties(options["unit"]),
        current=link_name(os.path.join(options["service_root"], "current")),
        previous=link_name(os.path.join(options["service_root"], "previous")),
        nccl=bounded.read(options["nccl_env"], 65536)["stdout"],
        user_exists=user_exists(options["user"]),
        systemd=os.path.isdir("/run/systemd/system"),
        nvidia=bool(glob.glob("/dev/nvidia[0-9]*")),
    )


if __name__ == "__main__":
    main()
