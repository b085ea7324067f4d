"""device_check: steps that fail or were interrupted, and the plan beside what was measured."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("device_check", ROOT / "launch/device_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def program(name, seconds, bound_by="hbm", mfu=0.5):
    memory = {"parameters": 1.0, "optimizer": 2.0, "cache": 0.0, "temporaries": 1.0, "total": 4.0}
    return {
        "name": name, "bound_ms": 1e3 * seconds, "bound_by": bound_by, "mfu_bound": mfu,
        "memory_gib": memory,
    }  # fmt: skip


def record(result=None, **more):
    return {"words": [], "exit_code": 0, "seconds": 1.0, "result": result} | more


def test_the_plan_beside_what_was_measured(check, tmp_path):
    engine = check.ENGINES["full"]
    (tmp_path / "rerank").mkdir()
    rows = [{"step": n, "steps_per_second": rate} for n, rate in ((10, 1.0), (20, 4.0), (30, 5.0))]
    rows.append({"step": 30, "eval/mrr": 0.5})
    path = tmp_path / "rerank" / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="0" skipped="2"/></testsuites>'
    )
    records = {
        "plan_engine": record({"programs": [program("decode", 0.01), program("prefill", 0.02)]}),
        # 64 slots at 3,200 tokens/s: 20 ms a step.
        "llm": record({"device": "a chip", "rows": [
            {"name": "decode", "ours": 3200.0}, {"name": "few_shot", "ours": 1.0},
        ]}),
        "plan_rerank": record({"programs": [program("train", 0.1, "compute", 0.8)]}),
        "train_rerank": record(peak_bytes=5 * 2**30),
        "models": record(exit_code=1),
    }  # fmt: skip
    found = check.summary(records, "full", tmp_path)
    decode, train = found["calibration"]
    assert decode["program"] == "decode"
    assert decode["seconds_measured"] == pytest.approx(engine["slots"] / 3200)
    assert decode["over_bound"] == pytest.approx(2.0)
    assert decode["mfu_measured"] == pytest.approx(0.25)
    assert train["program"] == "train_rerank"
    assert train["over_bound"] == pytest.approx(2.5)
    assert train["mfu_measured"] == pytest.approx(0.32)
    assert (train["memory_gib_plan"], train["memory_gib_measured"]) == (4.0, 5.0)
    assert found["typical_over_bound"] == pytest.approx(2.25)
    assert found["typical_error"] == pytest.approx(1 / 9)
    assert found["typical_memory"] == pytest.approx(1.25)
    assert found["tests"] == {"tests": 9, "failures": 1, "errors": 0, "skipped": 2}
    assert found["failed_steps"] == ["models"]
    assert found["device"] == "a chip"


def test_steps_fail_alone_and_are_not_run_twice(check, tmp_path, monkeypatch, capsys):
    count = f"echo x >> {tmp_path}/ran"
    planned = [
        check.Step("good", ("bash", "-c", f"{count}; echo noise; echo '{{\"a\": 1}}'")),
        check.Step("bad", ("bash", "-c", f"{count}; echo why; exit 3")),
        check.Step("after", ("bash", "-c", count)),
    ]
    monkeypatch.setattr(check, "steps", lambda out, size, tests: planned)
    out = tmp_path / "out"
    assert check.main([f"--out={out}", "--size=small"]) == 1
    found = json.loads((out / "device_check.json").read_text())
    assert found["failed_steps"] == ["bad"]
    assert found["steps"]["good"]["result"] == {"a": 1}
    assert found["steps"]["bad"]["last_lines"] == ["why"]
    assert (found["calibration"], found["typical_error"]) == ([], None)
    assert check.main([f"--out={out}", "--size=small"]) == 1
    assert (tmp_path / "ran").read_text().count("x") == 4  # only the one that failed ran again
