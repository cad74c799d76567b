# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Lookup ``model_listing``: the files of a model on the controller."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase

from ansible_collections.peerlane.gpu.plugins.module_utils.model_files import ModelError, list_folder, sha256_of

DOCUMENTATION = r"""
name: model_listing
short_description: List the files of a model on the controller
version_added: "0.1.0"
author:
  - The Peerlane authors (@peerlane)
description:
  - Returns each file of a model folder (or the one GGUF file) with its size and SHA-256.
  - Fails with one line where the path is no model, or where a weight file is shorter than its own header says.
options:
  _terms:
    description: Paths of model folders or GGUF files on the controller.
    required: true
    type: list
    elements: str
"""

EXAMPLES = r"""
- name: Show what would be copied
  ansible.builtin.debug:
    msg: "{{ query('peerlane.gpu.model_listing', '/srv/models/tiny') }}"
"""

RETURN = r"""
_list:
  description: One dictionary for each file, with C(path) (relative), C(full), C(size) in bytes, and C(sha256).
  type: list
  elements: dict
"""


class LookupModule(LookupBase):
    """List and hash."""

    def run(self, terms: list[str], variables: Any = None, **kwargs: Any) -> list[dict[str, Any]]:
        """Return the files of all terms."""
        found = []
        for term in terms:
            base = Path(term).expanduser()
            try:
                files = list_folder(str(base))
                for one in files:
                    full = base / one.path if base.is_dir() else base
                    row = {"path": one.path, "full": str(full), "size": one.size, "sha256": sha256_of(str(full))}
                    found.append(row)
            except ModelError as error:
                raise AnsibleLookupError(f"on the controller: {error}") from None
            except OSError as error:
                raise AnsibleLookupError(f"on the controller: {error.filename}: {error.strerror}") from None
        return found
