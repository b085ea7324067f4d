"""What tests of every kind share."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import durations
import pytest

from mmqa_jax.core.host import skip_absent_tpu
from tests.fake_devices import fake_devices

# Processes that tests start find the repository's packages, from any folder.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)
# Before a test imports jax; processes that tests start inherit both.
skip_absent_tpu()
# Compiling is most of what tests cost: XLA leaves most of its optimizations out, see `_optimized`,
# and emits a program's operations one by one, which LLVM compiles several times as fast.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
_EMITTERS = "--xla_cpu_use_fusion_emitters=false"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones end at unknown flags
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_EMITTERS}".strip()

# Files of tests/unit that train or compile models; `--quick` leaves them out.
_SLOW = frozenset(
    f"test_{name}.py"
    for name in (
        *("backends", "bench", "bench_input", "bench_llm", "bench_rerank", "bench_retrieval"),
        *("bench_train", "cached_reranker"),
        *("cli_answer", "cli_candidates", "cli_candidates_of_checkpoint", "cli_caption"),
        *("cli_choices", "cli_compare", "collection_plan", "damaged_records"),
        *("cli_convert", "cli_convert_errors", "cli_finetune", "cli_judge", "cli_modality"),
        *("cli_atlas_systems", "cli_prompt", "grid_stage", "launch_slurm"),
        *("cli_run", "cli_run_errors", "inference_killed", "ray_engine", "run_resume"),
        *("cli_store", "outside_task", "shards_cli"),
        *("cli_search", "cli_stages", "cli_train", "embedder", "engine", "engine_pictures"),
        *("flash", "input_workers", "scanned_cache"),
        *("keymap", "learning", "llama_beam", "masked_lm_decoding", "optimizer", "platform_forms"),
        *("hlo", "plan", "recipes"),
        *("retrieval_configs", "two_sided_vlp", "webqa_configs", "webqa_vlp"),
        *("start", "validation", "weights_folder", "wheel"),
    )
)


MESH = Path(__file__).parent / "mesh"


def parents(argument: str) -> list[Path]:
    """The file or folder that an argument of pytest names, and the folders above it."""
    path = Path(argument.partition("::")[0]).absolute()
    return [path, *path.parents]


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="only the unit tests that train and compile no model (launch/test.sh quick)",
    )
    parser.addoption(
        durations.OPTION,
        metavar="FILE",
        help="write the seconds of each test file by kind (launch/test.sh --durations)",
    )
    parser.addoption(
        "--kills",
        type=int,
        default=5,
        help="how often tests/resume/test_random_kills.py kills a training run, and "
        "tests/unit/test_inference_killed.py all inference verbs together (50 takes minutes)",
    )


def pytest_configure(config):
    if config.getoption(durations.OPTION):
        config.pluginmanager.register(durations.Durations(config))


def pytest_ignore_collect(collection_path, config):
    if collection_path == MESH and not all(MESH in parents(name) for name in config.args):
        return True  # its number of devices would be all tests'
    if not config.getoption("--quick") or collection_path.suffix != ".py":
        return None
    return collection_path.parent.name != "unit" or collection_path.name in _SLOW or None


def pytest_collection_modifyitems(items):
    # Short files last: then no worker is left alone with a long one.
    items.sort(key=lambda item: item.path.parent.name == "unit" and item.path.name not in _SLOW)


def pytest_sessionstart():
    # A shell's background job ignores Ctrl-C, and so would all that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _optimized(request) -> Iterator[None]:
    """XLA's optimizations, where results are compared with the originals' and where a test is
    about programs (`pytestmark = pytest.mark.optimized`)."""
    module = request.node
    if not module.get_closest_marker("optimized"):
        yield
        return
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)
        before = jax.config.values["jax_disable_most_optimizations"]
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", before)


# Programs of models are kept between runs: compiling them again is most of these folders' time.
_KEPT_PROGRAMS = Path(__file__).parents[1] / ".pytest_cache" / "jax"
_OF_MODELS = ("equivalence", "mesh")


@pytest.fixture(scope="module", autouse=True)
def _kept_programs(request) -> Iterator[None]:
    """JAX's compilation cache, for tests that do not ask what is compiled."""
    if request.node.path.parent.name not in _OF_MODELS:
        yield
        return
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    chosen = {
        "jax_compilation_cache_dir": str(_KEPT_PROGRAMS),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    before = {name: jax.config.values[name] for name in chosen}
    for name, value in chosen.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def run_on_devices(request) -> Callable[..., str]:
    """Runs a script of the test's folder on fake CPU devices, and returns what it prints.

    Their number is fixed when JAX starts, so that these are processes of their own.
    """

    def run(devices: int, script: str, *arguments: Any) -> str:
        done = subprocess.run(
            [sys.executable, str(request.path.with_name(script)), *map(str, arguments)],
            env=os.environ | fake_devices(devices),
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
