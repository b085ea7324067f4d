"""Qwen2.5-VL and Qwen3-VL against transformers: towers, positions, logits, checkpoints."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from compare import WHOLE, compiled, copied, randomize
from flax import nnx
from PIL import Image
from qwen_vl_pair import (
    ANSWERED,
    CASES,
    END,
    IMAGE,
    LENGTH,
    SIZE,
    START,
    TEMPLATE,
    TEXT,
    TOKEN_IDS,
    VISION,
    Pair,
    letters,
    make_pair,
    pictures,
    rewritten,
    torch_inputs,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vlm_checks import export_is_read_by_both

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.data.pictures.resize import PictureSizes, qwen_pixels
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Scoring, TooLong, Unanswerable
from mmqa_jax.decoding.sizes import engine_programs, feature_bytes, tower_programs
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.models.qwen_vl.keys import model_type_of, open_qwen_vl, publish_qwen_vl
from mmqa_jax.models.qwen_vl.network import (
    Grid,
    QwenVisionConfig,
    bucket_of,
    expand_pictures,
    grid_of,
    lay_out,
)
from mmqa_jax.models.qwen_vl.omni import thinker
from mmqa_jax.prompting.backends import Chat, Completion, Decoding, Message, Picture
from mmqa_jax.prompting.backends.engine import EngineBackend
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.weights.config_json import replace_fields
from mmqa_jax.weights.published import load_published
from tests.pictures import encoded
from tests.refusals import refuses

pytestmark = pytest.mark.slow

# One bucket and one segment: a program of each kind.
SIZES = EngineConfig(slots=3, length=640, buckets=(64,), prefill_tokens=128)


@pytest.fixture(scope="module", params=CASES)
def pair(request, tmp_path_factory) -> Pair:
    return make_pair(request.param, tmp_path_factory.getbasetemp() / f"{request.param}_tiny")


@pytest.fixture(scope="module")
def pixels(pair) -> list[np.ndarray]:
    vision = pair.ours.config.vision
    sizes = PictureSizes(vision.unit, vision.min_pixels, vision.max_pixels)
    return [qwen_pixels(picture, sizes) for picture in pictures()]


@pytest.fixture(scope="module")
def torch_pixels(pair) -> dict[str, torch.Tensor]:
    given = pair.processor(images=pictures(), return_tensors="pt")
    return {key: given[key] for key in ("pixel_values", "image_grid_thw")}


@pytest.fixture(scope="module")
def tower(pair, pixels):
    """Pictures, encoded together -> the features of each, [units, features].

    All in the bucket of the largest: programs of smaller ones are the engine's.
    """
    run = compiled(pair.ours, lambda model, batch: model.encode_images(batch))
    vision = pair.ours.config.vision
    bucket = max(bucket_of(grid_of(one.shape, vision), vision) for one in pixels)

    def encode(given: list[np.ndarray]) -> list[np.ndarray]:
        grids = [grid_of(one.shape, vision) for one in given]
        found = np.asarray(run(lay_out(given, vision, bucket)))
        return [rows[: grid.units] for rows, grid in zip(found, grids, strict=True)]

    return encode


def in_their_order(patches: np.ndarray, grid: Grid, vision: QwenVisionConfig) -> np.ndarray:
    """Patches unit by unit, or row by row (PaddleOCR-VL)."""
    if vision.family != "paddleocr_vl":
        return patches
    rows = patches.reshape(*grid, 2, 2, *patches.shape[1:]).swapaxes(1, 2)
    return rows.reshape(patches.shape)


def test_pixels_and_grids(pair, pixels, torch_pixels):
    """Equal values, patch by patch, in transformers' order."""
    vision, first = pair.ours.config.vision, 0
    assert len({one.shape for one in pixels}) == len(pixels)
    for picture, (_, rows, columns) in zip(
        pixels, torch_pixels["image_grid_thw"].tolist(), strict=True
    ):
        grid = grid_of(picture.shape, vision)
        assert (rows, columns) == (grid.rows * 2, grid.columns * 2)
        batch = lay_out([picture], vision, bucket_of(grid, vision))
        ours = batch.patches[0].reshape(-1, 4, vision.patch**2 * 3)[batch.order[0, : grid.units]]
        ours = ours.reshape(len(ours) * 4, -1, 3) / 255.0
        ours = (ours - vision.pixel_mean) / vision.pixel_std
        theirs = torch_pixels["pixel_values"][first : first + rows * columns].numpy()
        theirs = theirs.reshape(len(ours), 3, vision.temporal, -1)
        ours = in_their_order(ours, grid, vision)
        for frame in range(vision.temporal):
            np.testing.assert_allclose(ours, theirs[:, :, frame].swapaxes(1, 2), rtol=0, atol=1e-5)
        first += rows * columns
    assert first == len(torch_pixels["pixel_values"])


