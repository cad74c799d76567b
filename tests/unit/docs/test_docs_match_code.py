"""What ``ansible-doc`` prints is what the code does: modules, filters and roles."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
MODULES = sorted((ROOT / "plugins/modules").glob("*.py"))
ROLES = sorted(path.parent.parent for path in (ROOT / "roles").glob("*/tasks/main.yml"))


def constants(path: Path) -> dict[str, Any]:
    """The top-level literals of a Python file, without importing it."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            try:
                found[target.id] = ast.literal_eval(node.value)
            except ValueError:
                continue
    return found


def argument_spec(path: Path) -> dict[str, Any]:
    """The spec that the code checks arguments against: the module's, or its action plugin's where that does it all."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    named = constants(path)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "AnsibleModule"):
            continue
        value = next(word.value for word in node.keywords if word.arg == "argument_spec")
        if isinstance(value, ast.Name):
            return named[value.id]
        return ast.literal_eval(value)
    return constants(ROOT / "plugins/action" / path.name)["_ARGUMENTS"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_documents_the_options_that_it_takes(path):
    documented = yaml.safe_load(constants(path)["DOCUMENTATION"])
    spec = argument_spec(path)
    options = documented.get("options") or {}

    assert documented["module"] == path.stem
    assert set(options) == set(spec)
    for name, option in spec.items():
        told = options[name]
        assert told.get("type", "str") == option.get("type", "str"), name
        assert told.get("default") == option.get("default"), name
        assert bool(told.get("required")) == bool(option.get("required")), name
        assert told.get("choices") == option.get("choices"), name
        assert told.get("elements") == option.get("elements"), name


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_module_shows_examples_by_full_name_and_what_it_returns(path):
    found = constants(path)

    tasks = yaml.safe_load(found["EXAMPLES"])
    assert any(f"peerlane.gpu.{path.stem}" in task for task in tasks)
    returned = yaml.safe_load(found["RETURN"])
    assert all("description" in value and "type" in value for value in returned.values())


@pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)
def test_a_role_s_variables_are_the_same_in_defaults_specs_and_readme(role):
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text(encoding="utf-8")) or {}
    options = yaml.safe_load((role / "meta/argument_specs.yml").read_text(encoding="utf-8"))["argument_specs"]["main"][
        "options"
    ]
    readme = (role / "README.md").read_text(encoding="utf-8")

    required = {name for name, option in options.items() if option.get("required") or "default" not in option}
    assert set(defaults) <= set(options)
    assert set(options) - set(defaults) <= required
    for name, value in defaults.items():
        assert name.startswith(role.name + "_"), name
        if "default" in options[name] and "{{" not in json.dumps(value):
            assert options[name]["default"] == value, name
        assert name in readme, f"{name} is not in the README"


@pytest.mark.parametrize("role", ROLES, ids=lambda path: path.name)
def test_every_topic_that_a_role_notifies_has_a_listener_of_its_own(role):
    text = "".join(path.read_text(encoding="utf-8") for path in (role / "tasks").rglob("*.yml"))
    topics = set(re.findall(r"notify: (.+)", text))
    handlers = role / "handlers/main.yml"
    listened = yaml.safe_load(handlers.read_text(encoding="utf-8")) if handlers.exists() else []

    heard = {one.get("listen", one["name"]) for one in listened} | {one["name"] for one in listened}
    assert {topic.strip().strip("\"'") for topic in topics} <= heard
