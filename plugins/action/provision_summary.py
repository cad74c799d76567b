# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Show the plan of a provision, stop at what forbids one, and show what came of it. Runs on the controller only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleTemplateError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import provision, variables
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import intake
from ansible_collections.peerlane.gpu.plugins.plugin_utils.parse import snapshot as snapshot_room
from ansible_collections.peerlane.gpu.plugins.plugin_utils.report import facts as facts_room
from ansible_collections.peerlane.gpu.plugins.plugin_utils.rules import engine

ROLES = Path(__file__).resolve().parents[2] / "roles"

_ARGUMENTS = {
    "stage": {"type": "str", "choices": ["plan", "gate", "summary"], "required": True},
    "snapshots": {"type": "path"},
}


class ActionModule(ActionBase):
    """Plan, gate or summary of one host."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the text in ``msg``, and the fact ``provision``."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        given = dict(task_vars or {})
        checked = ArgumentSpecValidator(_ARGUMENTS).validate(dict(self._task.args))
        if checked.error_messages:
            return {**result, "failed": True, "msg": "; ".join(checked.error_messages)}
        arguments = checked.validated_parameters
        stage = str(arguments["stage"])
        result["stage"] = stage
        try:
            if stage == "gate":
                return {**result, **self._gate(given)}
            facts = self._facts(given, arguments.get("snapshots"))
            return {**result, **(self._plan(given, facts) if stage == "plan" else self._summary(given, facts))}
        except InputError as error:
            return {**result, "failed": True, "msg": error.line()}

    def _facts(self, given: Mapping[str, Any], snapshots: str | None) -> Mapping[str, Any]:
        """Return the fact ``peerlane``: judged with its hypervisor where the snapshots of both are at hand."""
        host = str(given["inventory_hostname"])
        if snapshots:
            names = [str(one) for one in (given.get("groups") or {}).get("all") or []]
            folders = [Path(snapshots) / name for name in names if (Path(snapshots) / name).is_dir()]
            fleet = {one.host: snapshot_room.build(one) for one in intake.read(folders, None)} if folders else {}
            if host in fleet:
                return facts_room.facts(fleet[host], engine.judge(fleet)[host])
        facts: Mapping[str, Any] = (given.get("ansible_facts") or {}).get("peerlane") or {}
        if not facts:
            raise InputError("no audit of this host has run", "", "run peerlane.gpu.host_evidence first")
        return facts

    def _plan(self, given: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        made = provision.plan(
            str(given["inventory_hostname"]),
            facts,
            str((_fact(given, "preflight").get("os") or {}).get("name") or ""),
            self._settings(given),
            provision.accepted_ids(self._value(given, "peerlane_accept_findings")),
        )
        kept = {**made.as_dict(), "judged": list(facts.get("findings") or [])}
        return {"msg": made.text(), "ansible_facts": {"provision": kept, "peerlane": dict(facts)}}

    def _gate(self, given: Mapping[str, Any]) -> dict[str, Any]:
        kept = _fact(given, "provision")
        message = provision.gate_message(kept, kept.get("judged") or [])
        if not message:
            return {"msg": "nothing forbids it"}
        lines: Sequence[str] = message.splitlines()
        return {"failed": True, "msg": message, "problems": lines, "peerlane_blocking": True}

    def _summary(self, given: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._value(given, "model_service_answer") or {}
        service = {
            "url": self._url(given),
            "prompt": (self._settings(given).get("model_service_golden") or {}).get("prompt"),
            "answer": answer.get("text"),
            "tokens_per_s": answer.get("tokens_per_s"),
        }
        made = provision.summary(
            str(given["inventory_hostname"]),
            list(_fact(given, "provision").get("findings") or []),
            list(facts.get("findings") or []),
            service,
            bool(self._task.check_mode),
        )
        return {"msg": made.pop("text"), "summary": made, "ansible_facts": {"peerlane": dict(facts)}}

    def _url(self, given: Mapping[str, Any]) -> str | None:
        """Return the address of the service; one that listens everywhere is named by the address of its host."""
        url = self._value(given, "model_service_url")
        if url is None:
            return None
        if str(self._value(given, "model_service_host")) not in ("0.0.0.0", "::"):  # noqa: S104  nothing is bound here
            return str(url)
        port = str(url).rstrip("/").rpartition(":")[2]
        return f"http://{self._value(given, 'ansible_host') or given['inventory_hostname']}:{port}"

    def _settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return every role option: the user's value, or the role's default."""
        found = {}
        for name, option in variables.role_options(ROLES).items():
            value = self._value(given, name)
            found[name] = option.default if value is None else value
        return found

    def _value(self, given: Mapping[str, Any], name: str) -> Any:
        try:
            return self._templar.template(given[name]) if name in given else None
        except AnsibleTemplateError:
            return None  # it depends on what a later task finds out


def _fact(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value: Mapping[str, Any] = (given.get("ansible_facts") or {}).get(name) or {}
    return value
