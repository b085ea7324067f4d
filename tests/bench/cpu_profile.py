"""`python -m tests.bench cpu_profile`: where a processor's seconds of `mmqa prompt` go.

The work is that of the rows `total_N` of `llm`. `code` is by what runs, from samples of `perf`: a
whole process, its start included. `operations` is by what XLA's programs compute, from JAX's trace,
whose times are of the clock: their shares are of XLA's operations alone.

This module loads no numerical library at import.
"""

from __future__ import annotations

import collections
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmqa_jax.core.errors import UserError
from tests.bench import Options, llm_total
from tests.bench.timing import Child, run_child

_PROMPTS, _BATCH = {"small": "total_40", "full": "total_160"}, 16
_SAMPLES = 199  # a second
# What a symbol, or else its library, begins with -> what it is.
_CODE = {
    "ynn::dot_": "products",
    "ynn::transpose": "matrices and keys laid for products",
    "[JIT]": "XLA's other programs",
    "libjax_common": "JAX and XLA's runtime",
    "libpython": "Python",
    "[kernel": "the kernel",
}
_LAYER = "jit__layer"  # of decoding.layer_programs
_CACHE = {"gather": "pages taken out of the cache", "scatter": "the cache written"}


def run(options: Options) -> dict[str, Any]:
    """Profiles the process twice; returns the tables' lines, and their rows."""
    from mmqa_jax.core.host import device_name

    names = options.chosen(("code", "operations"))
    if "code" in names and shutil.which("perf") is None:
        raise UserError(
            "tests.bench cpu_profile: the row `code` needs perf; install it, or use --only=operations."
        )
    prompts = _PROMPTS[options.size or "full"]
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as place:
        folder = Path(place)
        llm_total.publish(folder / "model")
        llm_total.write_prompts(folder, prompts)
        command = llm_total.our_command(folder, prompts, _BATCH)
        _run(sys.executable, *command)  # compiles what these lengths need
        sides = {"code": _by_code, "operations": _by_operations}
        rows = [row for name in names for row in sides[name](folder, command)]
    head = ["| profile | what | seconds | share |", "|---|---|---:|---:|"]
    return {
        "bench": "cpu_profile",
        "device": device_name(),
        "rows": rows,
        "lines": head
        + [
            f"| {row['profile']} | {row['what']} | {row['seconds']:.1f} | {row['share']:.1%} |"
            for row in rows
        ],
    }


def _run(*command: str, **variables: str) -> Child:
    return run_child(command, {"JAX_PLATFORMS": "cpu", "MMQA_PROGRESS": "off", **variables})


def _rows(profile: str, weights: Mapping[str, float], seconds: float) -> Iterator[dict[str, Any]]:
    """Rows of a profile, the largest first, that share `seconds`."""
    whole = sum(weights.values())
    for what, weight in sorted(weights.items(), key=lambda item: -item[1]):
        share = weight / whole
        yield {"profile": profile, "what": what, "seconds": share * seconds, "share": share}


def _by_code(folder: Path, command: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    record = ("perf", "record", "-q", "-F", str(_SAMPLES), "-o", str(folder / "perf.data"), "--")
    child = _run(*record, sys.executable, *command)
    columns = ("--sort=dso,symbol", "--fields=sample,dso,symbol", "--field-separator=;")
    report = ("perf", "report", "--stdio", "-i", str(folder / "perf.data"), *columns)
    text = subprocess.run(report, capture_output=True, text=True, check=True).stdout
    yield from _rows("code", _samples(text), child.processor_seconds)


def _samples(report: str) -> Mapping[str, float]:
    """Samples of each kind of code, of lines `count;library;symbol;...`."""
    samples: collections.Counter[str] = collections.Counter()
    for line in report.splitlines():
        if line.count(";") > 1 and not line.startswith("#"):
            count, library, symbol = (field.strip() for field in line.split(";")[:3])
            places = symbol.partition("] ")[2], library
            what = (kind for start, kind in _CODE.items() for x in places if x.startswith(start))
            samples[next(what, "other libraries")] += int(count)
    return samples


def _by_operations(folder: Path, command: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    call = f"import sys; from {__name__} import traced as run; run(*sys.argv[1:])"
    dump = (
        f"--xla_dump_to={folder / 'texts'} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={_LAYER}"
    )
    variables = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {dump}",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # a program that is read from it has no text
    }
    _run(sys.executable, "-c", call, str(folder), *command[2:], **variables)
    nanoseconds = _times(folder)
    yield from _rows("operations", nanoseconds, sum(nanoseconds.values()) / 1e9)


def traced(folder: str, *arguments: str) -> None:
    """Runs mmqa's command line under JAX's profiler, which writes to the folder."""
    import jax

    from mmqa_jax import cli

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(Path(folder) / "trace"), profiler_options=options):
        code = cli.main(arguments)
    sys.exit(code)


def _times(folder: Path) -> Mapping[str, float]:
    """Nanoseconds of what XLA's programs computed."""
    import jax

    (file,) = (folder / "trace").rglob("*.xplane.pb")
    sums: collections.Counter[tuple[int, str, str]] = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                name = stats.get("hlo_op", "while")
                if not name.startswith(("while", "call", "conditional")):  # others lie in these
                    sums[stats["program_id"], stats["hlo_module"], name] += event.duration_ns
    kinds: collections.Counter[str] = collections.Counter()
    sources = {
        int(text.name[7:].partition(".")[0]): _sources(text.read_text())
        for text in (folder / "texts").glob(f"module_*.{_LAYER}.*cpu_after_optimizations.txt")
    }
    for (program, module, name), nanoseconds in sums.items():
        source = sources[program].get(name, "") if module == _LAYER else ""
        kinds[_kind(module, name, source)] += nanoseconds
    return kinds


def _sources(text: str) -> Mapping[str, str]:
    """Instruction -> the operation of JAX's that it computes; of a fusion without one, its last's."""
    from tests.hlo.text import parse

    computations = parse(text).computations
    sources: dict[str, str] = {}
    for computation in computations.values():
        for name, instruction in computation.instructions.items():
            inner = computations.get(instruction.called.get("calls", ""))
            members = [instruction, *(reversed(inner.instructions.values()) if inner else ())]
            names = (member.attribute(r'op_name="([^"]*)"') for member in members)
            sources[name] = next(filter(None, names), "")
    return sources


def _kind(module: str, name: str, source: str) -> str:
    is_product = name.startswith(("ynn_fusion", "dot"))
    if module != _LAYER:
        of_words = module in ("jit__leave_step", "jit_begin")
        if not of_words:
            return "embedding, places, an empty cache"
        return "products with the table of words" if is_product else "choice of tokens"
    if of_cache := _CACHE.get(source.rpartition("/")[2]):
        return of_cache
    if "/while/" in source:
        return "attention's products" if is_product else "attention's softmax"
    return "linear layers' products" if is_product else "norms, rotations, activations, sums"
