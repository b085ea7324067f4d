"""`python -m tests.bench families`: the table of models by family, as weights/RESULTS.md has it.

A family's deviation is the largest between every layer's output and the logits (of towers the
vectors) of ours and of transformers, where tests/equivalence compares tiny random checkpoints of it
(`--deviations`). Memory is that of a preset's parameters in bfloat16. The times are bounds of `mmqa
plan` for `mmqa prompt` on eight v5e, before compiling.
"""

from __future__ import annotations

import collections
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from mmqa_jax.core.chips import GIB
from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llava.config import LlavaConfig
from mmqa_jax.models.mistral3.network import Mistral3Config
from mmqa_jax.models.onevision.network import OnevisionConfig
from mmqa_jax.models.qwen_vl.network import QwenVLConfig
from mmqa_jax.models.t5.config import PRESETS as T5S
from mmqa_jax.models.two_towers.config import SIGLIPS, SiglipConfig
from mmqa_jax.plan.program import Planned, trace_program
from mmqa_jax.plan.programs import ENGINE, PRESETS, WITH_PICTURES, make_program
from mmqa_jax.plan.topology import Topology, open_topology
from mmqa_jax.plan.verdict import place
from mmqa_jax.weights.registry import architecture
from tests.bench import Options

_ROOT = Path(__file__).parents[2]
_TOPOLOGY = "v5e:2x4"
_MORE = "more than they hold"
_CONFIG = _ROOT / "configs/prompt/default.py"
# Modules of tests/equivalence, and words in the names of their tests of whole models.
_MODULES = (
    *(
        "decoder_families",
        "llama",
        "llava",
        "vlm_families",
        "cut_pictures",
        "gemma4",
        "mistral3",
        "onevision",
        "qwen_vl",
    ),
    *("t5", "siglip"),
)
_TESTS = (
    "layers_and_logits",
    "every_layer_and",
    "layers_and_outputs",
    "every_block",
    "test_logits",
)
_COLUMNS = (
    *("family", "deviation", "presets", "GiB of parameters", "mesh"),
    *("step of decoding, tokens", "batch of prefill, tokens"),
)
_KINDS: Mapping[type, str] = {
    LlavaConfig: "llava",
    Mistral3Config: "mistral3",
    OnevisionConfig: "onevision",
    QwenVLConfig: "qwen_vl",
    SiglipConfig: "siglip",
}  # fmt: skip


def run(options: Options) -> dict[str, Any]:
    """Measures and plans all families, or those selected.

    Raises:
      RunError: a comparison fails.
    """
    families = presets_by_family()
    wanted = options.chosen(tuple(families))
    deviations = measured_deviations()
    topology = open_topology(_TOPOLOGY)
    rows = []
    for family in wanted:
        for name, config in families[family].items():
            print(f"{family}: {name}", file=sys.stderr)
            row = {"family": family, "deviation": deviations.get(family), "preset": name}
            rows.append(row | {"gib": bfloat16_gib(config)} | planned(name, topology))
    for family in sorted(deviations.keys() - families.keys()) if not options.only else ():
        row = {"family": family, "deviation": deviations[family]}
        rows.append(row | {"preset": "", "gib": None})
    return {"bench": "families", "device": topology.name, "rows": rows, "lines": markdown(rows)}


def presets_by_family() -> dict[str, dict[str, Any]]:
    """Family -> name of a preset -> its config; of one config the first name."""
    by_family: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    every: Mapping[str, Callable[[], Any]] = {**PRESETS, **WITH_PICTURES, **T5S, **SIGLIPS}
    for name, make in every.items():
        config = make()
        family = config.family if hasattr(config, "family") else _KINDS[type(config)]
        family = {"mt5": "t5"}.get(family, family)
        if config not in by_family[family].values():
            by_family[family][name] = config
    return dict(by_family)


# Names of models in the comparisons -> their family's, where it is another.
_COMPARED = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def measured_deviations() -> dict[str, float]:
    """Family -> the largest deviation, as the tests of equivalence print it."""
    files = [f"tests/equivalence/test_{name}.py" for name in _MODULES]
    command = [sys.executable, "-m", "pytest", "-q", *files, "-k", " or ".join(_TESTS)]
    ended = subprocess.run(
        [*command, "--deviations"], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        raise RunError(f"the comparisons failed:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    largest = _largest(ended.stdout.splitlines())
    return {_COMPARED.get(name, name): deviation for name, deviation in largest}


def _largest(lines: list[str]) -> Iterator[tuple[str, float]]:
    """The rows of the table of tests/equivalence/deviations.py, by model."""
    deviations: dict[str, float] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 5 and cells[2][:1].isdigit():
            deviations[cells[0]] = max(deviations.get(cells[0], 0.0), float(cells[2]))
    yield from deviations.items()


def bfloat16_gib(config: Any) -> float:
    """GiB of all parameters."""
    kinds = {LlamaConfig: "llama", **_KINDS}
    entry = architecture(kinds.get(type(config), "t5"))
    state = nnx.state(nnx.eval_shape(lambda: entry.build(config, rngs=nnx.Rngs(0))))
    return 2 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state)) / GIB


def planned(name: str, topology: Topology) -> dict[str, Any]:
    """Mesh and milliseconds of the engine's programs; nothing of what no engine serves."""
    if name not in (*PRESETS, *WITH_PICTURES):
        return {}
    config, row = load_config(str(_CONFIG)), {}
    for program_name in ENGINE:
        on = place(program_name, config, topology)
        try:
            program = make_program(program_name, config, on.devices, name)
        except UserError:  # it does not fit
            return {"mesh": _MORE}
        planned = Planned.of(trace_program(program, on.placement(program.placed)), on.chip)
        if not planned.fits:
            return {"mesh": _MORE}
        mesh = [f"{axis}={size}" for axis, size in program.mesh.items() if size > 1]
        row |= {"mesh": " ".join(mesh), program_name: 1e3 * planned.bound.seconds}
        row[f"{program_name}_tokens"] = program.examples
    return row


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The table's lines; a family is named once, and its presets without a plan share a line."""
    lines = [_COLUMNS, ("---", "---:", "---", "---", "---", "---:", "---:")]
    for family, of_family in itertools.groupby(rows, key=lambda row: row["family"]):
        first = [f"`{family}`", ""]
        for has_plan, some in itertools.groupby(of_family, key=lambda row: "mesh" in row):
            shared = list(some)
            first[1] = _number(shared[0]["deviation"], ".1e") if first[0] else ""
            for group in [[row] for row in shared] if has_plan else [shared]:
                names = " ".join(f"`{row['preset']}`" for row in group if row["preset"])
                memory = " ".join(_number(row["gib"], ".3g") for row in group)
                times = (
                    f"{row[name]:.3g} ms, {row[f'{name}_tokens']:,}" if name in row else "–"
                    for row in group[:1]
                    for name in ENGINE
                )
                lines.append((*first, names or "–", memory, group[0].get("mesh", "–"), *times))
                first = ["", ""]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