def test_every_block(pair, pixels, torch_pixels):
    """Of the first picture, whose sides no window divides."""
    rows, columns = torch_pixels["image_grid_thw"][0, 1:].tolist()
    wanted = []
    hooks = [
        block.register_forward_hook(lambda module, given, out: wanted.append(out.numpy()))
        for block in getattr(pair.theirs.model.visual, "blocks", None)
        or pair.theirs.model.visual.vision_model.encoder.layers
    ]
    with torch.no_grad():
        patches = torch_pixels["pixel_values"][: rows * columns]
        patches = patches[None] if patches.ndim == 4 else patches  # PaddleOCR-VL's
        pair.theirs.model.visual(patches, grid_thw=torch_pixels["image_grid_thw"][:1])
    for hook in hooks:
        hook.remove()
    vision = pair.ours.config.vision
    grid = grid_of(pixels[0].shape, vision)
    assert 0 not in (grid.rows % 3, grid.columns % 3)
    batch = lay_out(pixels[:1], vision, bucket_of(grid, vision))
    got = compiled(pair.ours.vision, lambda model, batch: model.layer_outputs(batch))(batch)
    real = batch.places[0, :, 0] >= 0
    got = [in_their_order(one, grid, vision) for one in np.asarray(got)[:, 0, real]]
    np.testing.assert_allclose(got, np.concatenate(wanted).reshape(np.shape(got)), **WHOLE)


