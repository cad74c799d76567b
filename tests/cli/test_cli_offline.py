"""What needs no host: rules, init, an audit of saved files, and where the output goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from peerlane import __version__, audit, extravars

# Enough to be judged, short enough to be read here.
GOOD_OS = 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nID=debian\nVERSION_ID="13"\n'


@pytest.fixture
def saved(tmp_path):
    folder = tmp_path / "saved" / "box"
    folder.mkdir(parents=True)
    (folder / "os-release").write_text(GOOD_OS)
    (folder / "detect").write_text("none\n")
    (folder / "nvidia-smi.txt").write_text(
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is installed and running.\n"
    )
    return folder


def test_version_and_help(peerlane):
    assert peerlane("--version").stdout == f"peerlane {__version__}\n"
    text = peerlane("--help").stdout
    for verb in ("audit", "collect", "provision", "doctor", "rules", "init", "lab"):
        assert f"    {verb} " in text
    for later in ("rollout", "tune", "benchmark", "remediate", "explain", "report"):
        assert f"    {later} " not in text
    assert "130 interrupted" in text


@pytest.mark.parametrize("verb", ["audit", "collect", "provision", "doctor", "rules", "init", "lab"])
def test_each_verb_has_help(peerlane, verb):
    done = peerlane(verb, "--help")

    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: peerlane {verb}")


def test_rules_lists_every_rule_and_shows_one(peerlane):
    listed = peerlane("rules").stdout.splitlines()
    one = peerlane("rules", "d5")

    assert len(listed) >= 40
    assert any(line.startswith("D5 ") for line in listed)
    assert one.returncode == 0
    assert one.stdout.startswith("D5 ")
    for row in ("why", "severity", "looks at", "sources"):
        assert f"\n  {row}" in one.stdout
    assert "did you mean D5?" in peerlane("rules", "D55").stderr


def test_audit_of_saved_files_in_both_formats(peerlane, saved):
    text = peerlane("audit", "--from", saved)
    document = peerlane("audit", "--from", saved, "--format", "json")

    assert "box" in text.stdout
    assert "\x1b" not in text.stdout
    shape = json.loads(document.stdout)
    assert shape["schema"] == "peerlane.audit/1"
    assert list(shape["hosts"]) == ["box"]
    assert text.returncode == document.returncode


def test_audit_as_a_page_and_as_markdown(peerlane, saved, tmp_path):
    page = peerlane("audit", "--from", saved, "--format", "html")
    pasted = peerlane("audit", "--from", saved, "--format", "markdown")

    assert page.stdout.startswith("<!doctype html>")
    assert page.stdout.rstrip().endswith("</html>")
    assert pasted.stdout.startswith("## Peerlane audit: 1 host")
    assert page.returncode == pasted.returncode == peerlane("audit", "--from", saved).returncode


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.html", "<!doctype html>"), ("a.md", "## Peerlane"), ("a.JSON", "{"), ("a.txt", "box  "), ("a", "box  ")],
)
def test_the_name_of_the_result_tells_its_format(peerlane, saved, tmp_path, name, start):
    done = peerlane("audit", "--from", saved, "-o", tmp_path / name)

    assert done.stdout == ""
    assert (tmp_path / name).read_text().startswith(start)


def test_a_given_format_beats_the_name(peerlane, saved, tmp_path):
    peerlane("audit", "--from", saved, "-o", tmp_path / "a.html", "--format", "json")

    assert json.loads((tmp_path / "a.html").read_text())["schema"] == "peerlane.audit/1"


def test_a_result_keeps_the_mode_of_the_file_that_it_replaces(peerlane, saved, tmp_path):
    place = tmp_path / "report.html"
    place.write_text("old")
    place.chmod(0o600)
    peerlane("audit", "--from", saved, "-o", place)

    assert place.stat().st_mode & 0o777 == 0o600
    assert "old" not in place.read_text()[:4]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [("", "is a folder"), ("no/such/report.html", "its folder does not exist")],
)
def test_a_result_that_cannot_be_kept_is_refused_in_one_line_before_anything_is_read(
    peerlane, tmp_path, name, complaint
):
    done = peerlane("audit", "--from", tmp_path / "not even read", "-o", tmp_path / name)

    assert done.returncode == 2
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_audit_from_stdin(peerlane, saved):
    done = peerlane("audit", "--from", "-", "--format", "json", stdin=(saved / "nvidia-smi.txt").read_text())

    assert done.returncode in (0, 1)
    assert json.loads(done.stdout)["schema"] == "peerlane.audit/1"


def test_audit_of_nonsense(peerlane):
    done = peerlane("audit", "--from", "-", stdin="what a nice day\n")

    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1


def test_output_file(peerlane, saved, tmp_path):
    place = tmp_path / "report.json"
    done = peerlane("audit", "--from", saved, "--format", "json", "-o", place)
    refused = peerlane("audit", "--from", saved, "-o", tmp_path / "no" / "such" / "folder")

    assert done.stdout == ""
    assert json.loads(place.read_text())["schema"] == "peerlane.audit/1"
    assert refused.returncode == 2
    assert "its folder does not exist" in refused.stderr


def test_the_collector_script_makes_a_folder_that_is_judged(peerlane, environment, tmp_path):
    printed = peerlane("collect", "--script")
    written = peerlane("collect", "--script", "-o", tmp_path / "collect.sh")
    subprocess.run(
        ["/bin/sh", str(tmp_path / "collect.sh"), "-z", str(tmp_path / "box")],
        capture_output=True,
        timeout=120,
        check=True,
    )
    folder = peerlane("audit", "--from", tmp_path / "box", "--format", "json", "--fail-on", "never")
    packed = peerlane("audit", "--from", tmp_path / "box.tar.gz", "--format", "json", "--fail-on", "never")

    assert (printed.returncode, written.stdout) == (0, "")
    assert printed.stdout == (tmp_path / "collect.sh").read_text()
    assert folder.returncode == 0
    assert json.loads(folder.stdout)["hosts"] == json.loads(packed.stdout)["hosts"]
    assert peerlane("collect").returncode == 2


def test_a_bad_part_is_named_on_stderr_and_the_rest_is_judged(peerlane, saved, tmp_path):
    (tmp_path / "empty").mkdir()
    done = peerlane("audit", "--from", saved, tmp_path / "empty", tmp_path / "no", "--fail-on", "never")

    assert done.returncode == 0
    assert "box" in done.stdout
    assert [line.split(": ")[-1].split(";")[0] for line in done.stderr.splitlines()] == [
        "is an empty folder",
        "does not exist",
    ]


def test_a_redacted_audit_names_nobody_and_can_be_judged_again(peerlane, environment, tmp_path):
    example = Path(__file__).parents[2] / "docs/examples/eight-gpu-guest"
    words = ("audit", "--from", example, "--redact", "--fail-on", "never", "--format", "json")
    first = peerlane(*words, "--save", tmp_path / "mine")
    again = peerlane(*words)
    shared = peerlane(*words, "--redact-key", "a key that we share")
    judged = peerlane("audit", "--from", tmp_path / "mine", "--fail-on", "never", "--format", "json")

    for done in (first, again, shared):
        assert done.returncode == 0
        assert "llm-guest" not in done.stdout
        assert "0a1b2c3d-1111" not in done.stdout
    assert json.loads(first.stdout)["hosts"] == json.loads(again.stdout)["hosts"]
    assert json.loads(first.stdout)["hosts"] == json.loads(judged.stdout)["hosts"]
    assert set(json.loads(first.stdout)["hosts"]).isdisjoint(json.loads(shared.stdout)["hosts"])
    key = tmp_path / "state" / "peerlane" / "redact.key"
    assert (key.stat().st_size, key.stat().st_mode & 0o777) == (32, 0o600)


class _Found:
    def __init__(self, rule, state, severity):
        self.rule, self.state, self.severity = rule, state, severity


@pytest.mark.parametrize(
    ("state", "severity", "fail_on", "code"),
    [
        ("fail", "critical", "high", 1),
        ("fail", "high", "high", 1),
        ("fail", "medium", "high", 0),
        ("fail", "medium", "medium", 1),
        ("fail", "critical", "never", 0),
        ("fail", "high", "critical", 0),
        ("warn", "high", "high", 0),
        ("warn", "low", "low", 1),
        ("unknown", "critical", "info", 0),
        ("pass", "critical", "info", 0),
    ],
)
def test_the_exit_code_follows_the_worst_finding(state, severity, fail_on, code):
    assert audit.verdict_code({"box": [_Found("X1", state, severity)]}, fail_on) == code


def test_a_reader_that_has_gone_is_no_error(environment, saved):
    done = subprocess.run(
        ["/bin/sh", "-c", f"'{sys.executable}' -m peerlane rules | head -n 1 >/dev/null"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stderr == ""


def test_a_closed_stdout_is_no_traceback(environment, saved):
    for redirect in (">&-", "2>&-", ">/dev/full"):
        done = subprocess.run(
            ["/bin/sh", "-c", f"'{sys.executable}' -m peerlane rules {redirect}"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "Traceback" not in done.stderr, redirect


def test_a_terminal_without_unicode(environment, saved):
    environment.update(LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    done = subprocess.run(
        [sys.executable, "-m", "peerlane", "audit", "--from", str(saved)],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert b"Traceback" not in done.stderr
    assert b"box" in done.stdout


def test_an_offline_audit_does_not_load_ansible(environment, saved):
    program = (
        "import sys; from peerlane.cli import main; main(sys.argv[1:]);"
        "print([name for name in sys.modules if name.split('.')[0] in ('ansible', 'ansible_runner', 'rich')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "audit", "--from", str(saved), "-o", "/dev/null"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["single_vm", "fleet"])
def test_init_writes_an_inventory_that_ansible_reads(peerlane, environment, kind):
    done = peerlane("init", "mine", "--kind", kind)
    again = peerlane("init", "mine", "--kind", kind)
    folder = peerlane.work / "mine"
    listed = subprocess.run(
        ["ansible-inventory", "-i", str(folder), "--list"],
        env={**environment, "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    groups = json.loads(listed.stdout)

    assert done.returncode == 0
    assert "hosts.yml" in done.stdout
    assert "peerlane doctor -i mine" in done.stderr
    assert again.returncode == 2
    assert "exists already, and nothing was written" in again.stderr
    assert set(groups["hypervisors"]["hosts"]).isdisjoint(groups["serving"]["hosts"])
    for facts in groups["_meta"]["hostvars"].values():
        assert facts["ansible_python_interpreter"] == "/usr/bin/python3"


@pytest.mark.parametrize("kind", ["single_vm", "fleet"])
def test_what_the_inventory_offers_in_comments_is_accepted(peerlane, kind):
    peerlane("init", "mine", "--kind", kind)
    folder = peerlane.work / "mine"
    offered = {}
    for place in folder.rglob("*.yml"):
        for line in place.read_text().splitlines():
            words = line.strip().removeprefix("# ")
            if line.strip().startswith("# ") and words.split(":")[0].isidentifier() and ": " in words:
                offered.update(yaml.safe_load(words))
    assert len(offered) >= 6
    (folder / "group_vars" / "serving.yml").write_text(yaml.safe_dump(offered))
    done = peerlane("doctor", "-i", folder, "-l", "nosuch")

    assert "no variable" not in done.stderr


def test_extra_variables_are_typed():
    types = {"model_service_version": "str", "model_service_port": "int"}
    words = [
        "model_service_version=0.10",
        "model_service_port=8000",
        "flag=false",
        "day=2024-01-02",
        "list=[1, 'x']",
        '{"deep": {"a": 1}}',
        "flag=true",
        "empty=",
    ]

    assert extravars.parse(words, types) == {
        "model_service_version": "0.10",
        "model_service_port": 8000,
        "flag": True,
        "day": "2024-01-02",
        "list": [1, "x"],
        "deep": {"a": 1},
        "empty": None,
    }


def test_extra_variables_from_a_file(tmp_path):
    place = tmp_path / "more.yml"
    place.write_text("a: 1\nb: no\n")

    assert extravars.parse([f"@{place}", "a=2"], {}) == {"a": 2, "b": False}
