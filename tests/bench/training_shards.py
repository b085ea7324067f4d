"""The rows `embed`, `rerank` and `prompt` of `python -m tests.bench train`: two shards against one.

A job of three shards, of which the last is never started, so that the parts of the others stay in
its folder. `peer` is shard 0 alone on the first core; `ours` is shards 0 and 1 side by side, a core
each. A shard's rate is that of its parts after the first, by the times of their files: starting
Python and compiling are left out. Models and texts are random.

This module loads no numerical library at import.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.host import threads
from tests.bench.runner import Case
from tests.bench.timing import child_environment

ROWS = {"embed": "sources/s", "rerank": "questions/s", "prompt": "prompts/s"}  # row -> its unit
_SHARDS = 3
_MMQA = "import sys; from mmqa_jax.cli import main; sys.exit(main(sys.argv[1:]))"


@dataclasses.dataclass(frozen=True)
class Jobs:
    """How much a shard does.

    Attributes:
      parts: of a shard; its first is not timed.
      sources, questions, prompts: of a part.
      candidates: sources of a question.
      words: of a source or prompt.
      small: models of two layers, for tests.
    """

    parts: int = 6
    sources: int = 192
    questions: int = 48
    prompts: int = 48
    candidates: int = 8
    words: int = 24
    small: bool = False


def cases(wanted: Sequence[str], jobs: Jobs, rounds: int) -> Iterator[Case]:
    """The rows `wanted`: units per second, medians over the rounds.

    Raises:
      UserError: this process may use one core only.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise UserError(
            f"--only={wanted[0]}: two cores were expected, this process may use {threads()}; leave "
            "the row out, or give the process more."
        )
    makers: dict[str, Callable[[Path, Jobs], _Job]] = {
        "embed": _embed,
        "rerank": _rerank,
        "prompt": _prompt,
    }
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as name:
        folder = Path(name)
        if {"embed", "rerank"} & set(wanted):
            _prepare(folder, jobs)
        for row in wanted:
            job = makers[row](folder, jobs)
            alone, both = [], []
            for number in range(rounds):
                alone.append(sum(job.rates(folder / f"{row}-{number}-alone", cores[:1])))
                both.append(sum(job.rates(folder / f"{row}-{number}-both", cores[:2])))
            ratios = [two / single for single, two in zip(alone, both, strict=True)]
            notes = {
                "work": job.work,
                "ratio_range": [float(f"{edge:.5g}") for edge in (min(ratios), max(ratios))],
            }
            ours, peer = statistics.median(both), statistics.median(alone)
            yield Case(row, ROWS[row], ours, peer, floor=2 * peer, notes=notes)


@dataclasses.dataclass(frozen=True)
class _Job:
    """A verb that works in parts.

    Attributes:
      arguments: of the verb, but for --out and --shard.
      items: of a part.
      out: name of the verb's output in a folder.
      parts: glob of the finished parts in that folder, in the order of their numbers.
      work: described.
    """

    arguments: tuple[str, ...]
    items: int
    out: str
    parts: str
    work: str

    def rates(self, folder: Path, cores: Sequence[int]) -> list[float]:
        """Items per second of the shards 0, 1, ..., one on each of the cores, side by side."""
        folder.mkdir()
        started = [
            subprocess.Popen(
                [
                    *("taskset", "-c", str(core), sys.executable, "-c", _MMQA, *self.arguments),
                    *(f"--out={folder / self.out}", f"--shard={shard}/{_SHARDS}"),
                ],
                stdout=subprocess.DEVNULL,
                env=_environment(),
            )
            for shard, core in enumerate(cores)
        ]
        try:
            codes = [process.wait() for process in started]
        finally:
            for process in started:
                process.kill()
        if any(codes):
            raise RunError(f"mmqa {self.arguments[0]} ended with {codes}; see its message above.")
        files = sorted(folder.glob(self.parts))
        return [self._rate(files, shard) for shard in range(len(cores))]

    def _rate(self, files: Sequence[Path], shard: int) -> float:
        of_shard = [file for file in files if int(file.stem) % _SHARDS == shard]
        times = sorted(file.stat().st_mtime for file in of_shard)
        return self.items * (len(times) - 1) / (times[-1] - times[0])


def _environment() -> dict[str, str]:
    return child_environment(JAX_PLATFORMS="cpu", MMQA_PROGRESS="off")


def _mmqa(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MMQA, *arguments], stdout=subprocess.DEVNULL, env=_environment()
    )
    if done.returncode:
        raise RunError(f"mmqa {arguments[0]} ended with {done.returncode}; see its message above.")


def _sentence(chance: random.Random, words: int) -> str:
    return " ".join(f"w{chance.randrange(1500)}" for _ in range(words))


