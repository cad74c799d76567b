"""The key of a repository: only the one that was asked for is trusted. The keys are made by gpg for each test run."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from ansible_collections.peerlane.gpu.plugins.module_utils import openpgp
from ansible_collections.peerlane.gpu.plugins.modules import repository_key
from peerlane.lab import nvidia_repository

pytestmark = pytest.mark.skipif(shutil.which("gpg") is None, reason="gpg makes the keys of these tests")


@pytest.fixture(scope="module")
def key() -> Iterator[nvidia_repository.SigningKey]:
    # gpg's sockets do not fit into pytest's long paths.
    with tempfile.TemporaryDirectory(prefix="plk") as folder:
        yield nvidia_repository.make_key(Path(folder) / "k")
        subprocess.run(["gpgconf", "--homedir", f"{folder}/k", "--kill", "all"], check=False, timeout=30)


Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(**options: Any) -> tuple[int, dict[str, Any]]:
        with patch_module_args(options), pytest.raises(SystemExit) as stop:
            repository_key.main()
        return int(stop.value.code or 0), json.loads(capsys.readouterr().out)

    return call


def test_the_fingerprint_is_that_of_gpg(key: nvidia_repository.SigningKey) -> None:
    armored = key.public()

    assert openpgp.fingerprints(armored) == [key.fingerprint]
    assert openpgp.fingerprints(openpgp.binary(armored)) == [key.fingerprint]


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "no OpenPGP public key"),
        (b"<html>404</html>", "no OpenPGP packet at byte 0"),
        (b"\x99\x01\x0d\x04", "cut off"),
        (b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmDME", "no end line"),
        (b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nm!ME\n-----END PGP PUBLIC KEY BLOCK-----", "damaged"),
        (b"\xc6\x01\x03", "version 3"),
    ],
)
def test_what_is_no_key_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(openpgp.KeyFileError, match=complaint):
        openpgp.fingerprints(data)


def test_a_key_is_written_once_and_then_left(key: nvidia_repository.SigningKey, run: Run, tmp_path: Path) -> None:
    source, dest = tmp_path / "key.pub", tmp_path / "rings" / "lab.gpg"
    source.write_bytes(key.public())
    options = {"url": f"file://{source}", "fingerprint": key.fingerprint, "dest": str(dest)}

    code, first = run(**options)
    _, second = run(**options)

    assert (code, first["changed"], second["changed"]) == (0, True, False)
    assert dest.stat().st_mode & 0o777 == 0o644
    assert openpgp.fingerprints(dest.read_bytes()) == [key.fingerprint]


def test_check_mode_checks_and_writes_nothing(key: nvidia_repository.SigningKey, run: Run, tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_bytes(key.public())
    dest = tmp_path / "lab.gpg"

    _, found = run(url=str(tmp_path / "key.pub"), fingerprint=key.fingerprint, dest=str(dest), _ansible_check_mode=True)

    assert found["changed"] is True
    assert not dest.exists()


def test_another_key_is_refused_and_both_are_named(key: nvidia_repository.SigningKey, run: Run, tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_bytes(key.public())
    dest = tmp_path / "lab.gpg"
    expected = "EB693B3035CD5710E231E123A4B469963BF863CC"

    code, found = run(url=str(tmp_path / "key.pub"), fingerprint=expected, dest=str(dest))

    assert code == 1
    assert key.fingerprint in found["msg"] and expected in found["msg"]
    assert not dest.exists()


def test_a_second_key_in_the_file_is_refused(key: nvidia_repository.SigningKey, run: Run, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="plk") as folder:
        other = nvidia_repository.make_key(Path(folder) / "k")
        both = openpgp.binary(key.public()) + openpgp.binary(other.public())
        subprocess.run(["gpgconf", "--homedir", f"{folder}/k", "--kill", "all"], check=False, timeout=30)
    (tmp_path / "key.pub").write_bytes(both)

    code, found = run(url=str(tmp_path / "key.pub"), fingerprint=key.fingerprint, dest=str(tmp_path / "lab.gpg"))

    assert code == 1
    assert other.fingerprint in found["msg"]


@pytest.mark.parametrize(
    ("url", "fingerprint", "complaint"),
    [
        ("/no/such/key", "A" * 40, "/no/such/key: No such file"),
        ("ftp://x/key", "A" * 40, "is no URL and no absolute path"),
        ("/no/such/key", "3bf863cc", "is not 40 hexadecimal digits"),
    ],
)
def test_bad_options_are_named(run: Run, url: str, fingerprint: str, complaint: str, tmp_path: Path) -> None:
    code, found = run(url=url, fingerprint=fingerprint, dest=str(tmp_path / "x"))

    assert code == 1
    assert complaint in found["msg"]
