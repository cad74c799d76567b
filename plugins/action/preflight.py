# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ask a host in one round trip, without Python there, whether it is fit for a change."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError, AnsibleTemplateError
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible.utils.vars import load_extra_vars

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import engines, preflight, variables

# The roles of this collection, beside the folder of plugins that this file lies in.
ROLES = Path(__file__).resolve().parents[2] / "roles"

LOCK_POLL_S = 5

_ARGUMENTS = {
    "purpose": {"type": "str", "choices": ["provision", "audit"], "default": "provision"},
    "lock_wait_s": {"type": "int", "default": 0},
}


class ActionModule(ActionBase):
    """Check the variables here, then the host there. Changes nothing, so check mode does the same."""

    TRANSFERS_FILES = False
    _requires_connection = True
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the fact ``preflight``; fail with one line for each problem."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        given = dict(task_vars or {})
        checked = ArgumentSpecValidator(_ARGUMENTS).validate(dict(self._task.args))
        if checked.error_messages:
            return {**result, "failed": True, "msg": "; ".join(checked.error_messages)}
        arguments = checked.validated_parameters
        try:
            options = variables.role_options(ROLES)
        except InputError as error:
            return {**result, "failed": True, "msg": error.line()}
        complaints = self._unknown(given, options) + self._mistyped(given)
        if arguments["purpose"] == "provision":
            complaints += [one.line(self._where(one.because, given)) for one in variables.missing(given, options)]
        if complaints:
            return _refused(result, complaints)

        try:
            wanted = self._wanted(given, options, str(arguments["purpose"]))
        except InputError as error:
            return _refused(result, [error.line()])
        answers, checks, offset_s = self._ask(wanted)
        deadline = time.monotonic() + float(arguments["lock_wait_s"])
        while preflight.lock_holder(answers) and time.monotonic() < deadline:
            left_s = int(deadline - time.monotonic())
            host = given.get("inventory_hostname", "")
            Display().display(f"peerlane: {host}: {preflight.lock_holder(answers)} holds apt; waits up to {left_s} s")
            time.sleep(LOCK_POLL_S)
            answers, checks, offset_s = self._ask(wanted)
        problems = [one.line() for one in preflight.stops(checks)]
        result["ansible_facts"] = {"preflight": preflight.facts(answers, checks, offset_s)}
        result["problems"] = problems
        if problems:
            result.update(failed=True, msg="\n".join(problems))
        else:
            result["msg"] = "fit"
        return result

    # --- variables

    def _unknown(self, given: dict[str, Any], options: dict[str, variables.Option]) -> list[str]:
        roles = variables.role_names(ROLES)
        found = variables.unknown_variables(given, options, roles)
        return [one.line(self._where(one.name, given)) for one in found]

    def _mistyped(self, given: dict[str, Any]) -> list[str]:
        """Return one line for each option whose value its role would refuse later."""
        complaints = []
        for place in sorted(ROLES.glob("*/meta/argument_specs.yml")):
            for name, spec in variables.argument_spec(place).items():
                if name not in given:
                    continue
                value = self._value(given[name])
                if value is None:
                    continue
                answer = ArgumentSpecValidator({name: {**spec, "required": False}}).validate({name: value})
                if answer.error_messages:
                    complaints.append(f"{self._where(name, given)}: {name} is {value!r}; {_type_text(spec)} is wanted")
        return complaints

    def _where(self, name: str, given: dict[str, Any]) -> str:
        if name in load_extra_vars(self._loader):
            return f"-e {name}"
        sources = [Path(str(one)) for one in given.get("ansible_inventory_sources") or []]
        return variables.where_set(name, sources) or f"variable {name}"

    # --- the host

    def _wanted(self, given: dict[str, Any], options: dict[str, variables.Option], purpose: str) -> preflight.Wanted:
        """Return what the checks need of the variables. Raises InputError for an engine that there is not."""

        def text(name: str) -> str:
            default = options[name].default if name in options else None
            value = self._value(given[name]) if name in given else default
            return "" if value is None else str(value)

        interpreter = text("ansible_python_interpreter")
        login_of: Callable[[], Any] = self._get_remote_user
        login = str(login_of() or "")
        known = preflight.Wanted(interpreter=interpreter if interpreter.startswith("/") else "", login=login)
        if purpose == "audit":
            return replace(known, audit_only=True)
        if text("inference_engine_name"):
            engine = engines.engine(text("inference_engine_name"), self._where("inference_engine_name", given))
            engines.version_of(engine, text("inference_engine_version"), self._where("inference_engine_version", given))
            known = replace(known, engine=engine.name, cpu_flags=engine.cpu_flags, formats=engine.formats)
        source = text("model_weights_source")
        if not source:
            return known
        here = text("model_weights_source_on") == "controller" and not source.startswith("hf://")
        return replace(
            known,
            port=_port(text("model_service_port")),
            service=text("model_service_name"),
            model_path=source if source.startswith("/") and not here else "",
            model_here=source if here else "",
            model_home=f"{text('model_weights_root')}/{text('model_weights_name')}@{text('model_weights_revision')}",
        )

    def _value(self, raw: Any) -> Any:
        try:
            return self._templar.template(raw)
        except AnsibleTemplateError:
            return None  # it depends on what a later task finds out

    def _ask(self, wanted: preflight.Wanted) -> tuple[preflight.Answers, tuple[preflight.Check, ...], float | None]:
        became = None
        command = preflight.command(wanted)
        started = time.time()
        try:
            answer = self._shell(command)
        except AnsibleError as error:
            became = preflight.become_problem(str(error), wanted.login)
            if became is None:
                raise
            answer = {}
        answers = preflight.parse(str(answer.get("stdout") or ""))
        if became is None and not answers.values:
            said = f"{answer.get('stdout') or ''}\n{answer.get('stderr') or ''}"
            became = preflight.become_problem(said, wanted.login)
        if became is not None:
            # Without root there is still much to say, and a user wants all of it at once.
            started = time.time()
            answer = self._shell(command, as_root=False)
            answers = preflight.parse(str(answer.get("stdout") or ""))
        offset_s = preflight.clock_offset_s(answers, started, time.time())
        checks = preflight.judge(answers, wanted, offset_s)
        if became is not None:
            checks = (became, *(one for one in checks if one.name != became.name))
        return answers, checks, offset_s

    def _shell(self, command: str, as_root: bool = True) -> dict[str, Any]:
        execute: Callable[..., dict[str, Any]] = self._low_level_execute_command
        return execute(command, executable="/bin/sh", sudoable=as_root)


def _refused(result: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    return {**result, "failed": True, "bad_input": True, "msg": "\n".join(lines), "problems": lines}


def _type_text(spec: dict[str, Any]) -> str:
    choices = spec.get("choices")
    return " or ".join(str(one) for one in choices) if choices else f"type {spec.get('type') or 'str'}"


def _port(value: Any) -> int | None:
    try:
        port = int(value)
    except (TypeError, ValueError):
        return None
    return port if 0 < port < 65536 else None
