"""What tests of every kind share."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import cheap_jax
import durations
import filelock
import kept_programs
import pytest
import scratch

from mmqa_jax.core.host import skip_absent_tpu
from tests import workers

# Imports make next to no garbage; see pytest_collection_finish.
gc.disable()

# Processes that tests start find the repository's packages, from any folder.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)
# Before a test imports jax; processes that tests start inherit both.
skip_absent_tpu()
# Compiling is much of what tests cost: XLA leaves most of its optimizations out, see `_optimized`,
# and its fusion emitters, whose code LLVM takes several times as long to compile; and it does not cut
# each program into parts for LLVM's threads, which costs small programs more than it saves. With 0 in
# the environment it compiles as for users (tests/long.py).
_AS_FOR_USERS = os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1") == "0"
_QUICK_TO_COMPILE = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
# Later versions end at a flag that they do not know.
_flags = os.environ.get("XLA_FLAGS", "")
# They are part of each program's key: workers, which inherit them, must not say them twice.
if (
    not _AS_FOR_USERS
    and _QUICK_TO_COMPILE not in _flags
    and importlib.metadata.version("jaxlib").startswith("0.10.")
):
    os.environ["XLA_FLAGS"] = f"{_flags} {_QUICK_TO_COMPILE}".strip()

# Python keeps 512 compiled patterns; transformers' key maps and ours have three times as many, which
# would be compiled again for every model that is saved or read.
re._MAXCACHE = 8192

# The place of these caches of the GPU compiler, beside the programs, would be part of each program's key: equal
# programs of two verbs whose caches lie in two folders would be compiled twice.
os.environ["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "none"

# How a file of tests/unit says that it trains or compiles models, starts processes, or takes more
# than a few seconds for other reasons; `--quick` leaves it out before it is imported, and tests of
# other files that are marked one by one.
_SLOW = re.compile(r"^pytestmark = (?:pytest\.|\[[^\]]*)mark\.slow\b", re.MULTILINE)


MESH = Path(__file__).parent / "mesh"
_SCRATCH = pytest.StashKey[Path | None]()


@functools.cache
def is_slow(file: Path) -> bool:
    return bool(_SLOW.search(file.read_text(encoding="utf-8")))


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
    if not hasattr(config, "workerinput"):  # workers inherit it
        config.stash[_SCRATCH] = scratch.take()
    if config.getoption(durations.OPTION):
        config.pluginmanager.register(durations.Durations(config))


def pytest_ignore_collect(collection_path, config):
    if collection_path == MESH and not all(MESH in parents(name) for name in config.args):
        return True  # its number of devices would be all tests'
    if not config.getoption("--quick") or collection_path.suffix != ".py":
        return None
    return collection_path.parent.name != "unit" or is_slow(collection_path) or None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    # Short files last: then no worker is left alone with a long one.
    items.sort(key=lambda item: item.path.parent.name == "unit" and not is_slow(item.path))


def pytest_collection_finish():
    # What is imported stays, and need not be looked through again and again.
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_sessionstart(session):
    if not hasattr(session.config, "workerinput"):
        kept_programs.take()
    # A shell's background job ignores Ctrl-C, one of nohup the end of its terminal, and so would all
    # that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    workers.share(specs, forks=not config.getoption("--quick"))


def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        kept_programs.keep()


def pytest_unconfigure(config):
    scratch.give_back(config.stash.get(_SCRATCH, None))


@pytest.fixture(scope="module", autouse=True)
def _optimized(request) -> Iterator[None]:
    """XLA's optimizations, where a test is about them (`pytestmark = pytest.mark.optimized`)."""
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


def _cache(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "xla").symlink_to(kept_programs.FOLDER)
    return folder


@pytest.fixture(scope="session")
def shared_root(tmp_path_factory, request) -> Path:
    """The folder of temporary files of all workers."""
    root = tmp_path_factory.getbasetemp()
    return root.parent if hasattr(request.config, "workerinput") else root


@pytest.fixture(scope="session")
def made_once(shared_root) -> Callable[[str, Callable[[Path], None]], Path]:
    """Gives a folder by its name that the first worker to ask fills; the others wait for it."""
    root = shared_root

    def get(name: str, fill: Callable[[Path], None]) -> Path:
        folder, filled = root / name, root / f"{name}.filled"
        with filelock.FileLock(root / f"{name}.lock"):
            if not filled.exists():
                folder.mkdir()  # a second try, after one that failed, fails here
                fill(folder)
                filled.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def cli_cache(tmp_path_factory) -> Path:
    """A cache folder for verbs, empty but for what all tests share: compiled programs, read words."""
    return _cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def fresh_cache(tmp_path) -> Iterator[Path]:
    """As `cli_cache`, of one test."""
    yield _cache(tmp_path / "cache")
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    # A verb may have set it to this folder, which is removed now.
    jax.config.update("jax_compilation_cache_dir", str(kept_programs.FOLDER))
    compilation_cache.reset_cache()


@pytest.fixture(scope="module", autouse=True)
def _kept_programs() -> Iterator[None]:
    """JAX's compilation cache, in the tests' own process."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    chosen = {
        "jax_compilation_cache_dir": str(kept_programs.FOLDER),
        "jax_persistent_cache_min_compile_time_secs": 0.0,  # there are thousands of small ones
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
    jax.clear_caches()  # a worker's programs would take gigabytes


@pytest.fixture(scope="module", autouse=True)
def _one_lowering_context() -> Iterator[None]:
    """JAX makes an MLIR context, 5 ms, for each program that it lowers: here one a thread and file does."""
    from jax._src.interpreters import mlir

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlir, "make_ir_context", cheap_jax.made_once(mlir.make_ir_context))
        yield
