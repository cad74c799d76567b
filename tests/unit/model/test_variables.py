"""A misspelt variable is refused with the name that was meant and the place that sets it."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import variables
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.variables import Option

ROLES = ("model_service", "nvidia_driver")
OPTIONS = {
    name: Option(name, role, required=required)
    for name, role, required in (
        ("model_service_name", "model_service", True),
        ("model_service_port", "model_service", False),
        ("model_service_args", "model_service", False),
        ("nvidia_driver_branch", "nvidia_driver", False),
        ("nvidia_driver_reboot_allowed", "nvidia_driver", False),
    )
}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("model_service_prot", "model_service_port"),
        ("model_service_arg", "model_service_args"),
        ("modle_service_port", "model_service_port"),
        ("nvidia_drvier_branch", "nvidia_driver_branch"),
        ("nvidia_driver_reboot", "nvidia_driver_reboot_allowed"),
        ("peerlane_accept_finding", "peerlane_accept_findings"),
        ("peerlane_save", "peerlane_save_to"),
    ],
)
def test_a_misspelt_name_is_refused_with_the_one_that_was_meant(name, meant):
    (found,) = variables.unknown_variables([name], OPTIONS, ROLES)

    assert found.suggestions[0] == meant
    assert f"did you mean {meant}" in found.line("hosts.yml:3")
    assert found.line("hosts.yml:3").startswith("hosts.yml:3: there is no variable ")


@pytest.mark.parametrize(
    "name",
    [
        "model_service_port",
        "peerlane_hosts",
        "ansible_host",
        "my_model_port",
        "service_port",
        "nvidia_smi_path",
        "__model_service_x",
        "model",
    ],
)
def test_other_names_are_the_users_own(name):
    assert variables.unknown_variables([name], OPTIONS, ROLES) == []


def test_a_name_like_nothing_still_belongs_to_a_role():
    (found,) = variables.unknown_variables(["nvidia_driver_zzzzzzzz"], OPTIONS, ROLES)

    assert "there is no variable nvidia_driver_zzzzzzzz" in found.line()


def test_a_required_option_is_missed_only_where_its_role_is_wanted():
    (found,) = variables.missing(["model_service_port"], OPTIONS)

    assert found.line("x.yml:1").startswith("x.yml:1: model_service_port is set and model_service_name is not")
    assert variables.missing(["model_service_port", "model_service_name"], OPTIONS) == []
    assert variables.missing(["nvidia_driver_branch"], OPTIONS) == []


def test_a_model_is_fetched_to_be_served():
    options = {**OPTIONS, "model_weights_source": Option("model_weights_source", "model_weights", required=True)}

    (found,) = variables.missing(["model_weights_source"], options)
    assert (found.name, found.because) == ("model_service_name", "model_weights_source")


def test_the_place_that_sets_a_name_is_found(tmp_path):
    hosts = tmp_path / "hosts.yml"
    hosts.write_text("all:\n  hosts:\n    a: {x_name: 1, x_flow: 2}\n  vars:\n    # x_block: no\n    x_block: 3\n")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text('---\n"x_quoted": 1\n')
    (tmp_path / "host_vars" / "a").mkdir(parents=True)
    (tmp_path / "host_vars" / "a" / "more.yml").write_text("x_host: 1\n")
    ini = tmp_path / "hosts.ini"
    ini.write_text("[all]\nb ansible_host=1.2.3.4 x_ini=5\n")

    assert variables.where_set("x_flow", [hosts]) == f"{hosts}:3"
    assert variables.where_set("x_block", [hosts]) == f"{hosts}:6"
    assert variables.where_set("x_quoted", [hosts]).endswith("all.yml:2")
    assert variables.where_set("x_host", [tmp_path]).endswith("more.yml:1")
    assert variables.where_set("x_ini", [ini]) == f"{ini}:2"
    assert variables.where_set("name", [hosts]) == ""


def test_options_are_read_from_every_entry_point(tmp_path):
    place = tmp_path / "some_role" / "meta" / "argument_specs.yml"
    place.parent.mkdir(parents=True)
    place.write_text(
        "argument_specs:\n  main:\n    options:\n      some_role_a: {type: int, required: true, description: [x, y]}\n"
        "  other:\n    options:\n      some_role_b:\n"
    )

    found = variables.role_options(tmp_path)

    assert found["some_role_a"] == Option("some_role_a", "some_role", "int", True, None, "x y")
    assert found["some_role_b"].type == "str"
    place.write_text("a: [")
    with pytest.raises(InputError, match="argument_specs"):
        variables.role_options(tmp_path)
