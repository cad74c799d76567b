"""Redaction: evidence that can be shown to strangers, and that still joins.

UUIDs, serial numbers, host names, user names, MAC and IP addresses become masks. A mask is a keyed hash of the value:
the same value gives the same mask wherever it stands, so that two redacted hosts of one fleet still belong together,
and nobody without the key can try out all addresses to find which one it was. Masks look like what they replace (a
UUID like a UUID), so that parsers read them. PCI addresses, versions, model names and VM ids stay.

Evidence is redacted before it is parsed: what is saved and every report are then made of masks alone.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import replace

from ...module_utils.pci_serial import without_serial_numbers
from .evidence import Evidence, EvidenceSet

# Words that outputs use themselves: as names of machines they are masked only where nothing but a name can stand.
_ORDINARY = re.compile(
    r"(?:localhost|debian|ubuntu|proxmox|pve|nvidia|linux|gpus?|hosts?|nodes?|root|kvm|qemu|vms?|servers?|guests?|none|"
    r"kernel|system|cuda|nccl|vllm|sglang|lab|test|default|users?|admin|docker|container|x86|amd|intel|memory|cpus?|"
    r"names?|models?|boot|work|data|driver|bridge|switch|port|stdin|pasted|nic|dev|card|slot|bus|eth|mem|numa)"
    r"[-_.]?\d{0,4}|\d+|[0-9a-f:.]+|.{1,2}",
    re.IGNORECASE,
)
# Where nothing but the name of a machine can stand: group 1 is what stays in front, group 2 is the name.
_NAME = r"([A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?)"
_PLACES = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        rf"^(Linux ){_NAME}(?= \d+\.\d)",
        rf"^([ \t]*(?:Static|Transient|Pretty) hostname: ){_NAME}(?=\s*$)",
        rf"((?:Set hostname to|Hostname set to) <){_NAME}(?=>)",
        rf"^([A-Z][a-z]{{2}} [ \d]\d \d\d:\d\d:\d\d ){_NAME}(?= [\w.@/()-]+(?:\[\d+\])?:)",
        rf"^(\d{{4}}-\d\d-\d\dT\S+ ){_NAME}(?= [\w.@/()-]+(?:\[\d+\])?:)",
        rf"^((?:(?:cur|new|del) )?name: ){_NAME}(?=\s*$)",
        rf"(\bnode=){_NAME}(?=[,\s]|$)",
        rf"(\bUPID:){_NAME}(?=:)",
        rf"(\bguest=){_NAME}(?=[,\s]|$)",
        rf"(^-name\n){_NAME}(?=[,\s]|$)",
        rf"( -name '?){_NAME}(?=[,'\s]|$)",
        rf"(<name>){_NAME}(?=</name>)",
        rf"^([ \t]*){_NAME}(?=:\d+:\d+ \[\d+\] NCCL )",
        rf"(\b[\w.-]{{1,40}}@){_NAME}(?=:[~/]| [~/]\S*\]?[$#])",
    )
)
_LIBVIRT_NAME = _PLACES[11]

_UUID = re.compile(r"(?<![0-9A-Fa-f])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Fa-f])")
_MAC = re.compile(r"(?<![\w:.-])[0-9A-Fa-f]{2}(?::[0-9A-Fa-f]{2}){5,19}(?![\w:]|\.\d)")
_GUID = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{4}(?::[0-9A-Fa-f]{4}){3}(?![\w:]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?=[0-9A-Fa-f:]*\d)[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?![\w:])")
_IPV4 = re.compile(r"(?<![\w.+~-])(?:\d{1,3}\.){3}\d{1,3}(?![\w+~-]|\.\d)")
# In front of four numbers with dots, these make a version of them.
_VERSION_IN_FRONT = re.compile(r"(?:version|\bver|\brev|release|firmware|bios|driver|==|-cu\d+)[\s:=]*$", re.IGNORECASE)
# Sources that are lists of versions.
_VERSION_SOURCES = ("dpkg", "dkms", "apt", "pve.version", "modinfo", "nvidia_libraries", "systemctl.version")
_HOME = re.compile(r"(/home/)([A-Za-z0-9._-]+)")
_URL = re.compile(r"(\b[a-z][a-z0-9+]{1,9}://(?:[^\s/@\"']*@)?)([A-Za-z0-9.-]+)")
_PUBLIC = re.compile(
    r"(?:.*\.)?(?:nvidia\.com|debian\.org|ubuntu\.com|proxmox\.com|kernel\.org|github\.com|huggingface\.co|pypi\.org|"
    r"pytorch\.org|docker\.io|python\.org|vllm\.ai|sglang\.ai|freedesktop\.org|launchpad\.net)|localhost",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"(://)[^\s/@\"']+@")
_SERIALS = tuple(
    re.compile(pattern, re.MULTILINE | re.IGNORECASE)
    for pattern in (
        r"^([ \t]*(?:Chassis |Board |Product |System )?Serial(?: ?Number)?[ \t]*:[ \t]*)(\S[^\n]*?)(?=[ \t]*$)",
        r"(<(?:chassis_)?serial(?:_number)?>)([^<\n]+)",
        r"(<entry name=['\"]serial['\"]>)([^<\n]+)",
        r"(\b(?:product_|board_|chassis_)serial: )(\S[^\n]*?)(?=[ \t]*$)",
        r"(\bserial=)([^,\s\"']+)",
        r"(Device Serial Number )([0-9a-f-]{8,})",
        r"(NVRM: .{0,40}serial number(?:: | is ))(\w+)",
    )
)
_NO_SERIAL = re.compile(r"\[?(?:N/?A|none|unknown|not specified|0+|masked|\.\.+|.*requires reset)\]?", re.IGNORECASE)
_CSV_HEAD = re.compile(r"^(?=.*,)(?=.*(?:^|, ?)(?:serial|gpu_serial)(?:,|$)).*$", re.MULTILINE)


class Redactor:
    """Masks with one key. First ``learn`` every host of a fleet, then ``evidence`` each."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._names: set[str] = set()
        self._anywhere: re.Pattern[str] | None = None

    # --- names

    def learn(self, evidence: EvidenceSet) -> None:
        """Note the names of machines that this evidence tells, so that they are masked in all of the fleet."""
        found = {evidence.host, *filter(None, [evidence.inventory.get("hypervisor")])}
        for entry in evidence:
            for place in _PLACES:
                if place is _LIBVIRT_NAME and not entry.source.startswith("libvirt"):
                    continue
                found.update(hit[2] for hit in place.finditer(entry.text))
        # A machine is called by its short name too.
        self._names |= found | {name.partition(".")[0] for name in found}
        self._anywhere = None

    def _free_text(self) -> re.Pattern[str] | None:
        if self._anywhere is None:
            names = sorted((one for one in self._names if not _ORDINARY.fullmatch(one)), key=len, reverse=True)
            if not names:
                return None
            self._anywhere = re.compile(rf"(?<![\w.-])(?:{'|'.join(map(re.escape, names))})(?![\w-])")
        return self._anywhere

    # --- masks

    def _digest(self, kind: str, value: str) -> str:
        return hmac.new(self._key, f"{kind}:{value}".encode(), hashlib.sha256).hexdigest()

    def name(self, value: str) -> str:
        """Return the mask of a machine's name; ``a.example`` and ``a`` share theirs."""
        short, _, domain = value.partition(".")
        mask = f"host-{self._digest('host', short)[:8]}"
        return f"{mask}.domain-{self._digest('domain', domain)[:6]}" if domain else mask

    def _hex(self, kind: str, value: str) -> str:
        """Return a mask of the same shape: every hexadecimal digit replaced, in the same case."""
        digest = self._digest(kind, value.lower())
        digits = iter(digest + self._digest(kind, digest))
        mask = re.sub(r"[0-9A-Fa-f]", lambda _: next(digits), value)
        return mask.upper() if re.search(r"[A-F]", value) else mask

    def _mac(self, found: re.Match[str]) -> str:
        value = found[0]
        if set(value.lower()) <= set("0:") or set(value.lower()) <= set("f:"):
            return value
        mask = self._hex("mac", value)
        # 02: locally administered, as no real card is.
        return f"02{mask[2:]}"

    def _serial(self, value: str) -> str:
        return value if _NO_SERIAL.fullmatch(value) else f"serial-{self._digest('serial', value)[:10]}"

    def _ipv4(self, found: re.Match[str]) -> str:
        value = found[0]
        before = found.string[max(found.start() - 24, 0) : found.start()]
        if any(int(part) > 255 or (len(part) > 1 and part[0] == "0") for part in value.split(".")):
            return value
        if value.startswith(("127.", "0.", "255.")) or _VERSION_IN_FRONT.search(before):
            return value
        number = int(self._digest("ip", value)[:8], 16)
        # 240.0.0.0/4 is reserved: no real host has such an address.
        return str(ipaddress.IPv4Address(0xF0000000 | number & 0x07FFFFFF))

    def _ipv6(self, found: re.Match[str]) -> str:
        value = found[0]
        try:
            address = ipaddress.IPv6Address(value)
        except ValueError:
            return value
        if address.is_loopback or address.is_unspecified or len(value) < 5:
            return value
        digest = self._digest("ip", str(address))
        # 2001:db8::/32 is for documentation.
        return "2001:db8:" + ":".join(digest[at : at + 4] for at in range(0, 24, 4))

    # --- texts

    def text(self, text: str, source: str = "") -> str:
        """Return a text with masks in place of what tells who and where it is from."""
        if not text:
            return text
        text = _UUID.sub(lambda hit: self._hex("uuid", hit[0]), text)
        for pattern in _SERIALS:
            text = pattern.sub(lambda hit: hit[1] + self._serial(hit[2]), text)
        if _CSV_HEAD.search(text):
            text = self._csv(text)
        if source == "sysfs.pci":
            text = without_serial_numbers(text)
        text = _CREDENTIALS.sub(r"\1", text)
        text = _URL.sub(self._url, text)
        for place in _PLACES:
            if place is not _LIBVIRT_NAME or source.startswith("libvirt"):
                text = place.sub(lambda hit: hit[1] + self._once(hit[2]), text)
        anywhere = self._free_text()
        if anywhere:
            text = anywhere.sub(lambda hit: self.name(hit[0]), text)
        text = _HOME.sub(lambda hit: hit[1] + self._user(hit[2]), text)
        text = _MAC.sub(self._mac, text)
        text = _GUID.sub(lambda hit: self._hex("guid", hit[0]), text)
        text = _IPV6.sub(self._ipv6, text)
        if not source.startswith(_VERSION_SOURCES):
            text = _IPV4.sub(self._ipv4, text)
        return text

    def _once(self, name: str) -> str:
        """Return the mask of a name, unless it is an address, which is masked as one."""
        return name if _IPV4.fullmatch(name) else self.name(name)

    def _user(self, value: str) -> str:
        return f"user-{self._digest('user', value)[:6]}"

    def _url(self, found: re.Match[str]) -> str:
        if _PUBLIC.fullmatch(found[2]) or _IPV4.fullmatch(found[2]):
            return found[0]
        return found[1] + self.name(found[2])

    def _csv(self, text: str) -> str:
        rows = text.split("\n")
        column = -1
        for at, row in enumerate(rows):
            cells = row.split(",")
            titles = [cell.strip() for cell in cells]
            if "serial" in titles or "gpu_serial" in titles:
                column = titles.index("serial" if "serial" in titles else "gpu_serial")
            elif 0 <= column < len(cells):
                bare = cells[column].strip()
                cells[column] = cells[column].replace(bare, self._serial(bare), 1) if bare else cells[column]
                rows[at] = ",".join(cells)
        return "\n".join(rows)

    def identity(self, source: str) -> str:
        """Return a source id in which a file's name may stand (``kernel_log@node-7``)."""
        named = self._names
        parts = re.split(r"([.@])", source)
        return "".join(self.name(one) if one in named and not _ORDINARY.fullmatch(one) else one for one in parts)

    def evidence(self, evidence: EvidenceSet) -> EvidenceSet:
        """Return the evidence of one host with masks alone."""
        entries = [self._entry(entry) for entry in evidence]
        return replace(
            evidence,
            host=self.name(evidence.host),
            inventory={
                key: value if value.isdigit() else self.name(value) for key, value in evidence.inventory.items()
            },
            entries={entry.source: entry for entry in entries},
            unrecognised=tuple(self.text(line) for line in evidence.unrecognised),
        )

    def _entry(self, entry: Evidence) -> Evidence:
        family = entry.source.partition("@")[0]

        def masked(value: str) -> str:
            return self.text(value, family)

        # Of a file that somebody saved only the name says something, and its folder says who that was.
        path = entry.path.rpartition("/")[2] if entry.pasted else entry.path
        return replace(
            entry,
            source=self.identity(entry.source),
            stdout=masked(entry.stdout),
            stderr=masked(entry.stderr),
            command=masked(entry.command),
            path=masked(path),
            reason=masked(entry.reason),
        )


def key_of(words: str | bytes) -> bytes:
    """Return the key that a person's words give. It takes a while, so that nobody tries out many."""
    data = words.encode() if isinstance(words, str) else words
    return hashlib.scrypt(data, salt=b"peerlane redaction", n=2**14, r=8, p=1, dklen=32)


def redacted(sets: Iterable[EvidenceSet], key: bytes) -> list[EvidenceSet]:
    """Return a whole fleet redacted, in its order."""
    every = list(sets)
    redactor = Redactor(key)
    for one in every:
        redactor.learn(one)
    return [redactor.evidence(one) for one in every]
