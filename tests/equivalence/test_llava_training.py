"""Three steps of LLaVA and LLaVA-OneVision beside transformers in float64: rows of several pictures,
alone and beside others, with a frozen tower and without."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from llava_pair import make_pair
from safetensors.numpy import load_file
from test_onevision import pair as onevision  # noqa: F401, a fixture
from test_onevision import pictures as smooth_pictures
from test_onevision import torch_pictures
from updates import our_updates

from mmqa_jax.data.batches.packing import Bucket
from mmqa_jax.data.batches.texts import RowSize, TokenExample
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question
from mmqa_jax.models.llava.keys import llava_key_map, publish_llava
from mmqa_jax.models.onevision.keys import onevision_key_map, publish_onevision
from mmqa_jax.prompting.picture_format import picture_format
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.tasks.vision_language import (
    PicturedRows,
    TrainingPictures,
    VisionLanguageObjective,
    pictured_shapes,
)
from mmqa_jax.training.optimizer import OptimizerOptions
from tests.pictures import encoded
from tests.refusals import refuses

pytestmark = pytest.mark.slow

BOUND, SIZE = 1e-6, RowSize(40, 12)
SHOWN = [(0,), (1, 2), ()]  # of each row: alone, two, none


class Noise:
    """Squares of a LLaVA, without a file."""

    def __init__(self, side: int):
        rng = np.random.default_rng(2)
        self.squares = rng.integers(0, 256, (3, side, side, 3)).astype(np.uint8)

    def look_ahead(self, names: Any) -> None:
        pass

    def pixels(self, name: str, alone: bool = True) -> np.ndarray:
        return self.squares[int(name[0])]


def examples(image: int) -> list[TokenExample]:
    words = np.random.default_rng(4).integers(3, 80, (3, 34)).astype(np.int32)
    made = []
    for tokens, shown in zip(words, SHOWN, strict=True):
        tokens[[5, 20][: len(shown)]] = image
        learned = np.array([*range(12, 17), *range(27, 34)], np.int32)
        made.append(TokenExample(tokens, 12, tuple(f"{n}.png" for n in shown), learned))
    return made


def case_of(kind: str, request) -> tuple[Any, Any, PicturedRows, Any]:
    """torch's model, ours, our rows, and what transformers makes of the pictures of a row."""
    if kind == "llava":
        made = make_pair("as published", request.getfixturevalue("tmp_path") / "llava")
        config = made.ours.config
        noise = Noise(config.vision.image_size)

        def inputs(shown):
            mean, std = np.array(config.vision.pixel_mean), np.array(config.vision.pixel_std)
            pixels = (noise.squares[list(shown)] / 255.0 - mean) / std
            return {"pixel_values": torch.tensor(pixels.transpose(0, 3, 1, 2).copy())}

        return made.theirs, made.ours, PicturedRows(SIZE, config, noise), inputs
    made = request.getfixturevalue("onevision")
    config = made.ours.config
    seen = smooth_pictures()[1:4]
    files = {f"{n}.png": encoded(picture) for n, picture in enumerate(seen)}
    asked = [Question(name, "train", "What?", image=name, answers=("a",)) for name in files]
    form = picture_format(config, open_text_tokenizer(made.folder))
    pictures = TrainingPictures(Corpus([], asked, files.__getitem__), form, config)
    assert pictures.readable(asked) == asked

    def inputs(shown):
        given = torch_pictures(made, [seen[n] for n in shown])
        return {**given, "pixel_values": given["pixel_values"].double()}

    return made.theirs, made.ours, PicturedRows(SIZE, config, pictures), inputs


@pytest.mark.parametrize("tower", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", ["llava", "onevision"])
def test_three_steps_equal(kind, tower, request, tmp_path, onevision):  # noqa: F811
    theirs, model, rows, inputs = case_of(kind, request)
    config = model.config
    made = examples(config.image_token)
    bucket = Bucket(2, 1)
    if kind == "onevision":
        bucket = Bucket(2, max(of.text for of in rows.pictures.buckets(made)))
    batch = rows.batch([*made, None], bucket)
    wanted = pictured_shapes(4, SIZE, bucket, config)
    assert {k: (x.shape, x.dtype) for k, x in batch.items()} == {
        k: (x.shape, x.dtype) for k, x in wanted.items()
    }
    objective = VisionLanguageObjective(config, tower=tower)
    publish = publish_llava if kind == "llava" else publish_onevision
    options = OptimizerOptions(
        name="adamw",
        learning_rate=1e-3,
        schedule="constant",
        warmup=0.0,
        eps=1e-1,
        weight_decay=0.0,
        clip_norm=None,
        trainable=objective.trained,
    )

    def published(state):
        source = publish(config, state).source
        return {name: source.read(name) for name in source.specs()}.items()

    got = our_updates(objective, model, options, [jax.device_put(batch)] * 3, published)
    whole = type(theirs).from_pretrained(
        save(theirs, tmp_path / "start"), attn_implementation="eager"
    ).double()  # fmt: skip
    frozen = ("vision_tower", "multi_modal_projector", "image_newline")
    for name, p in whole.named_parameters():
        p.requires_grad = tower or not any(part in name for part in frozen)
    trained = [p for p in whole.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-1, weight_decay=0.0)
    for update in got:
        whole.zero_grad()
        total, count = 0.0, 0
        for number, (example, shown) in enumerate(zip(made, SHOWN, strict=True)):
            used = batch["input_ids"][number]
            ids = torch.tensor(used.astype(np.int64))[None]
            logs = (
                whole(input_ids=ids, **(inputs(shown) if shown else {})).logits[0].log_softmax(-1)
            )
            places = torch.tensor(batch["target_positions"][number][: example.targets])
            targets = torch.tensor(batch["target_ids"][number][: example.targets])
            total = total - logs[places.long(), targets.long()].sum()
            count += example.targets
        loss = total / count
        loss.backward()
        assert abs(update.loss - loss.item()) < BOUND * max(1, abs(loss.item()))
        optimizer.step()
    assert got[0].loss - got[-1].loss > 1e-3
    key_map = (llava_key_map if kind == "llava" else onevision_key_map)(config)
    end = load_file(save(whole.float(), tmp_path / "end") / "model.safetensors")
    ours = {key_map.renamed(name): x for name, x in got[-1].parameters.items()}
    ends = {key_map.renamed(name): x for name, x in end.items()}
    assert set(ends) <= set(ours)
    for name, want in ends.items():
        np.testing.assert_allclose(ours[name], want, rtol=0, atol=BOUND, err_msg=name)


def save(model: torch.nn.Module, folder):
    model.save_pretrained(folder)
    return folder


def test_other_kinds_are_refused():
    from mmqa_jax.models.llava.config import PRESETS
    from mmqa_jax.tasks.vision_language import layout_of

    refuses("shows pictures by 'tiles'", layout_of, PRESETS["smolvlm2_500m"]())
