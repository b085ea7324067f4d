"""`mmqa plan`: compiles a config's programs for devices that need not be there."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmqa_jax.commands import flags

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from mmqa_jax.evaluation.tables import Table
    from mmqa_jax.plan.collection import CollectionPlan
    from mmqa_jax.plan.program import Planned
    from mmqa_jax.plan.topology import Topology
    from mmqa_jax.plan.verdict import Found, Plan

SUMMARY = "what a config's programs need on a TPU slice or GPUs, by the compiler, without them."
EXAMPLE = "mmqa plan --config=configs/webqa/vlp_select.py --topology=v5e:4x4"
_BEST = 5  # settings of a search that are shown


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's flags."""
    parser.description += (
        "\n\ntopologies: v5e:AxB, v6e:AxB, v4:AxBxC, v5p:AxBxC, of two slices 2xv5e:AxB (need\n"
        "  the extra `plan`), a100:N, h100:N, h200:N, 2x h100:N (needs the extra `cuda12`), local\n"
        "programs: those of train, and of what uses the trained model (embed, rerank, answer);\n"
        "  of configs/prompt/default.py decode and prefill, of a LLaVA its tower too, of a T5\n"
        "  generate (a batch; FLOPs and time are those with one new token); without a\n"
        "  config --model=bart_large_cnn: fluency, the BARTScore of evaluate webqa, and of an\n"
        "  encoder such as bge_base or qwen3_embedding_06b: texts, what embeds 512 tokens each,\n"
        "  and of a detector such as vlp_x101: regions, of photos 4 wide to 3 high\n"
        "Neither data nor weights are read: shapes come from the config, the largest of several."
    )
    add_program_flags(parser)
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="what launch/device_check.sh wrote on such a device (device_check/device_check.json)",
    )
    parser.add_argument(
        "--search",
        action="store_true",
        help="the fastest mesh, remat and batch size of the first program, by bounds, that fits",
    )
    parser.add_argument(
        "--sources",
        metavar="N,N",
        help="what embedding, indexing and searching so many sources takes, such as 10M,1B",
    )
    parser.add_argument(
        "--pictures",
        type=int,
        metavar="N",
        help="how long a detector takes for so many pictures, such as 390000",
    )


def add_program_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that name the programs and the devices."""
    flags.add_config(parser, required=False)
    parser.add_argument(
        "--topology", default="local", help="what to compile for (this machine's devices)"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="of a language model: smollm2, llama2_7b, llama2_70b, llava15_7b, qwen25_vl_7b, "
        "flan_t5_xl, ...; bart_large_cnn; an encoder of texts: bge_base, bge_m3, "
        "qwen3_embedding_06b, ...; or a detector: vlp_x101, vinvl_x152c4, bottom_up_r101",
    )
    flags.add_only(parser, "PROGRAM", "of the config's programs (all)")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compiles, and prints the table and the verdict."""
    # Without distributed.start: one process plans alone, and what is compiled for devices that are
    # not there cannot be read back from the compilation cache.
    from mmqa_jax.evaluation.tables import show
    from mmqa_jax.plan import verdict as planning
    from mmqa_jax.plan.detectors import check_pictures, pictures_cost
    from mmqa_jax.plan.topology import open_topology, read_calibration

    config = config_of(arguments)
    # What is refused is so before a compiler is loaded.
    names = planning.chosen(config, arguments.only, arguments.model)
    if arguments.pictures is not None:
        check_pictures(arguments.pictures, names)
    topology = open_topology(arguments.topology)
    options = {"model": arguments.model, "only": arguments.only}
    if arguments.sources is not None:
        return _collections(config, topology, arguments.sources)
    calibration = read_calibration(arguments.measured, topology)
    if arguments.search:
        found = planning.best_settings(config, topology, **options)
        show(_search_table(arguments.topology, found))
        best = found[0]
        verdict = f"best of {len(found)}: {planning.described(best.changes)}."
        if not best.rate:
            verdict = f"none of {len(found)} settings fits."
        print(verdict)
        return {
            "topology": topology.name,
            "devices": len(topology.devices),
            "chip": topology.chip.name,
            "search": [one.to_json() for one in found],
            "verdict": verdict,
        }
    result = planning.plan(config, topology, calibration=calibration, **options)
    show(_table(result))
    for line in _lines(result):
        print(line)
    cost = None
    if arguments.pictures is not None:
        cost = pictures_cost(result.planned[0], arguments.pictures, len(topology.devices))
        if cost["hours_bound"] is not None:
            print(
                f"{cost['pictures']:,} pictures: {cost['hours_bound']:.3g} hours, "
                f"{cost['chip_hours_bound']:.3g} chip-hours at least, "
                f"{cost['pictures_per_second_bound']:,.0f} pictures/s at most"
            )
    print(result.verdict)
    if calibration is None:
        print("no estimate was compared with such a device: launch/device_check.sh does it there")
    else:
        print(calibration.sentence)
    return result.to_json() | ({} if cost is None else {"pictures": cost})


