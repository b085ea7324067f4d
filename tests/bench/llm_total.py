"""The rows `total_N` of `python -m tests.bench llm`: a processor's seconds from a new process to written answers.

Both sides read the same folder, SmolLM2 in transformers' format, and the same file of prompts that
share nothing, and write greedy answers. Ours is `mmqa prompt` with its programs in the compile
cache, as after the first run on a machine; the peer is what one would write with transformers:
prompts sorted by length, padded on the left, in batches as large as ours. Where llama.cpp's server
is installed, its seconds stand beside them (see llama_cpp.py). Processes take turns, and their
seconds are those of all their threads on a processor; PyTorch's threads wait for each other on one,
so that one core (`taskset -c 0`) is fair. `wall_` are seconds of the clock.

This module loads no numerical library at import.
"""

from __future__ import annotations

import collections
import json
import pydoc_data.topics
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mmqa_jax.core.host import threads
from mmqa_jax.weights.bundled import smollm2_path
from tests.bench import llama_cpp
from tests.bench.runner import Case, Peak
from tests.bench.timing import Child, run_child

ROWS = {"total_40": 40, "total_160": 160, "total_400": 400}  # name -> number of prompts
_WORDS = 64  # of a prompt
_NEW_TOKENS = 16


def cases(wanted: Sequence[str], *, rounds: int, batch: int) -> Iterator[Case]:
    """The rows `wanted`: seconds of whole processes, medians over the rounds."""
    with tempfile.TemporaryDirectory(prefix="mmqa-bench-") as name:
        folder = Path(name)
        publish(folder / "model")
        for kind in llama_cpp.kinds():
            llama_cpp.write_gguf(smollm2_path(), folder / f"{kind}.gguf", kind)
        peak = Peak(2048, "float32")
        for row in wanted:
            write_prompts(folder, row)
            _python(*our_command(folder, row, batch))  # compiles what these lengths need
            sides: dict[str, list[Child]] = collections.defaultdict(list)
            for _ in range(rounds):
                sides["ours"].append(_python(*our_command(folder, row, batch)))
                sides["peer"].append(_peer(folder, row, batch))
                for kind in llama_cpp.kinds():
                    sides[f"llama_cpp_{kind}"].append(_llama_cpp(folder, row, batch, kind))
                peak.measure(1)
            seconds = {
                name: statistics.median(child.processor_seconds for child in children)
                for name, children in sides.items()
            }
            wall = {
                f"wall_{name}": statistics.median(child.seconds for child in children)
                for name, children in sides.items()
            }
            others = {name: of for name, of in seconds.items() if name.startswith("llama_cpp")}
            yield Case(
                row,
                "s",
                seconds["ours"],
                seconds["peer"],
                notes={
                    "work": f"{ROWS[row]} prompts of {_WORDS} words, {_NEW_TOKENS} new tokens",
                    "same_answers": _same(folder, row),
                    **others,
                    **wall,
                    **{f"same_answers_{name}": _same(folder, row, name) for name in others},
                    "matmul_gflops": peak.best / 1e9,  # XLA's
                },
            )


def write_prompts(folder: Path, row: str) -> None:
    """The prompts of a row: pieces of the Python language reference, all different."""
    words = "\n".join(pydoc_data.topics.topics.values()).split()
    lines = [" ".join(words[n * _WORDS : (n + 1) * _WORDS]) for n in range(ROWS[row])]
    (folder / f"{row}.txt").write_text("\n".join(lines) + "\n")


def our_command(folder: Path, name: str, batch: int) -> tuple[str, ...]:
    """What Python runs to answer a row's prompts."""
    return (
        *("-m", "mmqa_jax.cli", "prompt", "--raw", f"--model={folder / 'model'}", "--no_cache"),
        *(f"--prompts={folder / name}.txt", f"--out={folder / name}.ours.jsonl"),
        *(f"--config.engine.slots={batch}", "--config.engine.length=512"),
        f"--config.decoding.max_new_tokens={_NEW_TOKENS}",
    )


def _peer(folder: Path, name: str, batch: int) -> Child:
    call = f"import sys; from {__name__} import answer_by_transformers as run; run(*sys.argv[1:])"
    files = (folder / "model", folder / f"{name}.txt", folder / f"{name}.peer.jsonl")
    return _python("-c", call, *map(str, files), str(batch))


def _llama_cpp(folder: Path, name: str, batch: int, kind: str) -> Child:
    call = f"import sys; from {llama_cpp.__name__} import answer as run; run(*sys.argv[1:])"
    files = (f"{name}.txt", f"{name}.llama_cpp_{kind}.jsonl")
    prompts, out = (str(folder / file) for file in files)
    sizes = (str(batch), str(_NEW_TOKENS))
    return _python("-c", call, str(folder / f"{kind}.gguf"), kind, prompts, out, *sizes)


def _python(*arguments: str) -> Child:
    return run_child([sys.executable, *arguments], {"MMQA_PROGRESS": "off"})


def _same(folder: Path, name: str, peer: str = "peer") -> float:
    """Share of the prompts that we and a peer answer in the same words."""
    texts = [
        [json.loads(line)["text"].strip() for line in file.read_text().splitlines()]
        for file in (folder / f"{name}.ours.jsonl", folder / f"{name}.{peer}.jsonl")
    ]
    return statistics.mean(mine == theirs for mine, theirs in zip(*texts, strict=True))


# What the processes run, or need; each loads what it needs.


def publish(folder: Path) -> None:
    """Writes SmolLM2 in float32 in transformers' format, with its tokenizer.

    Raises:
      UserError: its package is not installed.
    """
    import transformers
    from flax import nnx

    from mmqa_jax.models.llama.keys import publish_llama
    from mmqa_jax.weights.published import load_published, write_published

    path = smollm2_path()
    model = load_published("llama", path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    end = {"eos_token_id": tokenizer.eos_token_id}
    write_published(folder, publish_llama(model.config, nnx.state(model)), more=end)
    tokenizer.save_pretrained(folder)


def answer_by_transformers(model: str, prompts: str, out: str, batch: str) -> None:
    """Answers a file of prompts, one a line; writes JSON lines in its order.

    Args:
      model: folder in transformers' format.
      prompts, out: files.
      batch: prompts at a time.
    """
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(threads())
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    network.eval().to(device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, padding_side="left")
    tokenizer.pad_token_id = tokenizer.eos_token_id
    lines = Path(prompts).read_text().splitlines()
    order = sorted(range(len(lines)), key=lambda n: len(lines[n]))
    texts: dict[int, str] = {}
    for start in range(0, len(order), int(batch)):
        rows = order[start : start + int(batch)]
        inputs = tokenizer([lines[n] for n in rows], return_tensors="pt", padding=True).to(device)
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            generated = network.generate(
                **inputs,
                max_new_tokens=_NEW_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        new = generated[:, inputs["input_ids"].shape[1] :]
        texts |= dict(zip(rows, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True))
    rows = (json.dumps({"text": texts[n]}, ensure_ascii=False) for n in range(len(lines)))
    Path(out).write_text("\n".join(rows) + "\n")
