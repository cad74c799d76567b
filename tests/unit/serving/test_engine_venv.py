"""Why an installer failed, in words, and what a rename needs."""

from __future__ import annotations

import pytest

from ansible_collections.peerlane.gpu.plugins.module_utils import engine_venv


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (
            "WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(<x>: Failed to "
            "establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/xllamacpp/\n"
            "ERROR: Could not find a version that satisfies the requirement xllamacpp==1 (from versions: none)\n"
            "ERROR: No matching distribution found for xllamacpp==1\n",
            "no network or no DNS",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement xllamacpp==1 (from versions: 2, 3)\n"
            "ERROR: No matching distribution found for xllamacpp==1",
            "has no xllamacpp==1 for this machine",
        ),
        ("[Errno 111] Connection refused'))': /simple/x/", "can't be reached"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "does not match the hash"),
        ("SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]'))", "is not trusted"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("HTTPError: 403 Client Error: Forbidden for url: https://index", "refuses access"),
        ("ReadTimeoutError: HTTPSConnectionPool: Read timed out.", "did not answer in time"),
        ("error: Failed to fetch\n  Caused by: dns error: failed to lookup address information", "no DNS"),
        ("nothing that is known\nERROR: some new failure\ntrailer", "ERROR: some new failure"),
        ("", "said nothing"),
    ],
)
def test_the_cause_of_a_failed_installation(output, says):
    assert says in engine_venv.install_cause(output)


def test_scripts_get_the_last_place_of_the_venv():
    script = b"#!/opt/e/.building-x1/bin/python3\nprint()\n"
    assert engine_venv.relocated(script, "/opt/e/.building-x1", "/opt/e/one") == b"#!/opt/e/one/bin/python3\nprint()\n"


@pytest.mark.parametrize(
    ("found", "oldest", "older"), [((3, 9), "3.10", True), ((3, 10), "3.10", False), ((3, 11), "3.9", False)]
)
def test_python_versions_are_compared_as_numbers(found, oldest, older):
    assert engine_venv.older(found, oldest) is older


@pytest.mark.parametrize(
    ("cpuinfo", "missing"),
    [
        ("processor\t: 0\nflags\t\t: fpu fma f16c bmi2\n", ["avx2"]),
        ("flags\t\t: fpu avx2 fma\nvmx flags\t: ept\n", []),
        ("Features\t: fp asimd\n", []),
    ],
)
def test_cpu_features_are_missed_only_where_the_cpu_lists_some(cpuinfo, missing):
    assert engine_venv.missing_flags(cpuinfo, ["avx2", "fma"]) == missing
