"""``peerlane models``: what is known of a model, which flags to serve it with, and on how many GPUs it fits."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from ansible_collections.peerlane.gpu.plugins.plugin_utils.core.errors import InputError
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model import (
    conditions,
    engine_matrix,
    fit,
    model_config,
    model_profile,
    served_args,
)
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.fit import GIB, Fit, Layout, Request
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.model_profile import Profile, Row
from ansible_collections.peerlane.gpu.plugins.plugin_utils.model.model_shape import Gqa, Shape
from peerlane import output

SCHEMA = "peerlane.models/1"

_WIDTH = 110
_CONTEXT = 32768
_MOST_GIB = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this model: a profile, a family or a repository")
    parser.add_argument("--gpus", type=_whole, metavar="N", help="number of GPUs: judge what fits on them")
    parser.add_argument(
        "--gpu-memory-gib", type=_number, metavar="X", help="memory of each GPU, as nvidia-smi has it / 1024"
    )
    parser.add_argument("--sm", metavar="SM", help="architecture of the GPUs: 120 or 12.0")
    parser.add_argument(
        "--context", type=_whole, metavar="N", help="wanted context in tokens (32768, or the model's own)"
    )
    parser.add_argument("--streams", type=_whole, default=1, metavar="N", help="wanted streams at once (1)")
    parser.add_argument(
        "--engine", metavar="E", help="vllm, sglang, vllm_cpu or llama_cpp (all that the profile knows)"
    )
    parser.add_argument("--engine-version", metavar="V", help="its version (the newest that Peerlane knows)")
    parser.add_argument(
        "--profile", type=Path, metavar="FILE", help="your own profile file, merged over the shipped ones"
    )
    parser.add_argument(
        "--from-config", type=Path, metavar="DIR", help="read the model from a folder with its config.json"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="text (default) or json")


def run(arguments: argparse.Namespace) -> int:
    """Print profiles and return the exit code."""
    known = model_profile.profiles(arguments.profile)
    if arguments.from_config is not None:
        if arguments.name is not None:
            raise InputError("give a NAME or --from-config, not both", "--from-config", "leave one out")
        shown = model_config.from_folder(arguments.from_config, known)
    elif arguments.name is not None:
        shown = model_profile.profile(arguments.name, arguments.profile)
    else:
        _no_use_without_a_name(arguments)
        output.write_result(_list(known, arguments.format))
        return output.EXIT_OK
    report = _report(shown, _engines(shown, arguments), arguments)
    text = json.dumps(report, indent=2) + "\n" if arguments.format == "json" else _text(report)
    output.write_result(text)
    return output.EXIT_OK


def _whole(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= 10**9:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GiB")
    if value > _MOST_GIB:
        raise argparse.ArgumentTypeError(f"no GPU has {text} GiB; nvidia-smi prints MiB: divide by 1024")
    return value


def _no_use_without_a_name(arguments: argparse.Namespace) -> None:
    given = {
        "--gpus": arguments.gpus,
        "--gpu-memory-gib": arguments.gpu_memory_gib,
        "--sm": arguments.sm,
        "--context": arguments.context,
        "--engine": arguments.engine,
        "--engine-version": arguments.engine_version,
    }
    for name, value in given.items():
        if value is not None:
            raise InputError("needs a model", name, "give a NAME; list them with: peerlane models")


def _engines(shown: Profile, arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the engines to show, each with its version."""
    name, version = arguments.engine, arguments.engine_version
    if name is None:
        if version is not None:
            raise InputError("needs --engine", "--engine-version", "say whose version it is")
        names = [one for one in engine_matrix.engines() if shown.of_engine(one)] or list(fit.ENGINES)
        return [(one, engine_matrix.build(one).version) for one in names]
    if name not in engine_matrix.engines():
        raise InputError(f"{name!r} is no engine", "--engine", f"use {', '.join(engine_matrix.engines())}")
    newest = engine_matrix.build(name).version
    if version is None:
        return [(name, newest)]
    if conditions.version(version, "--engine-version") > Version(newest):
        raise InputError(
            f"{name} {version} is newer than any that this Peerlane knows",
            "--engine-version",
            f"the newest is {newest}",
        )
    return [(name, version)]


