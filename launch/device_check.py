"""The steps of device_check.sh, and the plan's estimates beside what was measured."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
BENCH = ["python", "-m", "tests.bench"]
TRAINED = ("contrastive", "rerank")  # the demo's tasks whose training steps are timed
STEPS_PER_RUN = 60
# The engine as `python -m tests.bench llm` runs it: slots, columns, prompt tokens of one prefill.
ENGINES = {
    "full": {"model": "llama2_7b", "slots": 64, "length": 1024, "prefill_tokens": 256},
    "small": {"model": "smollm2", "slots": 16, "length": 768, "prefill_tokens": 256},
}


class Step(NamedTuple):
    """One process: `mmqa` or `python` with these words, or another program."""

    name: str
    words: tuple[str, ...]


def steps(out: Path, size: str, *, tests: bool) -> list[Step]:
    """What is run, in order."""
    engine = ENGINES[size]
    found = [Step("preflight", ("bash", "launch/preflight.sh", f"--workdir={out}", "--json"))]
    found.append(
        Step(
            "plan_engine",
            (
                *("mmqa", "plan", "--config=configs/prompt/default.py"),
                *(f"--model={engine['model']}", "--topology=local", "--json"),
                *(
                    f"--config.engine.{name}={engine[name]}"
                    for name in ("slots", "length", "prefill_tokens")
                ),
            ),
        )
    )
    rows = [f"--only={name}" for name in ("few_shot", "different", "prefill", "decode")]
    found.append(Step("llm", (*BENCH, "llm", f"--size={size}", *rows, "--json")))
    found.append(Step("models", (*BENCH, "models", f"--size={size}", "--json")))
    found.append(Step("detector", (*BENCH, "detector", f"--size={size}", "--json")))
    found.append(Step("data", ("mmqa", "prepare", "atlas", f"--out={out / 'atlas'}", "--json")))
    for task in TRAINED:
        config = f"--config=configs/atlas/{task}.py{':runlocal' if size == 'small' else ''}"
        found.append(
            Step(
                f"plan_{task}",
                ("mmqa", "plan", config, "--only=train", "--topology=local", "--json"),
            )
        )
        found.append(
            Step(
                f"train_{task}",
                (
                    *("mmqa", "train", config, f"--config.data.dir={out / 'atlas'}"),
                    *(f"--workdir={out / task}", f"--config.train.steps={STEPS_PER_RUN}"),
                    *("--config.train.log_every=10", "--config.train.evaluate_every=0"),
                    *(f"--config.train.checkpoint_every={STEPS_PER_RUN}", "--json"),
                ),
            )
        )
    if tests:
        kernels = [f"tests/unit/test_{name}.py" for name in ("ragged_triton", "ragged_attention")]
        found.append(Step("kernels", ("python", "-m", "pytest", *kernels)))
        report = f"--junitxml={out / 'tests.xml'}"
        found.append(Step("tests", ("python", "-m", "pytest", "tests/equivalence", report)))
    return found


def run_step(step: Step, out: Path) -> dict[str, Any]:
    """Runs a step, unless an earlier check finished it; returns its record."""
    record = out / f"{step.name}.json"
    if record.exists():
        found = json.loads(record.read_text())
        if found["exit_code"] == 0 and found["words"] == list(step.words):
            return found
    words = list(step.words)
    if words[0] == "mmqa" or words[:3] == BENCH:  # to learn the devices' peak memory
        words = [sys.executable, __file__, f"--peak_of={out / step.name}.peak", *words]
    elif words[0] == "python":
        words[0] = sys.executable
    environment = dict(os.environ)
    if "pytest" in step.words:  # products in whole float32, as on the CPU
        environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
    began = time.time()
    with open(out / f"{step.name}.log", "w+", encoding="utf-8") as log:
        code = subprocess.run(
            words, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        ).returncode
        log.seek(0)
        lines = log.read().splitlines()
    found = {"words": list(step.words), "exit_code": code, "seconds": round(time.time() - began, 1)}
    found["result"] = _last_json(lines)
    peak = out / f"{step.name}.peak"
    if peak.exists():
        found["peak_bytes"] = json.loads(peak.read_text())
    if code:
        found["last_lines"] = lines[-5:]
    record.write_text(json.dumps(found, indent=2))
    return found


def _last_json(lines: Sequence[str]) -> Any:
    for line in reversed(lines):
        if line.startswith("{"):
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                return None
    return None


def measured_seconds(records: Mapping[str, Any], size: str, out: Path) -> dict[str, float]:
    """Seconds that one call of each program took, by the plan's name for it."""
    engine, found = ENGINES[size], {}
    rows = (records.get("llm", {}).get("result") or {}).get("rows", [])
    tokens_per_call = {"decode": engine["slots"], "prefill": engine["prefill_tokens"]}
    for row in rows:
        if row["name"] in tokens_per_call:
            found[row["name"]] = tokens_per_call[row["name"]] / row["ours"]
    for task in TRAINED:
        path = out / task / "metrics.jsonl"
        logged = [json.loads(line) for line in path.open()] if path.exists() else []
        rates = [row["steps_per_second"] for row in logged if row.get("steps_per_second")]
        if rates:
            found[f"train_{task}"] = 1 / statistics.median(rates)
    return found