def torch_features(pair: Pair, torch_pixels: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """Of each picture [units, features], with what deepstack takes."""
    with torch.no_grad():
        found = pair.theirs.model.get_image_features(**torch_pixels, return_dict=True)
    layers = [found.pooler_output, *(getattr(found, "deepstack_features", None) or [])]
    return [np.concatenate(parts, axis=-1) for parts in zip(*layers, strict=True)]


def test_features(pair, pixels, torch_pixels, tower):
    """Of pictures side by side; each alone: the engine's, in the tests of answers."""
    wanted = torch_features(pair, torch_pixels)
    for want, got in zip(wanted, tower(pixels), strict=True):
        np.testing.assert_allclose(got, want, **WHOLE)


def prompts() -> list[list[int]]:
    """Two pictures amid many words; one in front; words alone."""
    words = np.random.default_rng(1).integers(3, IMAGE, LENGTH).tolist()
    return [
        [*words[:17], IMAGE, *words[17:120], IMAGE, *words[120:250]],
        [IMAGE, *words[40:71]],
        words[100:133],
    ]


USED = ((0, 2), (1,), ())  # the pictures of each prompt


def test_positions(pair, pixels, torch_pixels):
    """Those of `get_rope_index`, and where the answer goes on."""
    for row, used in zip(prompts(), USED, strict=True):
        shapes = [pixels[n].shape for n in used]
        made = expand_pictures([row], [shapes], pair.ours.config)
        given = torch_inputs(torch_pixels, row, used)
        assert made.input_ids.tolist() == given["input_ids"].tolist()
        want, delta = pair.theirs.model.get_rope_index(
            given["input_ids"],
            mm_token_type_ids=given["mm_token_type_ids"],
            image_grid_thw=given.get("image_grid_thw"),
        )
        np.testing.assert_array_equal(made.positions[0], want[:, 0].T)
        shifts = pair.ours.config.position_shifts(row, shapes)
        assert shifts[-1].tolist() == [int(delta)] * 3


def torch_logits(pair: Pair, torch_pixels: dict[str, torch.Tensor], number: int) -> np.ndarray:
    given = torch_inputs(torch_pixels, prompts()[number], USED[number])
    pair.theirs.model.rope_deltas = None  # of the prompt before
    with torch.no_grad():
        return pair.theirs(**given).logits[0].numpy()


def test_logits(pair, pixels, torch_pixels, tower):
    """Three prompts in a batch, the longest with two pictures."""
    shapes = [[pixels[n].shape for n in used] for used in USED]
    made = expand_pictures(prompts(), shapes, pair.ours.config)
    together = tower(pixels)
    features = np.concatenate([together[n] for used in USED for n in used])
    got = compiled(pair.ours, lambda model, *given: model(*given[:3], positions=given[3]))(
        made.input_ids, features, made.rows, made.positions
    )
    assert made.mask.sum(1).max() > 500
    for number, mask in enumerate(made.mask):
        want = torch_logits(pair, torch_pixels, number)
        np.testing.assert_allclose(np.asarray(got)[number, mask], want, **WHOLE)


def test_the_thinker_of_qwen3_omni_reads_texts_and_pictures(tmp_path, caplog):
    """As on the hub, within the whole model, whose sound is left out."""
    _, tower, text, _ = CASES["qwen3_vl_moe"]
    text = text | {"attention_bias": False, "norm_topk_prob": True}
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=TEXT | text,
        vision_config=VISION | tower,
        audio_config={
            **{"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2},
            **{"encoder_ffn_dim": 16, "downsample_hidden_size": 8, "output_dim": 48},
        },
        attn_implementation="eager",
        **{**TOKEN_IDS, "audio_token_id": 95, "audio_start_token_id": 96},
    )
    kind = transformers.Qwen3OmniMoeThinkerForConditionalGeneration
    theirs = randomize(kind(config), 0, 0.05)
    theirs.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors = {f"thinker.{key}": x for key, x in tensors.items()} | {"talker.x": torch.ones(2)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    inner = json.loads((tmp_path / "config.json").read_text())
    published = {"model_type": "qwen3_omni_moe", "thinker_config": inner, "talker_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(published))
    processor = Qwen2VLImageProcessorPil(size=SIZE, patch_size=4)
    processor.save_pretrained(tmp_path)
    ours = load_published("qwen_vl", tmp_path, unroll=1)
    assert "its audio_tower and talker are left out" in caplog.text
    given = processor(images=pictures(), return_tensors="pt")
    words = np.random.default_rng(1).integers(3, IMAGE, LENGTH).tolist()
    row = [*words[:17], START, IMAGE, END, *words[17:380], START, IMAGE, END, *words[380:]]
    vision = ours.config.vision
    sizes = PictureSizes(vision.unit, vision.min_pixels, vision.max_pixels)
    shown = [qwen_pixels(pictures()[n], sizes) for n in (0, 2)]
    grids = [grid_of(one.shape, vision) for one in shown]
    batch = lay_out(shown, vision, max(bucket_of(grid, vision) for grid in grids))
    rows = compiled(ours, lambda model, batch: model.encode_images(batch))(batch)
    features = np.concatenate(
        [of_one[: grid.units] for of_one, grid in zip(rows, grids, strict=True)]
    )
    made = expand_pictures([row], [[one.shape for one in shown]], ours.config)
    got = compiled(ours, lambda model, *given: model(*given[:3], positions=given[3]))(
        made.input_ids, features, made.rows, made.positions
    )
    inputs = torch_inputs(given, row, (0, 2))
    del inputs["mm_token_type_ids"]
    with torch.no_grad():
        want = theirs(**inputs).logits.numpy()
    np.testing.assert_allclose(got, want, **WHOLE)


def _copy(model: nnx.Module) -> nnx.Module:
    """Its own arrays: an engine takes a model's apart."""
    graphdef, state = nnx.split(model)
    return nnx.merge(graphdef, jax.tree.map(copied, state))


@pytest.fixture(scope="module")
def backend(pair) -> EngineBackend:
    """Of the folder, as `mmqa prompt --model=FOLDER` opens it, with few slots and small chunks:
    pictures begin in one chunk and end in another."""
    return open_backend(pair.folder, engine=SIZES)


@pytest.fixture(scope="module")
def engine(backend) -> Engine:
    return backend.engine


NEW = 8  # tokens of an answer


def test_generation(pair, pixels, torch_pixels, engine):
    """As transformers generates, prompt by prompt; a second time beginnings are reused."""
    requests = [
        Request(n, row, NEW, images=[pixels[k] for k in used], logprobs=True)
        for n, (row, used) in enumerate(zip(prompts(), USED, strict=True))
    ]
    found = {result.id: result for result in engine.generate(requests)}
    for number, (row, used) in enumerate(zip(prompts(), USED, strict=True)):
        given = torch_inputs(torch_pixels, row, used)
        pair.theirs.model.rope_deltas = None
        with torch.no_grad():
            want = pair.theirs.generate(
                **given, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=ANSWERED
            )
        tokens = want[0, given["input_ids"].shape[1] :].tolist()
        assert list(found[number].candidates[0].tokens) == tokens
        assert found[number].prompt_tokens == given["input_ids"].shape[1]
    again = {result.id: result for result in engine.generate(requests)}
    reused = 0 if pair.ours.config.llama.recurrent else 400  # a state is of no prefix
    assert min(again[0].reused_tokens, 401) == reused + (reused > 0)
    for number, result in again.items():
        assert result.candidates[0].tokens == found[number].candidates[0].tokens
        np.testing.assert_allclose(
            result.candidates[0].logprobs, found[number].candidates[0].logprobs, **WHOLE
        )


@pytest.mark.parametrize("pair", ["qwen3_vl"], indirect=True, scope="module")  # it has both
def test_scanned_layers(pair, pixels, engine):
    """As a TPU generates: one layer compiled, with shifts and deepstack in the scan."""
    sizes = dataclasses.replace(engine.config, slots=1, scan_layers=True)
    scanned = Engine(_copy(pair.ours), end_ids=[ANSWERED], config=sizes)
    request = Request(0, prompts()[1], NEW, images=[pixels[n] for n in USED[1]], logprobs=True)
    (got,), (want,) = scanned.generate([request]), engine.generate([request])
    assert got.candidates[0].tokens == want.candidates[0].tokens
    np.testing.assert_allclose(got.candidates[0].logprobs, want.candidates[0].logprobs, **WHOLE)


def test_choices(pair, pixels, torch_pixels, engine):
    """Continuations side by side go on where the picture's positions end."""
    choices, (row, used) = [[5, 9, 11], [7], [9, 9]], (prompts()[1], USED[1])
    (found,) = engine.score([Scoring(0, row, choices, images=[pixels[n] for n in used])])
    for choice, score in zip(choices, found.scores, strict=True):
        given = torch_inputs(torch_pixels, row + choice, used)
        pair.theirs.model.rope_deltas = None
        with torch.no_grad():
            logits = pair.theirs(**given).logits[0, -len(choice) - 1 : -1]
        want = torch.log_softmax(logits, dim=-1)[range(len(choice)), choice]
        np.testing.assert_allclose(score.logprobs, want, **WHOLE)


def test_a_conversation_with_pictures(pair, torch_pixels, backend):
    """Two pictures within a message and words alone, by transformers' rendering of the template.

    Its processor, which needs torchvision, does no more than repeat each placeholder.
    """
    shown = [Picture(encoded(one), f"{n}.png") for n, one in enumerate(pictures()[:2])]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters(), chat_template=TEMPLATE
    )
    asked = {
        "two": (("Is ", shown[0], " larger than ", shown[1], "?"), (0, 1)),
        "none": (("What is a flag?",), ()),
    }
    decoding = Decoding(max_new_tokens=NEW)
    chats = [Chat(key, (Message("user", parts),), decoding) for key, (parts, _) in asked.items()]
    for chat in chats:
        backend.check(chat)
    found = {result.id: result for result in backend.answer(chats)}
    for key, (parts, used) in asked.items():
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in parts
        ]
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
        )
        assert ids.count(IMAGE) == len(used)
        given = torch_inputs(torch_pixels, ids, used)
        pair.theirs.model.rope_deltas = None
        with torch.no_grad():
            want = pair.theirs.generate(
                **given, max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=ANSWERED
            )
        count = given["input_ids"].shape[1]
        assert found[key].prompt_tokens == count
        assert list(found[key].candidates[0].tokens) == want[0, count:].tolist()


