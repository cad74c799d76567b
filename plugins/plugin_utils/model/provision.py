"""The plan of a provision and its summary: what is known of a host, what each role will do there, what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# In the order in which the playbook applies them.
ROLES = (
    "host_baseline",
    "nvidia_driver",
    "cuda_toolkit",
    "inference_engine",
    "model_weights",
    "nccl_settings",
    "model_service",
)

# An answer is shown to be seen at a glance; the whole of it is in the service's own output.
_TEXT_WIDTH = 90

# A role that nobody asked for, in place of what it would do.
_NO_MODEL = "model_weights_source is not set"
_NO_GPU = "no NVIDIA GPU on the bus"


@dataclass(frozen=True)
class Step:
    """What one role does on one host, or why it is off."""

    role: str
    active: bool
    text: str


# A blocking finding is no reason to stop where the run itself deals with it: these roles put these findings right ...
_REPAIRED_BY = {"nvidia_driver": ("F1", "F2", "F4", "F5", "H4")}
# ... and these only say that there is no proven path between GPUs. The host is then served without one: NCCL's and the
# engine's own peer-to-peer are switched off (fail closed), which costs speed and nothing else.
_FAILS_CLOSED = ("A2", "D1", "D2", "D4", "D5", "D6")


@dataclass(frozen=True)
class Plan:
    """The plan of one host.

    ``blocking``: ids that stop it; ``accepted``: ids that would, and that the user accepts; ``handled``: ids that this
    run deals with, each with how.
    """

    host: str
    known: str
    steps: tuple[Step, ...]
    findings: tuple[str, ...] = ()
    blocking: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    handled: tuple[str, ...] = ()

    def roles(self) -> list[str]:
        """Return the roles that are applied."""
        return [step.role for step in self.steps if step.active]

    def text(self) -> str:
        """Return the plan as a person reads it."""
        lines = [f"{self.host}: {self.known}"]
        width = max(len(step.role) for step in self.steps)
        for step in self.steps:
            lines.append(f"  {step.role:{width}}  {'' if step.active else 'off: '}{step.text}")
        lines += [f"  {'findings':{width}}  {_list(self.findings) or 'none'}"]
        if self.handled:
            lines.append(f"  {'handled':{width}}  {', '.join(self.handled)}")
        if self.accepted:
            lines.append(f"  {'accepted':{width}}  {', '.join(self.accepted)} (peerlane_accept_findings)")
        if self.blocking:
            lines.append(f"  {'STOP':{width}}  {', '.join(self.blocking)} must be dealt with first")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain types."""
        return {**asdict(self), "roles": self.roles(), "steps": [asdict(step) for step in self.steps]}


def plan(
    host: str,
    facts: Mapping[str, Any],
    os_name: str,
    settings: Mapping[str, Any],
    accepted: Sequence[str] = (),
) -> Plan:
    """Plan one host.

    ``facts``: the fact ``peerlane`` of design section 5. ``settings``: every role option by name, the user's value or
    the role's default. ``accepted``: ids of findings that must not stop it.
    """
    gpus = list(facts.get("gpus") or [])
    steps = tuple(Step(role, *_STEPS[role](settings, gpus, facts)) for role in ROLES)
    active = {step.role for step in steps if step.active}
    handled = {rule: role for role, rules in _REPAIRED_BY.items() if role in active for rule in rules}
    if "nccl_settings" in active:
        handled.update(dict.fromkeys(_FAILS_CLOSED, "served without peer-to-peer"))
    found = [str(one) for one in facts.get("blocking") or []]
    stops = [one for one in found if one not in handled]
    return Plan(
        host=host,
        known=known(facts, os_name),
        steps=steps,
        findings=bad_findings(facts.get("findings") or []),
        blocking=tuple(one for one in stops if one not in accepted),
        accepted=tuple(one for one in stops if one in accepted),
        handled=tuple(f"{one} ({handled[one]})" for one in found if one in handled),
    )


def known(facts: Mapping[str, Any], os_name: str) -> str:
    """Return what is known of a host in one line: its role, system, GPUs and driver."""
    role = str(facts.get("role") or "role unknown").replace("_", " ")
    gpus = [str(one.get("name") or one.get("bdf") or "a GPU") for one in facts.get("gpus") or []]
    counted = [f"{gpus.count(name)}x {name}" for name in dict.fromkeys(gpus)]
    driver = (facts.get("driver") or {}).get("version")
    parts = [role, os_name or "system unknown", ", ".join(counted) or "no NVIDIA GPU"]
    if gpus:
        parts.append(f"driver {driver}" if driver else "no driver running")
    return " · ".join(parts)


