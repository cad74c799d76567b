#!/usr/bin/python
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ansible module: write and remove several small text files in one call."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: text_files
short_description: Write and remove several small text files in one call
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Does for a list of files what M(ansible.builtin.copy) with O(ansible.builtin.copy#module:content) does for one, in
    one round trip. Files are owned by the user that the module runs as; their folders are made where they are missing.
  - Render a template on the controller with P(ansible.builtin.template#lookup).
options:
  files:
    description: The files. An entry without C(content) is a file that must not be there.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: Place of the file.
        type: path
        required: true
      content:
        description: Text of the file.
        type: str
      mode:
        description: Mode of the file, an octal number in quotes.
        type: str
        default: "0644"
  backup:
    description: Whether a file that is changed or removed is kept beside its place, with the time in its name.
    type: bool
    default: false
attributes:
  check_mode:
    description: Says which files would be changed.
    support: full
  diff_mode:
    description: Shows each file before and after.
    support: full
"""

EXAMPLES = r"""
- name: Set the limits
  peerlane.gpu.text_files:
    files:
      - path: /etc/security/limits.d/60-peerlane.conf
        content: "{{ lookup('ansible.builtin.template', 'limits.conf.j2') }}"
      - path: /etc/security/limits.d/50-peerlane.conf
    backup: true
"""

RETURN = r"""
paths:
  description: Files that were written or removed, or would be in check mode.
  returned: success
  type: list
  elements: str
backups:
  description: Copy of each file that was there before, by path.
  returned: success
  type: dict
"""

import os
import tempfile

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.text.converters import to_bytes, to_text

FOLDER_MODE = 0o755


def read(path):
    """Return the bytes of a file, or None where it is not there."""
    try:
        with open(path, "rb") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def write(module, path, content, mode):
    """Put a file in place by rename, with its mode from the start."""
    folder = os.path.dirname(path)
    missing = folder
    while not os.path.isdir(missing):
        missing = os.path.dirname(missing)
    os.makedirs(folder, exist_ok=True)
    while folder != missing:
        os.chmod(folder, FOLDER_MODE)
        folder = os.path.dirname(folder)
    handle, temporary = tempfile.mkstemp(dir=module.tmpdir)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
    module.set_mode_if_different(temporary, mode, False)
    module.atomic_move(temporary, path)
    # An existing file hands its old mode on to the new one.
    module.set_mode_if_different(path, mode, False)


def difference(path, before, after):
    """Return the diff of one file as Ansible shows it."""
    return {
        "before_header": path,
        "after_header": path,
        "before": to_text(before or b"", errors="surrogate_or_replace"),
        "after": to_text(after or b"", errors="surrogate_or_replace"),
    }


def main():
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "files": {
                "type": "list",
                "elements": "dict",
                "required": True,
                "options": {
                    "path": {"type": "path", "required": True},
                    "content": {"type": "str"},
                    "mode": {"type": "str", "default": "0644"},
                },
            },
            "backup": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    result = {"changed": False, "paths": [], "backups": {}, "diff": []}
    for wanted in module.params["files"]:
        path = wanted["path"]
        after = None if wanted["content"] is None else to_bytes(wanted["content"])
        try:
            before = read(path)
            # In check mode this only says whether the mode would change.
            wrong_mode = (
                before is not None and before == after and module.set_mode_if_different(path, wanted["mode"], False)
            )
            if before == after and not wrong_mode:
                continue
            result["changed"] = True
            result["paths"].append(path)
            result["diff"].append(difference(path, before, after))
            if module.check_mode or before == after:
                continue
            if module.params["backup"] and before is not None:
                result["backups"][path] = module.backup_local(path)
            if after is None:
                os.unlink(path)
            else:
                write(module, path, after, wanted["mode"])
        except OSError as error:
            module.fail_json(msg="{0}: {1}".format(path, error.strerror or error), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
