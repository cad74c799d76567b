# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Controller half of ``host_evidence``: save the snapshot, parse it, judge it, set the facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core import evidence as evidence_room
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import snapshot as snapshot_room
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import facts as facts_room
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine


class ActionModule(ActionBase):
    """Run the module on the target, and keep everything that thinks here."""

    TRANSFERS_FILES = False
    _requires_connection = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the facts of one host. The raw evidence goes to the snapshot folder, not into the result."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        answer = self._execute_module(task_vars=task_vars)
        entries = answer.pop("evidence", None)
        result.update(answer)
        if entries is None:
            return result
        host = str((task_vars or {}).get("inventory_hostname", "localhost"))
        evidence = evidence_room.from_module(
            host, {**answer, "evidence": entries, "inventory": self._home(task_vars or {})}
        )
        save_to = self._task.args.get("save_to")
        if save_to:
            folder = Path(str(save_to)).expanduser() / host
            evidence_room.save(evidence, folder)
            result["snapshot"] = str(folder)
        snapshot = snapshot_room.build(evidence)
        findings = engine.judge({host: snapshot})[host]
        result["ansible_facts"] = {"peerlane": facts_room.facts(snapshot, findings)}
        return result

    def _home(self, task_vars: dict[str, Any]) -> dict[str, str]:
        """Return where the inventory says that this guest runs: ``peerlane_hypervisor`` and ``peerlane_vmid``."""
        told = {"hypervisor": "peerlane_hypervisor", "vmid": "peerlane_vmid"}
        values = {key: str(self._templar.template(task_vars.get(name, ""))).strip() for key, name in told.items()}
        return {key: value for key, value in values.items() if value}