def _write(file: Path, rows: Sequence[dict]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _prepare(folder: Path, jobs: Jobs) -> None:
    """A corpus of random snippets, and questions with candidates among them."""
    chance = random.Random(0)
    count = _SHARDS * jobs.parts * jobs.sources
    asked = _SHARDS * jobs.parts * jobs.questions
    raw = folder / "raw"
    raw.mkdir()
    sources = [
        {"id": f"s{n}", "modality": "text", "text": _sentence(chance, jobs.words)}
        for n in range(count)
    ]
    questions = []
    for number in range(asked):
        gold, *others = chance.sample(range(count), jobs.candidates)
        questions.append(
            {
                "id": f"q{number}",
                "split": "train",
                "question": _sentence(chance, jobs.words // 2),
                "answers": [_sentence(chance, 4)],
                "positives": [f"s{gold}"],
                "negatives": [f"s{other}" for other in others],
            }
        )
    _write(raw / "sources.jsonl", sources)
    _write(raw / "questions.jsonl", questions)
    _mmqa("prepare", "corpus", f"--raw={raw}", f"--out={folder / 'data'}")


def _untrained(folder: Path, jobs: Jobs, task: str) -> Path:
    """A workdir with a random model of the task."""
    workdir = folder / task
    mode = ":runlocal" if jobs.small else ""
    _mmqa(
        *("train", f"--config=configs/atlas/{task}.py{mode}", f"--workdir={workdir}"),
        *("--only_start", f"--config.data.dir={folder / 'data'}", "--config.init=scratch"),
        "--config.tokenizer=corpus:2000",
    )
    return workdir


def _embed(folder: Path, jobs: Jobs) -> _Job:
    model = _untrained(folder, jobs, "contrastive")
    return _Job(
        ("embed", f"--data={folder / 'data'}", f"--model={model}", f"--chunk={jobs.sources}"),
        jobs.sources,
        "index",
        "index/**/shards-*/*.jsonl",
        f"snippets of {jobs.words} words, the text tower of configs/atlas/contrastive.py",
    )


def _rerank(folder: Path, jobs: Jobs) -> _Job:
    model = _untrained(folder, jobs, "rerank")
    return _Job(
        (
            *("rerank", f"--data={folder / 'data'}", f"--model={model}"),
            *("--split=train", "--candidates=restricted", f"--chunk={jobs.questions}"),
        ),
        jobs.questions,
        "ranked.jsonl",
        "ranked.jsonl.parts/[0-9]*.jsonl",
        f"{jobs.candidates} snippets of {jobs.words} words a question, VLP of "
        "configs/atlas/rerank.py",
    )


def _prompt(folder: Path, jobs: Jobs) -> _Job:
    chance = random.Random(1)
    count = _SHARDS * jobs.parts * jobs.prompts
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{_sentence(chance, jobs.words)}\n" for _ in range(count)))
    model = folder / "llm"
    call = f"import sys; from {__name__} import write_llm; write_llm(sys.argv[1], sys.argv[2])"
    size = "small" if jobs.small else "full"
    subprocess.run([sys.executable, "-c", call, str(model), size], check=True, env=_environment())
    return _Job(
        (
            *(
                "prompt",
                "--raw",
                f"--prompts={prompts}",
                f"--model={model}",
                f"--chunk={jobs.prompts}",
            ),
            *("--no_cache", "--config.decoding.max_new_tokens=16"),
            *("--config.engine.slots=8", "--config.engine.length=64"),
        ),
        jobs.prompts,
        "answers.jsonl",
        "answers.jsonl.parts/[0-9]*.jsonl",
        f"{jobs.words} words a prompt, 16 new tokens, a LLaMA of "
        f"{'two' if jobs.small else 'six'} layers",
    )


def write_llm(folder: str, size: str) -> None:
    """Writes a random LLaMA in transformers' format, with a tokenizer of words."""
    from flax import nnx
    from tokenizers import Tokenizer, models, pre_tokenizers

    from mmqa_jax.models.llama.config import LlamaConfig
    from mmqa_jax.models.llama.keys import publish_llama
    from mmqa_jax.models.llama.network import Llama
    from mmqa_jax.weights.published import write_published

    words = ["<unk>", "<end>", *(f"w{n}" for n in range(1500))]
    sizes = {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 2, "mlp": 64}
    if size == "full":
        sizes = {"hidden": 384, "layers": 6, "heads": 6, "kv_heads": 6, "mlp": 1024}
    config = LlamaConfig(vocab_size=len(words), positions=128, **sizes)
    model = Llama(config, rngs=nnx.Rngs(0))
    write_published(Path(folder), publish_llama(config, nnx.state(model)), more={"eos_token_id": 1})
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