def bad_findings(findings: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return ``ID (severity)`` of each finding that says that something is wrong, each once, the worst first."""
    order = ("critical", "high", "medium", "low", "info")
    bad = [one for one in findings if one.get("state") in ("fail", "warn")]
    bad.sort(key=lambda one: (order.index(str(one.get("severity") or "info")), str(one.get("rule"))))
    return tuple(dict.fromkeys(f"{one.get('rule')} ({one.get('severity')})" for one in bad))


def accepted_ids(value: Any) -> list[str]:
    """Read ``peerlane_accept_findings``: a list of ids, or one string with commas."""
    rows = value.split(",") if isinstance(value, str) else value or []
    return [str(one).strip().upper() for one in rows if str(one).strip()]


def gate_message(plan_: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> str:
    """Return one line for each finding that stops the host, or "" where none does."""
    titles = {str(one.get("rule")): str(one.get("title")) for one in findings if one.get("state") in ("fail", "warn")}
    lines = []
    for rule in plan_.get("blocking") or []:
        todo = f"see: peerlane rules {rule}; or accept it: -e peerlane_accept_findings={rule}"
        lines.append(f"{rule}: {titles.get(str(rule), 'a blocking finding')}; {todo}")
    return "\n".join(lines)


def summary(
    host: str,
    before: Sequence[str],
    findings: Sequence[Mapping[str, Any]],
    service: Mapping[str, Any],
    check_mode: bool,
) -> dict[str, Any]:
    """Return what came of a host: findings that went, stayed and came, and what its service said.

    ``service``: ``url``, ``prompt``, ``answer``, ``tokens_per_s``, each None where the service did not say it.
    """
    after = bad_findings(findings)
    shape: dict[str, Any] = {
        "gone": [one for one in before if one not in after],
        "left": [one for one in after if one in before],
        "new": [one for one in after if one not in before],
        "service": dict(service),
    }
    lines = []
    for name, label in (("gone", "no longer found"), ("left", "still found"), ("new", "newly found")):
        if shape[name]:
            lines.append(f"  {label:15}  {_list(shape[name])}")
    if not lines:
        lines.append("  findings         none, before and after")
    if check_mode:
        lines.append("  service          check mode: nothing was changed or started")
    else:
        lines += _service_lines(service)
    return {**shape, "text": "\n".join([f"{host}:", *lines])}


def _service_lines(service: Mapping[str, Any]) -> list[str]:
    if not service.get("url"):
        return [f"  service          none ({_NO_MODEL})"]
    lines = [f"  service          {service['url']}"]
    if service.get("answer"):
        lines.append(f"  asked            {_one_line(service.get('prompt') or '')}")
        lines.append(f"  answered         {_one_line(service['answer'])}")
    if service.get("tokens_per_s") is not None:
        lines.append(f"  speed            {float(service['tokens_per_s']):.1f} tokens/s (one stream, prompt included)")
    return lines


def _one_line(text: Any) -> str:
    words = " ".join(str(text).split())
    return words if len(words) <= _TEXT_WIDTH else f"{words[: _TEXT_WIDTH - 1]}…"


def _list(items: Sequence[str]) -> str:
    shown = ", ".join(items[:12])
    return f"{shown} and {len(items) - 12} more" if len(items) > 12 else shown


# --- what each role will do -----------------------------------------------------------------------------------------

Settings = Mapping[str, Any]
Gpus = Sequence[Mapping[str, Any]]


def _baseline(settings: Settings, gpus: Gpus, facts: Mapping[str, Any]) -> tuple[bool, str]:
    return True, "packages, limits, service user"


def _driver(settings: Settings, gpus: Gpus, facts: Mapping[str, Any]) -> tuple[bool, str]:
    enabled = settings.get("nvidia_driver_enabled")
    if enabled is False or str(enabled).lower() in ("false", "no", "off"):
        return False, "nvidia_driver_enabled is false"
    forced = str(enabled).lower() in ("true", "yes", "on")
    if not gpus and not forced:
        return False, _NO_GPU
    branch = settings.get("nvidia_driver_branch")
    now = (facts.get("driver") or {}).get("version")
    wanted = f"branch {branch}" if branch and str(branch) != "auto" else "the branch that the GPUs need"
    return True, f"{wanted}; {f'{now} runs now' if now else 'none runs now'}"


def _toolkit(settings: Settings, gpus: Gpus, facts: Mapping[str, Any]) -> tuple[bool, str]:
    versions = [str(one) for one in settings.get("cuda_toolkit_versions") or []]
    return (True, ", ".join(versions)) if versions else (False, "cuda_toolkit_versions is empty")


def _engine(settings: Settings, gpus: Gpus, facts: Mapping[str, Any]) -> tuple[bool, str]:
    version = settings.get("inference_engine_version")
    return True, f"{settings.get('inference_engine_name')} {version or '(the version that Peerlane is tested with)'}"


def _weights(settings: Settings, gpus: Gpus, facts: Mapping[str, Any]) -> tuple[bool, str]:
    source = settings.get("model_weights_source")
    if not source:
        return False, _NO_MODEL
    place = " on the controller" if settings.get("model_weights_source_on") == "controller" else ""
    name = settings.get("model_weights_name")
    return True, f"{f'{name} from ' if name else ''}{source}{place}"


def _nccl(settings: Settings, gpus: Gpus, facts: Mapping[str, Any]) -> tuple[bool, str]:
    advised = (facts.get("advice") or {}).get("nccl_env") or {}
    extra = settings.get("nccl_settings_extra") or {}
    names = list(dict.fromkeys([*advised, *extra]))
    return True, ", ".join(names) if names else "nothing to write: the audit justifies no variable"


def _service(settings: Settings, gpus: Gpus, facts: Mapping[str, Any]) -> tuple[bool, str]:
    if not settings.get("model_weights_source"):
        return False, _NO_MODEL
    return True, f"{settings.get('model_service_name')} on port {settings.get('model_service_port')}"


_STEPS: Mapping[str, Callable[[Settings, Gpus, Mapping[str, Any]], tuple[bool, str]]] = {
    "host_baseline": _baseline,
    "nvidia_driver": _driver,
    "cuda_toolkit": _toolkit,
    "inference_engine": _engine,
    "model_weights": _weights,
    "nccl_settings": _nccl,
    "model_service": _service,
}
