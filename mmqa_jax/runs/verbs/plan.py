"""`mmqa plan`: what a config's programs need on devices that need not be there, as tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from mmqa_jax.core.chips import CHIPS
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.workdir import read_config
from mmqa_jax.evaluation.tables import Table, show
from mmqa_jax.plan import verdict as planning
from mmqa_jax.plan.program import Planned
from mmqa_jax.plan.programs import check_pictures, engine_of, engine_sizes, pictures_cost
from mmqa_jax.plan.row import (
    CollectionPlan,
    Done,
    RowPlan,
    is_row,
    plan_collections,
    plan_row,
    read_prices,
    read_sizes,
    row_counts,
)
from mmqa_jax.plan.topology import Topology, open_topology, read_calibration
from mmqa_jax.plan.verdict import Found, Plan, described
from mmqa_jax.retrieval.embeddings import embedded_rows
from mmqa_jax.retrieval.manifest import EMBEDDINGS, MANIFEST
from mmqa_jax.runs.jobs import find_job, job_status
from mmqa_jax.runs.status import kind_of, row_status

_BEST = 5  # settings of a search that are shown


def run_plan(
    config: ConfigDict,
    topology: str,
    *,
    model: str | None = None,
    only: Sequence[str] = (),
    sources: str | None = None,
    pictures: int | None = None,
    search: bool = False,
    measured: Path | None = None,
    questions: int | None = None,
    prices: Path | None = None,
    workdir: Path | None = None,
) -> dict[str, Any]:
    """Compiles for a topology (`open_topology`), and prints the table and the verdict.

    An empty config has a `model`, a language model's engine chooses its sizes; `only` names
    programs; `sources` are the numbers of sources of collections, which are planned alone;
    `pictures` are a detector's; `search` looks for the fastest settings of the first program;
    `measured` is a file of launch/device_check.sh. A row of a paper's table has `questions`,
    `sources` and `prices`, see `plan_row`, and a `workdir` of `mmqa run`, if it was started.
    """
    if is_row(config):
        flags = {"only": only, "pictures": pictures, "search": search, "measured": measured}
        for name, value in flags.items():
            if value:
                raise UserError(f"--{name}: is no flag of a row; leave it out.")
        sizes = [None] if sources is None else read_sizes(sources)
        if len(sizes) > 1:
            raise UserError(f"--sources={sources}: a row has one number of sources; give one.")
        table = read_prices(prices)
        counts = row_counts(config, questions, sizes[0])
        done = finished_work(config, workdir)
        row = plan_row(config, open_topology(topology), model, counts, table, done)
        show(_row_table(row))
        show(_chips_table(row))
        return row.to_json()
    if questions is not None or prices is not None or workdir is not None:
        raise UserError(
            "--questions, --prices and --workdir: are a row's; name one by "
            "--config=configs/*/tables.py:ROW, or leave them out."
        )
    config = config or engine_of(model)
    # What is refused is so before a compiler is loaded.
    names = planning.chosen(config, only, model)
    if pictures is not None:
        check_pictures(pictures, names)
    chips = open_topology(topology)
    options = {"model": model, "only": only}
    if sources is not None:
        return _collections(config, chips, sources)
    calibration = read_calibration(measured, chips)
    if search:
        settings = planning.best_settings(config, chips, **options)
        show(_search_table(topology, settings))
        verdict = f"best of {len(settings)}: {described(settings[0].changes)}."
        if not settings[0].rate:
            verdict = f"none of {len(settings)} settings fits."
        print(verdict)
        tried = [setting.to_json() for setting in settings]
        return {**_devices(chips), "search": tried, "verdict": verdict}
    result = planning.plan(config, chips, calibration=calibration, **options)
    show(_table(result))
    for line in _lines(result):
        print(line)
    cost = {}
    if pictures is not None:
        cost = {"pictures": pictures_cost(result.planned[0], pictures, len(chips.devices))}
        bounds = cost["pictures"]
        if bounds["hours_bound"] is not None:
            print(
                f"{bounds['pictures']:,} pictures: {bounds['hours_bound']:.3g} hours, "
                f"{bounds['chip_hours_bound']:.3g} chip-hours at least, "
                f"{bounds['pictures_per_second_bound']:,.0f} pictures/s at most"
            )
    if "decode" in names and model is not None:
        place = planning.place("decode", config, chips)
        if reason := engine_sizes(config, place.devices, model).reason:
            print(f"auto: {reason}")
            cost["mesh_reason"] = reason
    print(result.verdict)
    if calibration is None:
        print("no estimate was compared with such a device: launch/device_check.sh does it there")
    else:
        print(calibration.sentence)
    return result.to_json() | cost


def finished_work(config: ConfigDict, workdir: Path | None) -> Done:
    """Counts finished work of a row: sources of its index, questions of its workdir."""
    sources = 0
    index = config.parts.get("retriever", {}).get("index", "")
    vectors = Path(index) / EMBEDDINGS
    if index and (vectors / MANIFEST).is_file():
        sources = embedded_rows(vectors)
    if workdir is None:
        return Done(0, sources)
    if not (workdir / "config.json").is_file() or kind_of(workdir) != "row":
        raise UserError(f"--workdir={workdir}: is no workdir of `mmqa run`; name one.")
    status = row_status(workdir) or job_status(find_job(workdir))
    if (name := read_config(workdir).row) != config.row:
        raise UserError(
            f"--workdir={workdir}: holds the row {name}, and the config is of {config.row}; name "
            "that row's, or leave it out."
        )
    answered = status.get("items_done", status.get("questions"))
    return Done(answered if isinstance(answered, int) else 0, sources)


def _devices(topology: Topology) -> dict[str, Any]:
    """Returns the devices as JSON."""
    chips = {"devices": len(topology.devices), "chip": topology.chip.name}
    return {"topology": topology.name, **chips}


def _collections(config: ConfigDict, topology: Topology, sizes: str) -> dict[str, Any]:
    plans = plan_collections(config, topology, read_sizes(sizes))
    for plan in plans:
        show(_collection_table(plan))
    return {**_devices(topology), "collections": [plan.to_json() for plan in plans]}


def _collection_table(plan: CollectionPlan) -> Table:
    chip, devices = plan.topology.chip, len(plan.topology.devices)
    of_chip = f"{devices} x {chip.name}"
    seconds = plan.embed_seconds
    time = None if seconds is None else f"{seconds / 3600:.3g} hours at least"
    chips = None if seconds is None else f"{seconds / 3600 * devices / chip.of_chip:.3g} chip-hours"
    rows: list[list[str | None]] = [
        ["embed", of_chip, bytes_text(plan.sources * plan.dim * 4), chips, time]
    ]
    for host in plan.hosts:
        per = "a batch" if host.shared else "a query"
        read = None if host.read is None else f"reads {bytes_text(host.read)} {per}"
        rows.append([f"index: {host.kind}", host.place, bytes_text(host.held), None, read])
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


def _row_table(row: RowPlan) -> Table:
    chip, devices = row.topology.chip, len(row.topology.devices)
    rows = [
        [
            part.name,
            part.key,
            f"{part.work:,.0f} {part.program.unit}",
            "once, then kept" if part.once else "each run",
            f"{part.done:,.0f}",
            f"{row.hours(part):.3g}",
        ]
        for part in row.parts
    ]
    on_host = f" On the hosts' CPUs, in no time here: {', '.join(row.on_host)}." * bool(row.on_host)
    return Table(
        f"{row.questions:,} questions, {row.sources:,} sources, {devices} x {chip.name} "
        f"({row.topology.name})",
        ["part", "config key", "work", "made", "done", "hours at least"],
        rows,
        "Hours are the roofline's of full batches of the longest inputs, nothing of which was run; "
        "what is done takes none: sources in the row's index, questions in --workdir."
        f"{on_host}",
    )


def _chips_table(row: RowPlan) -> Table:
    rows = [
        [
            name,
            f"{row.chip_hours(chip, once=False):.3g}",
            f"{row.chip_hours(chip, once=True):.3g}",
            None if (price := row.price(name)) is None else f"{price:,.2f}",
        ]
        for name, chip in CHIPS.items()
    ]
    return Table(
        "The row on other chips, as many devices as these",
        ["chip", "chip-hours at least", "once, before", "price"],
        rows,
        "Prices are those of --prices=FILE, the user's own, of both columns.",
    )


def _table(plan: Plan) -> Table:
    chip, devices = plan.topology.chip, len(plan.topology.devices)
    columns = ["a device", *(planned.compiled.program.name for planned in plan.planned)]
    cells = [_cells(planned) for planned in plan.planned]
    rows = [[name, *(column.get(name) for column in cells)] for name in cells[0]]
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
    """Describes the network between slices, if there are several."""
    if len(set(topology.hosts)) == 1:
        return ""
    rate = 8 * topology.chip.network_rate / 1e9
    return f"; between slices (or hosts of GPUs) a device has {rate:.4g} Gbit/s of network"


def _cells(planned: Planned) -> dict[str, str | None]:
    """Row name -> text."""
    compiled, bound = planned.compiled, planned.bound
    flops, program = compiled.flops, compiled.program
    cells = memory_cells(planned)
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


def memory_cells(planned: Planned) -> dict[str, str | None]:
    """Row name -> text, of the mesh and the memory."""
    memory, mesh = planned.compiled.memory, planned.compiled.program.mesh
    split = " ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
    cells: dict[str, str | None] = {"mesh": split or "one device"}
    for name in ("parameters", "optimizer", "cache", "temporaries", "total"):
        cells[f"memory: {name}"] = bytes_text(getattr(memory, name))
    if held := planned.compiled.program.host:
        cells["memory: on the host"] = bytes_text(held)
    fits = "fits" if planned.fits else "DOES NOT FIT"
    return {**cells, "memory: of": f"{bytes_text(planned.chip.hbm_bytes)} {fits}"}


def _lines(plan: Plan) -> list[str]:
    """Describes the devices' exchanges in every program, and the cost of the whole run."""
    lines = []
    for planned in plan.planned:
        for exchange in planned.compiled.exchanges:
            far = ""
            if exchange.slices > 1:
                sent = bytes_text(exchange.network_bytes)
                far = f", of which each device sends {sent} to other slices or hosts"
            lines.append(
                f"{planned.compiled.program.name}: {exchange.kind} over {exchange.axis}, "
                f"{bytes_text(exchange.bytes)} in all at least{far}"
            )
    cost = plan.to_json()["run"]
    if cost["steps"] is not None:
        lines.append(
            f"the run: {cost['steps']:,} steps, {cost['hours_bound']:.2f} hours, "
            f"{cost['chip_hours_bound']:.1f} chip-hours at least"
        )
    return lines


def _search_table(topology: str, settings: list[Found]) -> Table:
    unit = settings[0].planned.compiled.program.unit
    rows = [
        [
            described(setting.changes),
            bytes_text(setting.planned.compiled.memory.total),
            round(setting.rate) if setting.rate else None,
            setting.planned.bound.by if setting.rate and setting.planned.bound else "does not fit",
            f"{100 * setting.planned.bound.mfu:.1f} %" if setting.planned.bound else None,
        ]
        for setting in settings[:_BEST]
    ]
    columns = ["--config.", "memory", f"{unit}/s at most", "bound by", "MFU at most"]
    return Table(f"{topology}: the best {len(rows)} of {len(settings)} compiled", columns, rows)


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
