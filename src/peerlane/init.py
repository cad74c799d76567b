"""``peerlane init``: write a commented inventory to start from."""

from __future__ import annotations

import argparse
from pathlib import Path

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from peerlane import output

# Links to the examples in inventories/, so that the wheel carries the same files.
TEMPLATES = Path(__file__).parent / "templates"
KINDS = ("single_vm", "fleet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("folder", nargs="?", default="inventory", metavar="DIR", help="new folder (default: inventory)")
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default=KINDS[0],
        help="single_vm (default): one guest and its Proxmox node; fleet: several guests on several nodes",
    )


def run(arguments: argparse.Namespace) -> int:
    """Copy the template and say what to do next."""
    folder, template = Path(arguments.folder).expanduser(), TEMPLATES / arguments.kind
    files = sorted(one for one in template.rglob("*.yml") if one.is_file())
    for source in files:
        place = folder / source.relative_to(template)
        if place.exists():
            raise InputError("exists already, and nothing was written", str(place), "choose another folder")
    try:
        for source in files:
            place = folder / source.relative_to(template)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
            output.write_result(f"{place}\n")
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", str(folder), "choose another folder") from None
    output.say(
        f"Next: put your addresses into {folder / 'hosts.yml'}, then\n"
        f"  peerlane doctor -i {folder}\n"
        f"  peerlane audit -i {folder}\n"
        f"  peerlane provision -i {folder} --check"
    )
    return output.EXIT_OK
