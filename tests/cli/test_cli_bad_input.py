"""Bad input is one clear line on stderr and exit code 2, before anything is started."""

from __future__ import annotations

import os

import pytest

HOSTS = "all:\n  hosts:\n    a: {ansible_connection: local}\n"


@pytest.fixture
def inventory(tmp_path):
    place = tmp_path / "hosts.yml"
    place.write_text(HOSTS)
    return place


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "required: COMMAND"),
        (("audt",), "invalid choice: 'audt'"),
        (("audit",), "nothing to audit; give -i INVENTORY for hosts, or --from PATH"),
        (("audit", "--from", "x", "-i", "y"), "--from reads files only; leave out -i and --save"),
        (("audit", "--from", "x", "--save", "y"), "--from reads files only"),
        (("audit", "--from", "x", "--redact-key", "abc"), "--redact-key needs --redact"),
        (("audit", "--from", "x", "--redact", "--redact-key", "abc"), "--redact-key: is too short a key"),
        (("audit", "--from", "x", "--redact", "--redact-key", "@/no/such"), "cannot be read: No such file"),
        (("collect",), "nothing to do; give --script"),
        (("audit", "--from"), "expected at least one argument"),
        (("audit", "--from", "/no/such/folder"), "/no/such/folder: does not exist"),
        (("audit", "--from", "x", "--format", "pdf"), "--format pdf: there is no such format; use text, json, html or"),
        (("audit", "--from", "x", "-o", "/no/such/a.html"), "/no/such/a.html: its folder does not exist; make it, or"),
        (("audit", "--from", "x", "--fail-on", "bad"), "invalid choice: 'bad'"),
        (("rules", "ZZ99"), "there is no rule ZZ99"),
        (("provision",), "the following arguments are required: -i/--inventory"),
        (("provision", "-i", "/no/such/hosts.yml"), "/no/such/hosts.yml: there is no such inventory; write one with"),
        (("doctor", "-i", "/no/such/hosts.yml"), "there is no such inventory"),
        (("init", "--kind", "cloud"), "invalid choice: 'cloud'"),
    ],
)
def test_bad_words(peerlane, words, said):
    done = peerlane(*words)

    assert done.returncode == 2
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty; write one with: peerlane init"),
        ("\n  \n", "is empty"),
        ("all: {hosts: {", "hosts.yml:1: is no YAML"),
        ("all:\n  hosts:\n   a: b: c\n", "hosts.yml:3: is no YAML: mapping values are not allowed here"),
        ("- a\n- b\n", "is no inventory: its top is no mapping of groups"),
        ("just words\n", "is no inventory"),
        ("all:\n  hosts: {}\n", "has no hosts; add one below `hosts:`"),
        ("all:\n  hosts: [a, b]\n", "hosts.yml: "),
    ],
)
def test_bad_inventory(peerlane, tmp_path, content, said):
    place = tmp_path / "hosts.yml"
    place.write_text(content)
    done = peerlane("doctor", "-i", place)

    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_inventory_that_is_no_text(peerlane, tmp_path):
    place = tmp_path / "hosts.yml"
    place.write_bytes(b"\x80\xff\x00")

    assert "is no text (not UTF-8)" in peerlane("doctor", "-i", place).stderr


def test_empty_inventory_folder(peerlane, tmp_path):
    (tmp_path / "empty").mkdir()
    done = peerlane("doctor", "-i", tmp_path / "empty")

    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_inventory_that_may_not_be_read(peerlane, inventory):
    inventory.chmod(0)

    assert "cannot be read: permission denied; check its owner and mode" in peerlane("doctor", "-i", inventory).stderr


def test_unknown_limit(peerlane, inventory):
    done = peerlane("doctor", "-i", inventory, "-l", "nosuch")

    assert done.returncode == 2
    assert "-l: no host matches 'nosuch'; list the hosts with" in done.stderr


def test_only_hypervisors(peerlane, tmp_path):
    place = tmp_path / "hosts.yml"
    place.write_text("hypervisors:\n  hosts:\n    pve: {}\n")
    done = peerlane("provision", "-i", place)

    assert done.returncode == 2
    assert "nothing to provision: every host is in the group hypervisors" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("-e", "nccl_settings_stat=absent"),
            "-e: there is no variable nccl_settings_stat; did you mean nccl_settings_state?",
        ),
        (("-e", "peerlane_accept_finding=D1"), "did you mean peerlane_accept_findings?"),
        (("-e", "novalue"), "-e novalue: is no NAME=VALUE"),
        (("-e", "a-b=1"), "-e a-b=1: is no NAME=VALUE"),
        (("-e", "x=[1"), "-e x=[1: is no YAML"),
        (("-e", "{a: [}"), "is no YAML"),
        (("-e", "@/no/such/file.yml"), "-e @/no/such/file.yml: cannot be read: No such file or directory"),
    ],
)
def test_bad_extra_variables(peerlane, inventory, words, said):
    done = peerlane("provision", "-i", inventory, *words)

    assert done.returncode == 2
    assert said in done.stderr
    assert not (peerlane.work.parent / "state").exists(), "something was started"


def test_misspelt_variables_of_the_inventory_are_named_with_their_place(peerlane, tmp_path, inventory):
    inventory.write_text(HOSTS + "  vars:\n    nccl_settings_pth: /x\n")
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "group_vars" / "all.yml").write_text("---\nmodel_weights_conections: 3\n")
    done = peerlane("doctor", "-i", inventory)

    assert done.returncode == 2
    assert (
        f"peerlane: {inventory}:5: there is no variable nccl_settings_pth; did you mean nccl_settings_path?"
        in done.stderr
    )
    assert (
        "all.yml:2: there is no variable model_weights_conections; did you mean model_weights_connections"
        in done.stderr
    )


def test_a_model_without_its_name(peerlane, inventory):
    done = peerlane("provision", "-i", inventory, "-e", "model_weights_source=/x")

    assert done.returncode == 2
    assert "-e: model_weights_source is set and model_weights_name is not; set it" in done.stderr


def test_a_state_folder_that_cannot_be_made(peerlane, environment, inventory, tmp_path):
    (tmp_path / "file").write_text("")
    environment["XDG_STATE_HOME"] = str(tmp_path / "file")
    done = peerlane("doctor", "-i", inventory)

    assert done.returncode == 2
    assert "set XDG_STATE_HOME to a folder of yours" in done.stderr


def test_a_result_that_cannot_be_kept_is_refused_before_a_host_is_asked(peerlane, inventory, tmp_path):
    done = peerlane("audit", "-i", inventory, "-o", tmp_path)

    assert done.returncode == 2
    assert not (peerlane.work.parent / "state").exists()
