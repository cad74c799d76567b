"""What a lab host takes over from the machine: package sources, proxies, certificates, pip settings."""

from __future__ import annotations

import pytest

from peerlane.lab import image

ONE_LINE = """\
# deb http://old.example/debian trixie main
deb [signed-by=/usr/share/keyrings/x.gpg] http://deb.example/debian bookworm main
deb http://deb.example/debian-security bookworm-security main
"""
DEB822 = """\
Types: deb deb-src
URIs: http://mirror.example/debian/
Suites: trixie trixie-updates
Components: main

Types: deb
URIs: http://mirror.example/debian-security/
Suites: trixie-security
Components: main
"""
UBUNTU = "Types: deb\nURIs: http://archive.example/ubuntu/\nSuites: noble noble-security\nComponents: main\n"
DISABLED = "Types: deb\nEnabled: no\nURIs: http://x.example\nSuites: trixie\n"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([ONE_LINE], ("http://deb.example/debian", "http://deb.example/debian-security")),
        ([DEB822], ("http://mirror.example/debian", "http://mirror.example/debian-security")),
        ([UBUNTU, DEB822], ("http://mirror.example/debian", "http://mirror.example/debian-security")),
        ([UBUNTU], (image.DEFAULT_MIRROR, image.DEFAULT_SECURITY)),
        ([DISABLED], (image.DEFAULT_MIRROR, image.DEFAULT_SECURITY)),
        ([], (image.DEFAULT_MIRROR, image.DEFAULT_SECURITY)),
    ],
)  # fmt: skip
def test_the_mirror_is_the_one_that_the_machine_uses(texts: list[str], expected: tuple[str, str]) -> None:
    assert image.debian_mirrors(texts) == expected


def test_network_variables_go_along_and_others_do_not() -> None:
    environment = {
        "HTTPS_PROXY": "http://proxy.example:3128",
        "http_proxy": "http://127.0.0.1:3128",
        "no_proxy": "localhost,127.0.0.1",
        "PIP_INDEX_URL": "https://pypi.example/simple",
        "PIP_FIND_LINKS": "/srv/wheels",
        "PIP_EXTRA_INDEX_URL": "https://a.example/simple file:///srv/index",
        "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
        "REQUESTS_CA_BUNDLE": "/home/me/ca.pem",
        "HOME": "/root",
        "API_TOKEN": "x",
    }
    kept = dict(image.usable_variables(environment, lambda path: path.startswith("/etc/ssl/")))
    assert kept == {
        "HTTPS_PROXY": "http://proxy.example:3128",
        "no_proxy": "localhost,127.0.0.1",
        "PIP_INDEX_URL": "https://pypi.example/simple",
        "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
    }


@pytest.mark.parametrize(
    ("text", "usable"),
    [
        ("[global]\nindex-url = https://pypi.example/simple\n", True),
        ("[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n", True),
        ("[global]\nfind-links = /srv/wheels\n", False),
        ("[global]\nextra-index-url=file:///srv/simple\n", False),
        ("[global]\nindex-url = http://localhost:3141/root/pypi\n", False),
    ],
)
def test_pip_settings_that_point_into_the_machine_stay_there(text: str, usable: bool) -> None:
    assert image.usable_pip_settings(text) == (text if usable else None)


def test_sources_have_every_component_and_the_security_suite() -> None:
    machine = image.Machine("http://m.example/debian", "http://s.example/debian-security", (), (), ())
    text = image.sources_text("bookworm", machine)
    assert "URIs: http://m.example/debian\nSuites: bookworm bookworm-updates\n" in text
    assert "URIs: http://s.example/debian-security\nSuites: bookworm-security\n" in text
    assert text.count("Components: main contrib non-free non-free-firmware") == 2


def test_a_changed_setting_means_another_tree() -> None:
    one = image.Machine("http://m.example/debian", "http://s.example", (), (), ())
    other = image.Machine("http://m.example/debian", "http://s.example", ('Acquire::http::Proxy "http://p";',), (), ())
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("line", "taken"),
    [
        ('Acquire::http::Proxy "http://proxy.example:3128";', True),
        ('Acquire::Check-Valid-Until "false";', True),
        ('Acquire::Retries "3";', True),
        ('APT::Update::Post-Invoke:: "rm -f /x";', False),
        ('Acquire::IndexTargets::deb::DEP-11 "";', False),
    ],
)
def test_apt_settings_about_fetching_go_along(line: str, taken: bool) -> None:
    assert bool(image.APT_SETTINGS.match(line)) is taken
