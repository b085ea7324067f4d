"""Plans and runs an engine on the devices that JAX has, for test_planned_engine.py."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx
from jax.sharding import Mesh
from tiny_llm import write_folder

from mmqa_jax.core.config import load_config
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.decoding.sizes import engine_programs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.plan import programs
from mmqa_jax.prompting.backends import Completion, Decoding
from mmqa_jax.prompting.backends.cache import answer_all
from mmqa_jax.prompting.backends.config import open_backend
from mmqa_jax.weights.registry import architecture

LENGTH, NEW = 128, 6
CONFIG = Path(__file__).parents[2] / "configs/prompt/default.py"
ONE = {"model.mesh.data": 1, "model.mesh.fsdp": 1, "model.mesh.tensor": 1}
_COLLECTIVE = re.compile(
    r"(?:\w+\[([\d,]*)\]\S* )(all-gather|all-reduce|all-to-all|collective-permute)[-(\w]"
)


def plan_and_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """What is planned, held and answered on several meshes, and what is compiled."""
    write_folder(folder)
    model = architecture("llama").open(folder).config
    monkeypatch.setitem(programs.PRESETS, "tiny", lambda: model)
    return {
        "auto": of(folder, {}),
        "tensor": of(folder, {"model.mesh.tensor": 2}),
        "one": of(folder, ONE),
        "scanned": compiled(model, True),
        "unscanned": compiled(model, False),
    }


def of(folder: Path, changes: dict) -> dict:
    """What is planned and held on each device, and the answers."""
    sizes = {"engine.length": LENGTH, "engine.buckets": (32,)}
    config = load_config(CONFIG, {**changes, **sizes})
    decode = programs.make_program("decode", config, jax.devices(), "tiny")
    backend = open_backend("engine", str(folder), None, config)
    decoding = Decoding(max_new_tokens=NEW, logprobs=True)
    texts = [f"{'abc' * (n % 3 * 12)} {'xyz'[: n % 4]} {n % 7 * 'q'}" for n in range(39)]
    texts.append("w" * (LENGTH - NEW))
    queries = [Completion(n, text, decoding) for n, text in enumerate(texts)]
    answers, *_ = answer_all(backend, queries)
    engine = backend.engine
    candidates = [answers[n].candidates[0] for n in range(len(queries))]
    return {
        "planned": {"parameters": decode.parameters, "cache": decode.cache},
        "held": [
            {
                "parameters": bytes_on(device, nnx.state(engine._model)),
                "cache": bytes_on(device, engine.cache),
            }
            for device in jax.devices()
        ],
        "sizes": backend.sizes(),
        "answers": [{"tokens": one.tokens, "logprobs": one.logprobs} for one in candidates],
    }


def bytes_on(device: jax.Device, tree) -> int:
    """Of the arrays' shards on a device."""
    shards = (shard for array in jax.tree.leaves(tree) for shard in array.addressable_shards)
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


def compiled(model: LlamaConfig, scan: bool) -> dict:
    """The engine's programs on eight copies: what each computes and exchanges."""
    sizes = EngineConfig(slots=16, length=64, buckets=(32,), prefill_tokens=512, scan_layers=scan)
    mesh = make_mesh({"data": 8})
    one = make_mesh({"data": 1}, jax.devices()[:1])
    programs = dict(engine_programs(model, sizes, mesh))
    made = facts(programs, mesh)
    for name, alone in facts(engine_programs(model, sizes, one), one).items():
        made[name]["of_one"] = alone["flops"]
    return made


def facts(programs: Mapping[str, tuple[Any, tuple[Any, ...]]], mesh: Mesh) -> dict[str, dict]:
    """Program -> FLOPs of a device, its collectives and the elements of their results."""
    found = {}
    for name, (function, arguments) in programs.items():
        with jax.set_mesh(mesh):
            program = function.lower(*arguments).compile()
        moved = _COLLECTIVE.findall(program.as_text())
        found[name] = {
            "flops": program.cost_analysis().get("flops", 0),
            "collectives": [kind for _, kind in moved],
            "gathered": sum(math.prod(map(int, shape.split(","))) for shape, _ in moved if shape),
        }
    return found