def config_of(arguments: argparse.Namespace) -> ConfigDict:
    """The config as given; an empty one without --config."""
    from ml_collections import ConfigDict

    from mmqa_jax.core.config import load_config
    from mmqa_jax.core.errors import UserError

    if arguments.config is not None:
        return load_config(arguments.config, arguments.overrides, adds=True)
    if arguments.overrides:
        raise UserError(f"--config.{arguments.overrides[0]}: of which --config? Name it, too.")
    return ConfigDict()


def _collections(config: ConfigDict, topology: Topology, sizes: str) -> dict[str, Any]:
    from mmqa_jax.evaluation.tables import show
    from mmqa_jax.plan.collection import plan_collections, read_sizes

    plans = plan_collections(config, topology, read_sizes(sizes))
    for one in plans:
        show(_collection_table(one))
    return {
        "topology": topology.name,
        "devices": len(topology.devices),
        "chip": topology.chip.name,
        "collections": [one.to_json() for one in plans],
    }


def _collection_table(plan: CollectionPlan) -> Table:
    from mmqa_jax.evaluation.tables import Table

    chip, devices = plan.topology.chip, len(plan.topology.devices)
    of_chip = f"{devices} x {chip.name}"
    seconds = plan.embed_seconds
    time = None if seconds is None else f"{seconds / 3600:.3g} hours at least"
    chips = None if seconds is None else f"{seconds / 3600 * devices / chip.of_chip:.3g} chip-hours"
    rows: list[list[str | None]] = [
        ["embed", of_chip, bytes_text(plan.sources * plan.dim * 4), chips, time]
    ]
    for one in plan.hosts:
        per = "a batch" if one.shared else "a query"
        read = None if one.read is None else f"reads {bytes_text(one.read)} {per}"
        rows.append([f"index: {one.kind}", one.place, bytes_text(one.held), None, read])
    for kind, search in plan.mesh.items():
        need = plan.devices_needed(kind)
        chips = f"{need} or more; {'fits' if search.fits else 'DOES NOT FIT'}"
        batch = search.compiled.program.examples
        time = search.bound and f"{milliseconds(search.bound.seconds)} for {batch} queries at least"
        held = bytes_text(search.compiled.memory.parameters * devices)
        rows.append([f"index: {kind}", f"HBM of {of_chip}", held, chips, time])
    return Table(
        f"{plan.sources:,} sources of {plan.dim} dimensions, {plan.topology.name}",
        ["what", "where", "holds", "chips", "time"],
        rows,
        "Times are bounds by the data sheet. To build ScaNN's index takes more than it holds.",
    )


def _table(plan: Plan) -> Table:
    from mmqa_jax.evaluation.tables import Table

    chip, devices = plan.topology.chip, len(plan.topology.devices)
    columns = ["a device", *(one.compiled.program.name for one in plan.planned)]
    cells = [_cells(one) for one in plan.planned]
    rows = [[name, *(own.get(name) for own in cells)] for name in cells[0]]
    network = _network(plan.topology)
    if not network:
        rows = [row for row in rows if row[0] != _NETWORK]
    return Table(
        f"{devices} x {chip.name} ({plan.topology.name}), in one call",
        columns,
        rows,
        f"Bounds are by the data sheet ({chip.source}): products, bytes and exchanges that cannot "
        f"be avoided, each part at its peak beside the others{network}.",
    )