def calibration(records: Mapping[str, Any], measured: Mapping[str, float]) -> list[dict[str, Any]]:
    """Each program's estimate beside what was measured.

    `seconds_bound` is the least that the chip's data sheet allows, so `over_bound` is above 1; its
    median is what to multiply a plan's times by on this device.
    """
    rows = []
    for name, record in records.items():
        if not name.startswith("plan_") or not record.get("result"):
            continue
        task = name.removeprefix("plan_")
        for program in record["result"]["programs"]:
            key = program["name"] if task == "engine" else f"{program['name']}_{task}"
            if key not in measured:
                continue
            row = {"program": key, "seconds_bound": program["bound_ms"] / 1e3}
            row |= {"seconds_measured": measured[key], "bound_by": program["bound_by"]}
            row["over_bound"] = measured[key] / row["seconds_bound"]
            if program.get("mfu_bound") is not None:
                row["mfu_measured"] = program["mfu_bound"] / row["over_bound"]
            peak = records.get(key, {}).get("peak_bytes")
            if peak:
                row["memory_gib_plan"] = program["memory_gib"]["total"]
                row["memory_gib_measured"] = peak / 2**30
            rows.append(row)
    return rows


def summary(records: Mapping[str, Any], size: str, out: Path) -> dict[str, Any]:
    """The one JSON of a check."""
    rows = calibration(records, measured_seconds(records, size, out))
    factors = [row["over_bound"] for row in rows]
    typical = statistics.median(factors) if factors else None
    memory = [
        row["memory_gib_measured"] / row["memory_gib_plan"]
        for row in rows
        if "memory_gib_plan" in row
    ]
    return {
        "device": (records.get("llm", {}).get("result") or {}).get("device"),
        "size": size,
        "calibration": rows,
        "typical_over_bound": typical,
        # How far a plan's time, multiplied by the typical factor, is off as a rule.
        "typical_error": typical and statistics.median(abs(f / typical - 1) for f in factors),
        "typical_memory": statistics.median(memory) if memory else None,
        "tests": _test_counts(out / "tests.xml"),
        "failed_steps": [name for name, record in records.items() if record["exit_code"]],
        "steps": dict(records),
    }


def _test_counts(path: Path) -> dict[str, int] | None:
    if not path.exists():
        return None
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    names = ("tests", "failures", "errors", "skipped")
    return {name: sum(int(suite.get(name, 0)) for suite in suites) for name in names}


def peak_of(path: Path, words: Sequence[str]) -> int:
    """Runs a verb or bench here and writes the first device's peak memory, if it reports one."""
    if words[0] == "mmqa":
        from mmqa_jax.cli import main

        code = main(words[1:])
    else:
        from tests.bench.__main__ import main

        code = main(words[len(BENCH) :])
    if "jax" in sys.modules:
        import jax

        stats = jax.local_devices()[0].memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            path.write_text(json.dumps(stats["peak_bytes_in_use"]))
    return code


def main(argv: Sequence[str]) -> int:
    """Runs the check; exit code 1 if a step failed."""
    if argv and argv[0].startswith("--peak_of="):
        return peak_of(Path(argv[0].partition("=")[2]), argv[1:])
    parser = argparse.ArgumentParser(prog="device_check")
    parser.add_argument("--out", type=Path, default=Path("device_check"))
    parser.add_argument("--size", choices=tuple(ENGINES), default="full")
    parser.add_argument("--skip_tests", action="store_true")
    parser.add_argument("--dry_run", action="store_true")
    arguments = parser.parse_args(argv)
    out = arguments.out
    planned = steps(out, arguments.size, tests=not arguments.skip_tests)
    if arguments.dry_run:
        for step in planned:
            print(f"{step.name}: {' '.join(step.words)}")
        return 0
    out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.getenv("PYTHONPATH")])]
    )
    records = {}
    for step in planned:
        print(f"{step.name} ...", flush=True)
        records[step.name] = record = run_step(step, out)
        print(f"{step.name}: exit code {record['exit_code']}, {record['seconds']} s", flush=True)
    found = summary(records, arguments.size, out)
    (out / "device_check.json").write_text(json.dumps(found, indent=2) + "\n")
    for row in found["calibration"]:
        print(
            f"{row['program']}: bound {row['seconds_bound']:.4g} s ({row['bound_by']}), measured "
            f"{row['seconds_measured']:.4g} s, {row['over_bound']:.2f} x"
        )
    print(out / "device_check.json")
    return 1 if found["failed_steps"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