def test_texts_with_pictures(pair, backend):
    """`<image>` marks a place, or pictures come first; what does not fit is refused by name."""
    red = Picture(encoded(pictures()[1]), "red.png")
    decoding = Decoding(max_new_tokens=4, logprobs=True)
    queries = [
        Completion("first", "Say", decoding, (red,)),
        Completion("spelled", "<image>Say", decoding, (red,)),
        Completion("behind", "Say<image>", decoding, (red,)),
    ]
    found = {result.id: result.candidates for result in backend.answer(queries)}
    assert found["first"] == found["spelled"] != found["behind"]
    assert backend.prompt_tokens(queries[0]) == 3 + 2 + 28
    asks = pair.ours.config.vision.family == "paddleocr_vl"
    assert backend.page_prompt == ("OCR:" if asks else "")
    wide = Image.new("RGB", (402, 2))
    for query, error, match in [
        (
            Completion("a", "<image>", decoding, (red, red)),
            UserError,
            "1 <image> placeholders for 2",
        ),
        (Completion("a", "<|video_pad|>", decoding), UserError, "'a': its text has <.video_pad.>"),
        (
            Completion("a", "", decoding, (Picture(encoded(wide), "wide.png"),)),
            Unanswerable,
            "wide.png: 402 x 2 pixels, a side more than 200",
        ),
        (Completion("a", "a" * 610, decoding, (red,)), TooLong, "640 tokens plus 4 new"),
    ]:
        refuses(match, backend.check, query, error=error)


