"""`mmqa plan --config=configs/*/tables.py:ROW`: what a whole row of a paper's table takes at least.

Its parts are those that `mmqa run` opens. Each model's program is traced, not compiled: it is that
of the config which made the part's folder, as the row's `made_by` names it; of a language model,
that of its engine. The time is the roofline's, on every chip of core/chips.py.
"""

import dataclasses
import functools
import math
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from mmqa_jax.core.chips import CHIPS, GIB, Chip
from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.flops import jaxpr_flops
from mmqa_jax.data.records.corpus_records import read_manifest
from mmqa_jax.plan.program import (
    Compiled,
    Planned,
    Program,
    compile_program,
    least_time,
    shard_bytes,
    trace_program,
)
from mmqa_jax.plan.programs import ENGINE, make_program, program_names
from mmqa_jax.plan.topology import Topology
from mmqa_jax.retrieval.indexes.index import IndexSize, index_sizes
from mmqa_jax.retrieval.indexes.mesh import abstract_search
from mmqa_jax.tasks.registry import read_task

PRICES = Path(__file__).with_name("prices.toml")
_MAKER = re.compile(r"mmqa train --config=(\S+)")
_CLIP = "configs/webqa/contrastive.py"  # whose `embed` is that of a CLIP ViT-B/16
_RESTRICTED = 34  # candidates of a question: WebQA's cap of 16 + 16, and two gold sources


class Done(NamedTuple):
    """The number of questions whose answers, and of sources whose vectors, are finished."""

    questions: int = 0
    sources: int = 0


@dataclasses.dataclass(frozen=True)
class RowPart:
    """One part's work."""

    name: str  # embed, search, rerank, read, prompts or tokens
    key: str  # of the config, such as parts.reranker
    work: float  # examples of the traced program that all questions take
    traced: Compiled
    done: float = 0.0  # of these, what is finished and kept
    # Whether its results are made before, and kept for every row that names them.
    once: bool = False

    @property
    def program(self) -> Program:
        """Its program, on the devices of one host."""
        return self.traced.program

    def chip_hours(self, chip: Chip) -> float:
        """Bounds the hours of unfinished work on such chips, with the topology's meshes and
        batches.
        """
        exchanges = tuple(
            exchange._replace(links=min(exchange.links or chip.links, chip.links) or None)
            for exchange in self.traced.exchanges
        )
        bound = least_time(dataclasses.replace(self.traced, exchanges=exchanges), chip)
        calls = (self.work - self.done) / self.program.examples
        seconds = calls * bound.seconds * self.program.devices
        return seconds / 3600 / chip.of_chip


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """A row on a topology."""

    topology: Topology
    questions: int
    sources: int
    parts: tuple[RowPart, ...]
    on_host: tuple[str, ...]  # what its hosts' CPUs do, which is in no time
    prices: Mapping[str, float]  # name of a chip -> price of an hour of one

    def chip_hours(self, chip: Chip, *, once: bool) -> float:
        """Sums up chip hours of unfinished parts: made once, or run by the row itself."""
        return sum(part.chip_hours(chip) for part in self.parts if part.once == once)

    def price(self, name: str) -> float | None:
        """Returns the price of unfinished work on a chip; None: prices lack the chip."""
        if name not in self.prices:
            return None
        hours = (self.chip_hours(CHIPS[name], once=once) for once in (True, False))
        return self.prices[name] * sum(hours)

    def hours(self, part: RowPart) -> float:
        """Returns the hours of a part on all devices of the topology."""
        chip = self.topology.chip
        return part.chip_hours(chip) * chip.of_chip / len(self.topology.devices)

    def to_json(self) -> dict[str, Any]:
        """Returns the output of `--json`."""
        return {
            "topology": self.topology.name,
            "devices": len(self.topology.devices),
            "chip": self.topology.chip.name,
            "questions": self.questions,
            "sources": self.sources,
            "parts": [
                {
                    "name": part.name,
                    "key": part.key,
                    "work": part.work,
                    "unit": part.program.unit,
                    "done": part.done,
                    "once": part.once,
                    "hours_bound": self.hours(part),
                }
                for part in self.parts
            ],
            "on_host": list(self.on_host),
            "chips": {
                name: {
                    "chip_hours_bound": self.chip_hours(chip, once=False),
                    "once_chip_hours_bound": self.chip_hours(chip, once=True),
                    "price": self.price(name),
                }
                for name, chip in CHIPS.items()
            },
        }