def _network(topology: Topology) -> str:
    """What the table says of the network between slices, if there are several."""
    if len(set(topology.hosts)) == 1:
        return ""
    rate = 8 * topology.chip.network_rate / 1e9
    return f"; between slices (or hosts of GPUs) a device has {rate:.4g} Gbit/s of network"


def _cells(one: Planned) -> dict[str, str | None]:
    """Row name -> text."""
    compiled, bound = one.compiled, one.bound
    flops, program = compiled.flops, compiled.program
    cells = memory_cells(one)
    if flops is None or bound is None:
        return {**cells, **dict.fromkeys(_LATER)}
    done = sum(flops.values())
    values = (
        f"{done:.4g}",
        f"{done * program.devices / max(program.model_flops(), 1):.3f} x",
        bytes_text(compiled.floor_bytes),
        milliseconds(bound.compute),
        milliseconds(bound.hbm),
        milliseconds(bound.interconnect),
        milliseconds(bound.network),
        f"{milliseconds(bound.seconds)} ({bound.by})",
        f"{100 * bound.mfu:.1f} %",
        f"{program.examples / bound.seconds:,.0f} {program.unit}/s, "
        f"{bytes_text(program.input_bytes / bound.seconds)}/s",
        f"{compiled.seconds:.0f} s",
    )
    return {**cells, **dict(zip(_LATER, values, strict=True))}


_NETWORK = "bound: network"  # of several slices or hosts alone
_LATER = (
    *("FLOPs", "of the model's", "HBM traffic at least"),
    *("bound: compute", "bound: HBM", "bound: interconnect", _NETWORK, "bound"),
    *("MFU at most", "the host delivers", "compiled in"),
)


def memory_cells(one: Planned) -> dict[str, str | None]:
    """Row name -> text, of the mesh and the memory."""
    memory, mesh = one.compiled.memory, one.compiled.program.mesh
    split = " ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    cells: dict[str, str | None] = {"mesh": split or "one device"}
    for name in ("parameters", "optimizer", "cache", "temporaries", "total"):
        cells[f"memory: {name}"] = bytes_text(getattr(memory, name))
    if held := one.compiled.program.host:
        cells["memory: on the host"] = bytes_text(held)
    fits = "fits" if one.fits else "DOES NOT FIT"
    return {**cells, "memory: of": f"{bytes_text(one.chip.hbm_bytes)} {fits}"}


def _lines(plan: Plan) -> list[str]:
    """What the devices exchange in every program, and the cost of the whole run."""
    lines = []
    for one in plan.planned:
        for exchange in one.compiled.exchanges:
            far = ""
            if exchange.slices > 1:
                sent = bytes_text(exchange.network_bytes)
                far = f", of which each device sends {sent} to other slices or hosts"
            lines.append(
                f"{one.compiled.program.name}: {exchange.kind} over {exchange.axis}, "
                f"{bytes_text(exchange.bytes)} in all at least{far}"
            )
    cost = plan.to_json()["run"]
    if cost["steps"] is not None:
        lines.append(
            f"the run: {cost['steps']:,} steps, {cost['hours_bound']:.2f} hours, "
            f"{cost['chip_hours_bound']:.1f} chip-hours at least"
        )
    return lines


def _search_table(topology: str, found: list[Found]) -> Table:
    from mmqa_jax.evaluation.tables import Table
    from mmqa_jax.plan.verdict import described

    unit = found[0].planned.compiled.program.unit
    rows = [
        [
            described(one.changes),
            bytes_text(one.planned.compiled.memory.total),
            round(one.rate) if one.rate else None,
            one.planned.bound.by if one.rate and one.planned.bound else "does not fit",
            f"{100 * one.planned.bound.mfu:.1f} %" if one.planned.bound else None,
        ]
        for one in found[:_BEST]
    ]
    columns = ["--config.", "memory", f"{unit}/s at most", "bound by", "MFU at most"]
    return Table(f"{topology}: the best {len(rows)} of {len(found)} compiled", columns, rows)


def bytes_text(size: float | None) -> str | None:
    """`6.52 GiB`, `118 MiB`."""
    if size is None:
        return None
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.3g} {unit}" if size < 1000 else f"{size:,.0f} {unit}"
        size /= 1024
    return None


def milliseconds(seconds: float) -> str:
    """`12.71 ms`."""
    return f"{1e3 * seconds:.4g} ms"