def test_what_a_plan_compiles(pair):
    """The tower's programs as shapes: those that the engine runs."""
    config, mesh = pair.ours.config, make_mesh({"data": 1}, devices=jax.devices()[:1])
    programs = tower_programs(config, SIZES, mesh)
    if config.vision.deepstack:  # more shifts than the other family's
        programs |= engine_programs(config.llama, SIZES, mesh)
        assert sorted(programs) == ["decode", "gather", "prefill", "tower"]
    with jax.set_mesh(mesh):
        for program in programs.values():
            program.function.trace(*program.arguments)
    of_token = 4 * config.vision.features
    units = bucket_of(Grid(36, 36), config.vision)
    assert feature_bytes(config, SIZES, mesh, pictures=2) == (3 * 2 + 1) * units * of_token


def test_checkpoints_go_both_ways(pair, tmp_path):
    published = publish_qwen_vl(pair.ours.config, nnx.state(pair.ours))
    export_is_read_by_both(pair, "qwen_vl", published, tmp_path / "out")


# What is changed in a config.json (`__` leads into an object), and what the refusal names.
REFUSED = {
    "qwen2_vl": [
        ({"vision_config__mlp_ratio": 1.5}, "mlp_ratio is 1.5"),
        ({"vision_config__intermediate_size": 9}, "the key 'intermediate_size'"),
    ],
    "qwen2_5_vl": [
        ({"vision_config__hidden_act": "swish2"}, "vision.activation is 'swish2'"),
        ({"vision_config__new_norm": 3}, "vision_config: the key 'new_norm'"),
        ({"vision_config__in_channels": 4}, "in_channels is 4"),
        ({"vision_config__window_size": 7}, "window_size is 7"),
        ({"text_config__use_sliding_window": True}, "use_sliding_window is True"),
        ({"text_config__rope_parameters": {"mrope_section": [1, 2]}}, r"mrope is \(1, 2\)"),
        (
            {"text_config__rope_parameters": {"mrope_interleaved": True}},
            "mrope_interleaved is True",
        ),
        ({"vision_config__out_hidden_size": 40}, "vision.out is 40"),
        ({"audio_config": {"layers": 2}}, "'audio_config'"),
        ({"vision_config": None}, r"config\.json: lacks its vision_config; fetch the file again"),
        (
            {"text_config__rope_parameters": {"mrope_section": 24}},
            "mrope_section is 24, expected three",
        ),
    ],
    "qwen3_vl": [
        ({"vision_config__deepstack_visual_indexes": [2, 0]}, r"deepstack is \(2, 0\)"),
        ({"vision_config__num_position_embeddings": 50}, "num_position_embeddings is 50"),
        ({"vision_config__rope_parameters": {"rope_type": "linear"}}, "rope_type is 'linear'"),
        ({"model_type": "qwen3_omni"}, "model_type is 'qwen3_omni'"),
        ({"text_config": None}, "lacks its text_config"),
    ],
    "qwen3_vl_moe": [
        ({"text_config__mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ({"text_config__num_experts_per_tok": 9}, "active_experts is 9"),
    ],
    "qwen3_5": [
        ({"vision_config__deepstack_visual_indexes": [0]}, r"deepstack_visual_indexes is \[0\]"),
        ({"text_config__layer_types": ["mamba"] * 4}, "layer_types is .* for each of 4 layers"),
        ({"text_config__output_gate_type": "swish"}, "output_gate_type is 'swish'"),
    ],
    "glm4v": [
        ({"text_config": None}, "lacks its text_config"),
        ({"vision_config__window_size": 8}, "the key 'window_size'"),
        ({"text_config__rope_parameters": {"mrope_section": [1, 2]}}, r"mrope is \(1, 2\)"),
    ],
    "glm4v_moe": [({"text_config__n_group": 2}, "n_group is 2")],
    "paddleocr_vl": [
        ({"text_config__use_3d_rope": False}, "use_3d_rope is False"),
        ({"vision_config__depth": 3}, "the key 'depth'"),
    ],
}


def test_unknown_values_are_refused_by_name(pair, tmp_path):
    for number, (changes, match) in enumerate(REFUSED[model_type_of(pair.ours.config)]):
        with pytest.raises(UserError, match=match):
            open_qwen_vl(rewritten(pair.folder, tmp_path / str(number), **changes))
    for number, (values, match) in enumerate(
        [
            ({"patch_size": 14}, "patch_size is 14, expected 4"),
            ({"resample": 2}, "resample is 2"),
            ({"size": {"height": 9, "width": 9}}, "size is"),
            ({"image_mean": 0.5}, "image_mean is 0.5"),
            ({"image_std": [0.5, 0, 0.5]}, "image_std has a 0, which divides; fetch"),
            ({"min_pixels": "few"}, "min_pixels or shortest_edge is 'few', expected a whole num"),
            ({"size": {"min_pixels": -1}}, "min_pixels or shortest_edge is -1, expected a whole"),
            ({"size": {"longest_edge": 1.5}}, "or longest_edge is 1.5, expected a whole number"),
            ([], r"preprocessor_config\.json: is no JSON object of an image processor; fetch"),
            ({"rescale_factor": 1.0}, "rescale_factor is 1.0, expected 1/255; use a checkpoint"),
            ({"rescale_factor": "1/255"}, "rescale_factor is '1/255', expected 1/255"),
        ]
    ):
        folder = rewritten(pair.folder, tmp_path / f"processor {number}")
        (folder / "preprocessor_config.json").write_text(json.dumps(values))
        refuses(match, open_qwen_vl, folder)


@pytest.mark.parametrize("pair", ["qwen2_5_vl"], indirect=True)
def test_the_config_of_the_hub(pair, tmp_path):
    """Qwen2.5-VL's has the language model's keys beside the others."""
    published = json.loads((pair.folder / "config.json").read_text())
    text = published.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"]}
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    text["sliding_window"] = 32768
    folder = rewritten(pair.folder, tmp_path / "flat")
    (folder / "config.json").write_text(json.dumps(text | published))
    for file in ("model.safetensors", "preprocessor_config.json", "processor_config.json"):
        if (pair.folder / file).exists():
            (folder / file).write_bytes((pair.folder / file).read_bytes())
    assert replace_fields(open_qwen_vl(folder).config, unroll=1) == pair.ours.config


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sound": 1}, "key 'sound'"),
        ({"text_config": {"norm_topk_prob": False}}, "norm_topk_prob is False"),
        ({"text_config": {"model_type": "qwen3_moe"}}, "model_type is 'qwen3_moe'"),
        ({"vision_config": {"apply_vit_abs_pos_embed": False}}, "apply_vit_abs_pos_embed is Fal"),
    ],
)
def test_a_bad_qwen3_omni_is_refused_by_name(changes, match):
    published = {"text_config": {}, "vision_config": {}} | changes
    refuses(match, thinker, {"thinker_config": published}, "config.json")