# --- the report -----------------------------------------------------------------------------------------------------


def _report(shown: Profile, engines: Sequence[tuple[str, str]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all that is said about one model, as plain types: the JSON form."""
    sm = None if arguments.sm is None else conditions.sm_of(arguments.sm)
    context = arguments.context or min(_CONTEXT, shown.shape.context)
    if context > shown.shape.context:
        raise InputError(
            f"{context} is more than the model's context", "--context", f"{shown.name} has {shown.shape.context}"
        )
    return {
        "schema": SCHEMA,
        "name": shown.name,
        "family": shown.family,
        "title": shown.title,
        "source": shown.source,
        "notes": list(shown.notes),
        "shape": _shape(shown.shape),
        "weights": [_weights(shown, name) for name in shown.weights],
        "sm": sm,
        "engines": [_engine(shown, name, version, sm, context, arguments) for name, version in engines],
    }


def _shape(shape: Shape) -> dict[str, Any]:
    reduces = shape.all_reduces()
    count = shape.parameters()
    kind = shape.attention
    return {
        "layers": shape.layers,
        "dense_layers": shape.dense_layers,
        "hidden_size": shape.hidden_size,
        "heads": shape.heads,
        "attention": "gqa" if isinstance(kind, Gqa) else "mla, sparse" if kind.sparse else "mla",
        "kv_heads": kind.kv_heads if isinstance(kind, Gqa) else None,
        "experts": None
        if shape.experts is None
        else {"routed": shape.experts.routed, "active": shape.experts.active, "shared": shape.experts.shared},
        "context": shape.context,
        "parameters": count.total,
        "active_parameters": shape.active().total,
        "all_reduces_per_token": reduces.count + reduces.small_count,
        "all_reduce_bytes": reduces.bytes_per_token,
        "small_all_reduces": reduces.small_count,
        "kv_bytes_per_token": {name: shape.kv_bytes_per_token(name) for name in ("bf16", "fp8")},
    }


def _weights(shown: Profile, name: str) -> dict[str, Any]:
    one = shown.weights[name]
    return {
        "name": name,
        "repository": one.repository,
        "bytes": round(fit.weight_bytes(shown.shape, one)),
        "computed": one.bytes is None,
        "active_bytes": round(fit.active_bytes(shown.shape, one)),
        "block": one.block,
        "source": one.source,
        "gib_per_gpu": {
            f"TP{size}": round(fit.weights_per_gpu(shown.shape, one, Layout(size)) / GIB, 1)
            for size in (1, 2, 4, 8)
            if not fit.impossible(shown.shape, one, Layout(size))
        },
    }


def _engine(
    shown: Profile, engine: str, version: str, sm: int | None, context: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    dtypes = {name: served_args.kv_dtype(shown, engine, version, sm, name, {}) for name in shown.weights}
    made: dict[str, Any] = {
        "engine": engine,
        "version": version,
        "checked_with": shown.checked_with.get(engine),
        "recommended": [
            {**_row(row), "words": row.words(), "choice": row.choice}
            for row in served_args.recommended(shown, engine, version, sm)
        ],
        "environment": [
            {**_row(row), "words": row.words()} for row in served_args.variables(shown, engine, version, sm)
        ],
        "forbidden": [
            {**_row(row), "words": row.words(), "instead": row.instead}
            for row in served_args.forbidden(shown, engine, version, sm)
        ],
        "support": [{**_row(row), "state": row.state} for row in served_args.support(shown, engine, version, sm)],
        "fit": None,
    }
    if arguments.gpus is not None:
        request = Request(engine, arguments.gpu_memory_gib, sm, context, arguments.streams)
        rows = fit.table(shown, arguments.gpus, request, dtypes)
        made["fit"] = {
            "gpus": arguments.gpus,
            "gpu_memory_gib": arguments.gpu_memory_gib,
            "context": context,
            "streams": arguments.streams,
            "rows": [{**_fit(one), "kv_dtype": dtypes[one.weights]} for one in rows],
            "way_out": fit.way_out(shown, arguments.gpus, request, dtypes),
        }
    return made


def _row(row: Row) -> dict[str, Any]:
    return {
        "versions": str(row.versions),
        "sm": str(row.sm),
        "weights": list(row.weights),
        "why": row.why,
        "source": row.source,
    }


def _fit(one: Fit) -> dict[str, Any]:
    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 1)

    return {
        "weights": one.weights,
        "layout": str(one.layout),
        "state": one.state,
        "text": one.text,
        "weights_gib": rounded(one.weights_gib),
        "kv_wanted_gib": rounded(one.kv_gib),
        "engine_low_gib": rounded(one.reserve_low_gib),
        "engine_high_gib": rounded(one.reserve_high_gib),
        "kv_left_gib": rounded(one.left_gib),
        "kv_tokens": one.kv_tokens,
        "notes": list(one.notes),
    }


# --- text -----------------------------------------------------------------------------------------------------------


def _list(known: dict[str, Profile], style: str) -> str:
    rows = [
        {
            "name": one.name,
            "family": one.family,
            "title": one.title,
            "weights": list(one.weights),
            "engines": list(one.checked_with),
        }
        for one in known.values()
    ]
    if style == "json":
        return json.dumps({"schema": SCHEMA, "models": rows}, indent=2) + "\n"
    width = max(len(str(row["name"])) for row in rows)
    title = max(len(str(row["title"])) for row in rows)
    return "".join(f"{row['name']:{width}}  {row['title']:{title}}  {', '.join(row['weights'])}\n" for row in rows)


def _text(report: dict[str, Any]) -> str:
    shape = report["shape"]
    experts = shape["experts"]
    lines = [f"{report['name']}: {report['title']}"]
    attention = {"gqa": "grouped", "mla": "latent (MLA)", "mla, sparse": "latent (MLA), sparse (DSA)"}[
        shape["attention"]
    ]
    heads = f"{shape['heads']} heads" + (f", {shape['kv_heads']} for keys" if shape["kv_heads"] else "")
    dense = f", the first {shape['dense_layers']} dense" if experts and shape["dense_layers"] else ""
    small = f", of them {shape['small_all_reduces']} of 8 bytes" if shape["small_all_reduces"] else ""
    kv = shape["kv_bytes_per_token"]
    facts = [
        ("layers", f"{shape['layers']}{dense}, hidden size {shape['hidden_size']}"),
        ("attention", f"{attention}, {heads}"),
        (
            "experts",
            f"{experts['routed']} routed, {experts['active']} active, {experts['shared']} shared"
            if experts
            else "none",
        ),
        ("context", f"{shape['context']:,} tokens"),
        (
            "parameters",
            f"{_count(shape['parameters'])}, {_count(shape['active_parameters'])} read for each token",
        ),
        (
            "all-reduces",
            f"{shape['all_reduces_per_token']} per token of {shape['all_reduce_bytes']:,} bytes{small}",
        ),
        ("KV cache", f"{kv['bf16']:,.0f} bytes per token in bf16, {kv['fp8']:,.0f} in fp8 (one GPU)"),
        ("source", report["source"]),
        *(("note", note) for note in report["notes"]),
    ]
    lines += [line for name, text in facts for line in _wrap(f"  {name:11}  ", text)]
    lines.append("")
    lines.append("weights")
    for row in report["weights"]:
        size = _size(row["bytes"]) + (" (computed)" if row["computed"] else "")
        spread = ", ".join(f"{gib:.1f} at {name}" for name, gib in row["gib_per_gpu"].items() if gib)
        text = f"{size}, {_size(row['active_bytes'])} read per token" + (
            f"; GiB for each GPU: {spread}" if spread else ""
        )
        lines += _wrap(f"  {row['name']:11}  ", text)
    for engine in report["engines"]:
        lines += ["", *_engine_text(engine, report["sm"])]
    return "\n".join(lines) + "\n"


def _size(number: int) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.2f} MB"


def _count(number: int) -> str:
    return f"{number / 1e9:,.1f} billion" if number >= 1e8 else f"{number:,}"


def _engine_text(engine: dict[str, Any], sm: int | None) -> list[str]:
    where = f" on SM {sm}" if sm is not None else ""
    checked = engine["checked_with"]
    lines = [f"{engine['engine']} {engine['version']}{where}"]
    if checked is None:
        lines.append("  nothing is known about flags for this model")
    for row in engine["support"]:
        word = {"serves": "served", "fails": "FAILS", "unproven": "not proven"}[row["state"]]
        lines += _wrap(f"  {word:11}  ", f"{_limits(row, sm)}{row['why']} [{row['source']}]")
    for row in engine["recommended"]:
        head = f"option ({row['choice']})" if row["choice"] else "give"
        lines += _wrap(f"  {head:11}  ", f"{row['words']}  {_limits(row, sm)}{row['why']} [{row['source']}]")
    for row in engine["environment"]:
        lines += _wrap(f"  {'set':11}  ", f"{row['words']}  {_limits(row, sm)}{row['why']} [{row['source']}]")
    for row in engine["forbidden"]:
        instead = f"; use {row['instead']}" if row["instead"] else ""
        lines += _wrap(
            f"  {'never give':11}  ", f"{row['words']}  {_limits(row, sm)}{row['why']}{instead} [{row['source']}]"
        )
    if engine["fit"] is not None:
        lines += _fit_text(engine["fit"])
    return lines


def _limits(row: dict[str, Any], sm: int | None) -> str:
    limits = [f"SM {row['sm']}"] if row["sm"] and sm is None else []
    limits += [f"{'/'.join(row['weights'])} only"] if row["weights"] else []
    return f"({', '.join(limits)}) " if limits else ""


def _fit_text(table: dict[str, Any]) -> list[str]:
    memory = f" of {table['gpu_memory_gib']:g} GiB" if table["gpu_memory_gib"] else " of unknown memory"
    streams = f"{table['streams']} stream{'s' if table['streams'] > 1 else ''}"
    lines = [
        f"  on {table['gpus']} GPU{'s' if table['gpus'] > 1 else ''}{memory}, {streams} of {table['context']:,} tokens"
    ]
    rows = _shown(table["rows"])
    first = max((len(row["weights"]) for row in rows), default=0)
    second = max((len(row["layout"]) for row in rows), default=0)
    for row in rows:
        size = f"{row['weights_gib']:6.1f} GiB" if row["weights_gib"] else " " * 10
        text = row["text"] + (f" ({row['kv_dtype']} cache)" if row["state"] in ("fits", "tight") else "")
        lines += _wrap(f"    {row['weights']:{first}}  {row['layout']:{second}}  {size}  ", text)
    for name in dict.fromkeys(row["weights"] for row in rows):
        notes = dict.fromkeys(note for row in rows if row["weights"] == name for note in row["notes"])
        lines += [line for note in notes for line in _wrap(f"    {name:{first}}  note: ", note)]
    if table["way_out"]:
        lines += _wrap("    instead: ", table["way_out"])
    return lines


def _shown(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for a checkpoint that fits in no layout: its best one; and all rows of the others."""
    shown = []
    for name in dict.fromkeys(row["weights"] for row in rows):
        mine = [row for row in rows if row["weights"] == name]
        if all(row["state"] in ("does not fit", "not possible") for row in mine):
            sized = [row for row in mine if row["kv_left_gib"] is not None]
            best = max(sized, key=lambda row: row["kv_left_gib"]) if sized else mine[0]
            mine = [{**best, "layout": best["layout"] if len(mine) == 1 or not sized else "any layout"}]
        shown += mine
    return shown


def _wrap(lead: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=lead,
        subsequent_indent=" " * len(lead),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [lead.rstrip()]
