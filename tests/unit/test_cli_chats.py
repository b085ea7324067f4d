"""`mmqa prepare chat`, and `mmqa train` on conversations."""

import json

import pytest
from cli_runs import done, flags_with, png, quietly, rows_of
from tiny_llm import write_folder, write_qwen_vl

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quiet")]

TINY = {
    "inference.batch_size": 2, "batches.length": 128, "batches.targets": 32,
    "batches.batch_size": 2, "batches.threads": 0, "train.steps": 12, "train.checkpoint_every": 6,
    "train.log_every": 3, "train.evaluate_every": 6, "train.optimizer.learning_rate": 0.02,
    "train.optimizer.warmup": 0.0, "validate.metric": "log_likelihood",
}  # fmt: skip


def chat(count: int, pictures: int) -> dict:
    names = [("red.png", "blue.png")[n % 2] for n in range(pictures)]
    shown = [{"type": "image_url", "image_url": {"url": name}} for name in names]
    asked = [*shown, {"type": "text", "text": "Which"}]
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "A flag."}]
    return {"messages": messages * count}


@pytest.fixture(scope="module")
def data(cli_cache, tmp_path_factory):
    """Conversations with up to three pictures, and such of words; two tiny models."""
    folder = tmp_path_factory.mktemp("chats")
    kinds = {"pictured": (0, 1, 1, 2, 2, 3, 2, 1), "words": (0,) * 6}
    for name, pictures in kinds.items():
        raw = folder / f"{name}_raw"
        raw.mkdir()
        for color, rgb in (("red", (200, 30, 40)), ("blue", (20, 30, 210))):
            (raw / f"{color}.png").write_bytes(png(rgb))
        rows = [json.dumps(chat(1 + (n == 0), count)) for n, count in enumerate(pictures)]
        (raw / "train.jsonl").write_text("\n".join(rows))
        (raw / "val.jsonl").write_text("\n".join(rows[:4]))
        with quietly(cli_cache):
            done("prepare", "chat", f"--raw={raw}", f"--out={folder / name}")
    write_qwen_vl(folder / "vlm")
    write_folder(folder / "llm")
    return folder


@pytest.mark.parametrize(
    ("config", "model", "kind", "more"),
    [
        ("scienceqa/rmr_finetune.py", "llm", "words", {"validate.shots": "(0,)"}),
        ("aokvqa/vlm_finetune.py", "vlm", "mixture",
         {"pictures.most": 2, "model.vision.max_pixels": 400}),
    ],
)  # fmt: skip
def test_a_model_learns_conversations_and_the_loss_of_others_falls(
    data, tmp_path, config, model, kind, more
):
    values = {**TINY, "init": data / model, **more}
    if kind == "mixture":
        values["data.mixture"] = f"(('{data / 'pictured'}', 2), ('{data / 'words'}', 1))"
    else:
        values["data.dir"] = data / kind
    done(*flags_with("train", config, tmp_path / "run", values))
    rows = rows_of(tmp_path / "run" / "metrics.jsonl")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.1
    first, last = [row["eval/log_likelihood"] for row in rows if "eval/log_likelihood" in row][:2]
    assert first < last < 0
    assert "eval/accuracy" not in rows[-1]


def test_pictures_are_refused_by_a_model_of_words(data, tmp_path, refused):
    values = {**TINY, "init": data / "llm", "data.dir": data / "pictured"}
    run = flags_with("train", "scienceqa/rmr_finetune.py", tmp_path / "run", values)
    refused(*run, message="shows pictures, which the model does not see")