def is_row(config: ConfigDict) -> bool:
    """Whether a config is a row of a paper's table."""
    return "row" in config and "parts" in config


def plan_row(
    config: ConfigDict,
    topology: Topology,
    model: str | None,
    counts: tuple[int, int],
    prices: Mapping[str, float],
    done: Done = Done(),  # noqa: B008 - frozen
) -> RowPlan:
    """A row's parts, whose programs are traced for one host of a topology.

    Args:
      model: sizes of the row's language model, see programs.PRESETS.
      counts: from `row_counts`.
      prices: from `read_prices`.
      done: what is finished.
    """
    questions, sources = counts
    done = Done(min(done.questions, questions), min(done.sources, sources))
    parts = tuple(_parts(config, topology, model, questions, sources, done))
    on_host = tuple(
        f"parts.{name}" for name in config.parts if not any(name in part.key for part in parts)
    )
    return RowPlan(topology, *counts, parts, on_host, prices)


def read_prices(path: Path | None) -> dict[str, float]:
    """Name of a chip -> price of its hour, of a user's TOML; None is the empty one beside this."""
    path = PRICES if path is None else path
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("chip_hour", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(
            f"--prices={path}: expected a TOML with a table [chip_hour] ({error}); copy {PRICES}."
        ) from error
    for name, price in table.items():
        if name not in CHIPS:
            raise UserError(
                f"--prices={path}: [chip_hour] {name} is no chip that plan knows; use one of "
                f"{', '.join(CHIPS)}."
            )
        if isinstance(price, bool) or not isinstance(price, int | float) or not price >= 0:
            raise UserError(
                f"--prices={path}: [chip_hour] {name} is {price!r}, a number from 0 on was "
                "expected; correct it."
            )
    return table


def row_counts(config: ConfigDict, questions: int | None, sources: int | None) -> tuple[int, int]:
    """Numbers of questions and sources, as given or (None) of the prepared corpus."""
    for flag, count in (("questions", questions), ("sources", sources)):
        if count is not None and count < 1:
            raise UserError(f"--{flag}={count}: at least 1 was expected; correct it.")
    if questions is not None and sources is not None:
        return questions, sources
    folder = config.data.dir
    if not Path(folder).is_dir():
        raise UserError(
            f"--questions and --sources: {folder} (config key data.dir) is not on this machine; "
            "give both numbers, or prepare the corpus."
        )
    manifest = read_manifest(folder)
    questions = questions or config.data.questions or manifest["splits"].get(config.data.split, 0)
    if not questions:
        raise UserError(
            f"config key data.split={config.data.split}: {folder} has the splits "
            f"{', '.join(manifest['splits'])}; name one of them, or give --questions."
        )
    return questions, sources or manifest["counts"]["sources"]


def _parts(
    config: ConfigDict,
    topology: Topology,
    model: str | None,
    questions: int,
    sources: int,
    done: Done,
) -> Iterator[RowPart]:
    options, made_by, host = config.options, dict(config.made_by), topology.host

    def traced(program: Program) -> Compiled:
        return trace_program(program, host.placement(program.placed))

    retriever = config.parts.get("retriever", {})
    if retriever.get("method", "bm25") != "bm25":
        encoder = load_config(_maker(made_by, "parts.retriever", retriever.model))
        embed = traced(make_program("embed", encoder, host.devices))
        dim = read_task(encoder).planned_config().embed_dim
        search = traced(search_program("mesh", sources, dim, host))
        index, answered = "parts.retriever.index", done.questions
        yield RowPart("embed sources", index, sources, embed, done.sources, once=True)
        yield RowPart("embed questions", "parts.retriever.model", questions, embed, answered)
        yield RowPart("search", index, questions, search, answered)
    for name, verb, pairs in (
        ("reranker", "rerank", options.get("top_k") or _RESTRICTED),
        ("reader", "answer", 1),
    ):
        path = config.parts.get(name, {}).get("model")
        if path:
            of_part = load_config(_maker(made_by, f"parts.{name}", path))
            if verb not in program_names(of_part):
                raise UserError(
                    f"config key parts.{name}.model={path}: its config has no program {verb}; plan "
                    "its own config."
                )
            program = traced(make_program(verb, of_part, host.devices))
            work, finished = questions * pairs, done.questions * pairs
            yield RowPart(verb, f"parts.{name}", work, program, finished)
    if "llm" in config.parts:
        yield from _language_model(config, traced, host, model, questions, done.questions)


def _language_model(
    config: ConfigDict,
    traced: Any,
    host: Topology,
    model: str | None,
    questions: int,
    answered: int,
) -> Iterator[RowPart]:
    """Prompts as long as the engine's length allows, and all new tokens: the most there can be."""
    llm, options = config.parts.llm, config.options
    if model is None:
        raise UserError(
            f"--model is missing: the row asks the language model {llm.model}, whose sizes decide "
            "the time; name those of one, such as --model=llama2_7b."
        )
    new = options.get("max_new_tokens", 64)
    engine = load_config(
        "configs/prompt/default.py",
        {"engine.length": llm.engine.length, "decoding.max_new_tokens": new},
    )
    times = options.get("ensemble", 1)
    of_question = {"decode": times * new, "prefill": times * (llm.engine.length - new)}
    for name in ENGINE:
        program = traced(make_program(name, engine, host.devices, model))
        each = of_question[name]
        yield RowPart(name, "parts.llm", questions * each, program, answered * each)


def _maker(made_by: Mapping[str, str], key: str, folder: str) -> str:
    """The config that trained what lies in a folder; of a CLIP, one with the same encoder."""
    maker = made_by.get(folder, "")
    if "--model=clip " in maker:
        return _CLIP
    match = _MAKER.search(maker)
    if match is None:
        raise UserError(
            f"config key {key}.model={folder}: the row does not say which config made it, so that "
            "its sizes are not known; plan that config by itself."
        )
    return match[1]


# `mmqa plan --sources`: what embedding, indexing and searching so many sources takes.


_TOP_K = 100
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_COUNT = re.compile(r"(\d{1,18}(?:\.\d+)?)([kmbg]?)", re.IGNORECASE)
_MOST = 2**31 - 1  # rows are int32


@dataclasses.dataclass(frozen=True)
class CollectionPlan:
    """A number of sources on a topology."""

    sources: int
    dim: int
    topology: Topology
    embed: Planned  # the program that embeds a batch on one host's devices
    hosts: tuple[IndexSize, ...]  # kinds of index outside of accelerators
    # Kind of index -> its search over all devices; top 100 of a batch of queries.
    mesh: dict[str, Planned]

    @property
    def embed_seconds(self) -> float | None:
        """Returns the seconds on all devices, by the roofline; None: the batch does not fit."""
        if self.embed.bound is None:
            return None
        calls = self.sources / self.embed.compiled.program.examples
        hosts = len(self.topology.devices) / self.embed.compiled.program.devices
        return calls * self.embed.bound.seconds / hosts

    def devices_needed(self, kind: str) -> int:
        """How many such devices hold a mesh index: its vectors, and what one search adds."""
        memory = self.mesh[kind].compiled.memory
        whole = memory.parameters * len(self.topology.devices)
        added = memory.temporaries or 0.0
        return math.ceil(whole / max(self.topology.chip.hbm_bytes - added, 1.0))

    def to_json(self) -> dict[str, Any]:
        """An entry of `collections` in `--json`."""
        seconds, chip, devices = self.embed_seconds, self.topology.chip, len(self.topology.devices)
        hours = None if seconds is None else seconds / 3600
        return {
            "sources": self.sources,
            "dim": self.dim,
            "embed": {
                "hours_bound": hours,
                "chip_hours_bound": None if hours is None else hours * devices / chip.of_chip,
                "bound_by": self.embed.bound and self.embed.bound.by,
                "embeddings_gib": self.sources * self.dim * 4 / GIB,
            },
            "indexes": [
                *(
                    {
                        "kind": host.kind,
                        "place": host.place,
                        "held_gib": host.held / GIB,
                        "read_gib": None if host.read is None else host.read / GIB,
                        "read_per": "batch" if host.shared else "query",
                    }
                    for host in self.hosts
                ),
                *(
                    {
                        "kind": kind,
                        "place": "HBM",
                        "held_gib": host.compiled.memory.parameters * devices / GIB,
                        "device_gib": host.compiled.memory.total / GIB,
                        "fits": host.fits,
                        "devices_needed": self.devices_needed(kind),
                        "batch": host.compiled.program.examples,
                        "seconds_bound": host.bound and host.bound.seconds,
                        "bound_by": host.bound and host.bound.by,
                    }
                    for kind, host in self.mesh.items()
                ),
            ],
        }


def plan_collections(
    config: ConfigDict, topology: Topology, sizes: Sequence[int]
) -> list[CollectionPlan]:
    """Plans of so many sources, embedded by a config's encoder."""
    if "task" not in config or "embed" not in program_names(config):
        raise UserError(
            "--sources: the config trains no encoder of sources; name one of the task contrastive, "
            "such as configs/webqa/contrastive.py."
        )
    model = read_task(config).planned_config()
    host = topology.host
    embed = _compiled(make_program("embed", config, host.devices), host)
    return [_planned(size, model.embed_dim, topology, embed) for size in sizes]


def read_sizes(text: str) -> list[int]:
    """Parses `10M,100M,1B` as numbers of sources; UserError for anything else."""
    sizes = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        size = match and round(float(match[1]) * _TIMES[match[2].lower()])
        if not size or size > _MOST:
            raise UserError(
                f"--sources={text}: {part.strip()!r} is not a number of sources from 1 to 2.1B; "
                "write 250000, 10M or 1B, several with commas."
            )
        sizes.append(size)
    return sizes


def _planned(sources: int, dim: int, topology: Topology, embed: Planned) -> CollectionPlan:
    mesh = {
        kind: _compiled(search_program(kind, sources, dim, topology), topology)
        for kind in ("mesh", "mesh_approx")
    }
    return CollectionPlan(sources, dim, topology, embed, index_sizes(sources, dim), mesh)


def search_program(kind: str, sources: int, dim: int, topology: Topology) -> Program:
    """The search of an index over all devices, `mesh` or `mesh_approx`."""
    approximate = kind == "mesh_approx"
    trace, mesh, arguments = abstract_search(
        topology.devices, sources, dim, min(_TOP_K, sources), approximate=approximate
    )
    queries, held = arguments["queries"], shard_bytes((arguments["vectors"], arguments["mask"]))
    # A product writes its float32 scores to memory, where the best of them are read.
    scores = queries.shape[0] * arguments["mask"].size / len(topology.devices) * 4
    return Program(
        name=f"search of {sources:,} by {kind}",
        trace=functools.cache(trace),
        mesh=dict(mesh.shape),
        placed=tuple(mesh.devices.flat),
        model_flops=lambda: jaxpr_flops(trace().jaxpr.jaxpr),
        parameters=held,
        floor_bytes=held + 2 * scores,
        examples=queries.shape[0],
        unit="queries",
        input_bytes=queries.size * queries.dtype.itemsize,
    )


def _compiled(program: Program, topology: Topology) -> Planned:
    print(f"compiling {program.name} for {topology.name} ...", file=sys.stderr, flush=True)
    return Planned.of(compile_program(program, topology.placement(program.placed)), topology.chip)
