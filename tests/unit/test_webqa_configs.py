"""configs/webqa: the rows of the tables, and their sequences against Preprocess4webqa's.

The baseline's preprocessing is restated in baseline_packing.py.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from baseline_packing import PAD, VLP_WEBQA, training

from mmqa_jax.core.config import flatten, load_config, to_plain_dict
from mmqa_jax.core.typed import read_typed
from mmqa_jax.data.atlas.reader import AtlasPackingConfig
from mmqa_jax.data.batches.packing import Bucket, Example, MaskingConfig, Packer, SourceTokens
from mmqa_jax.data.tokenizers import minilm_tokenizer
from mmqa_jax.tasks.registry import check_config, read_task
from mmqa_jax.training.optimizer import OptimizerOptions, make_schedule
from tests.refusals import refuses

pytestmark = pytest.mark.slow

CONFIGS = Path(__file__).parents[2] / "configs" / "webqa"
LONGEST = {0: 512, 1: 312, 2: 312}  # text columns without, with one and two pictures


def read(name: str, mode: str = ""):
    return load_config(f"{CONFIGS / name}.py" + (f":{mode}" if mode else ""))


# The rows


def differences(name: str, mode: str) -> dict:
    """Keys in which a row differs from VLP's, with its values (None: the key is absent)."""
    plain, other = (flatten(to_plain_dict(read(name, m))) for m in ("", mode))
    return {
        key: other.get(key)
        for key in plain.keys() | other.keys()
        if plain.get(key, "absent") != other.get(key, "absent")
    }


def test_vinvl_differs_from_vlp_in_its_features_and_epoch():
    changed = differences("vlp_qa", "vinvl")
    assert changed.pop("model.frontend") == "vinvl"
    assert changed.pop("train.steps") == -(-36_766 * 13 // 128)  # epoch 13, not 11
    assert {key.split(".")[0] for key in changed} == {"features"}
    changed = differences("vlp_select", "vinvl")
    assert changed.pop("model.frontend") == "vinvl"
    assert {key.split(".")[0] for key in changed} == {"features"}


def test_vlp_i_differs_from_vlp_in_its_questions_alone():
    assert differences("vlp_qa", "vlp_i") == {
        "data.modality": "image",
        "train.steps": -(-18_954 * 11 // 128),
    }


@pytest.mark.parametrize(
    ("row", "changes"),
    [
        ("vlp_t", {"data.modality": "text", "train.steps": -(-17_812 * 11 // 128)}),
        (
            "q_only",
            {
                "batches.no_source_prob": 1.0,
                "packing.picture_content": False,
                "validate.sources": "none",
            },
        ),
    ],
)
def test_rows_without_pictures_differ_in_that_alone(row, changes):
    """No picture is shown, so that none of its features and shapes are there."""
    changed = differences("vlp_qa", row)
    assert changed.pop("model.frontend") == "patches"
    buckets = [changed.pop(f"{section}.buckets") for section in ("packing", "inference.packing")]
    assert all(pictures == 0 for shapes in buckets for pictures, _ in shapes)
    changed = {k: v for k, v in changed.items() if not k.startswith(("features", "model.patch"))}
    assert changed == changes


@pytest.mark.parametrize("name", ["vlp_select", "vlp_qa"])
def test_clip_patches_differ_in_their_pictures_alone(name):
    changed = differences(name, "clip_patches")
    sections = {"features", "model", "packing"} | ({"inference"} if name == "vlp_qa" else set())
    assert {key.split(".")[0] for key in changed} == sections
    assert changed["model.frontend"] == "clip"
    assert {key for key in changed if key.startswith(("packing", "inference"))} <= {
        "packing.picture_positions",
        "packing.buckets",
        "inference.packing.buckets",
    }


def test_cached_differs_in_where_question_and_source_meet():
    assert differences("vlp_select", "cached") == {"data.negatives": [], "model.joint_layers": 1}


def test_a_row_by_its_name_is_the_default():
    assert differences("vlp_qa", "vlp") == differences("vlp_select", "vlp") == {}
    refuses(r"no such mode; did you mean 'vlp_i'", read, "vlp_qa", "vlp_im")


@pytest.mark.parametrize("mode", ["pod", "vinvl_pod"])
@pytest.mark.parametrize("name", ["vlp_select", "vlp_qa"])
def test_pods_take_the_papers_update_in_one_part(name, mode):
    pod, plain = read(name, mode), read(name, mode.removesuffix("pod").rstrip("_"))
    assert pod.train.accumulate == 1 < plain.train.accumulate
    assert pod.batches.batch_size == plain.batches.batch_size
    assert pod.train.steps == plain.train.steps
    assert pod.train.optimizer.learning_rate == plain.train.optimizer.learning_rate
    assert pod.model.changes.dtype == "bfloat16"
    assert pod.features == plain.features
    check_config(pod)


def test_the_larger_batch_sees_as_many_questions():
    larger, paper = read("vlp_qa", "pod1024"), read("vlp_qa", "pod")
    seen = [config.train.steps * config.batches.batch_size for config in (larger, paper)]
    assert 0 <= seen[0] - seen[1] < larger.batches.batch_size
    rate = larger.train.optimizer.learning_rate / paper.train.optimizer.learning_rate
    assert rate == pytest.approx((larger.batches.batch_size / paper.batches.batch_size) ** 0.5)
    check_config(larger)


@pytest.mark.parametrize("name", ["vlp_select", "vlp_qa"])
def test_training_is_plain_adam_at_one_rate_on_128_questions(name):
    config = read(name)
    options = read_typed(OptimizerOptions, config.train.optimizer, "train.optimizer")
    assert (options.name, options.clip_norm, options.weight_decay) == ("adam", None, None)
    schedule = make_schedule(options, config.train.steps)
    rate = {"vlp_select": 3e-5, "vlp_qa": 1e-4}[name]
    np.testing.assert_allclose([schedule(s) for s in (0, 1, 9, config.train.steps)], rate)
    per_question = config.batches.get("choices_per_question", 1)
    assert config.batches.batch_size == 128 * per_question
    # --train_batch_size 128 --gradient_accumulation_steps 64
    assert config.get("questions_per_mean") == {"vlp_select": None, "vlp_qa": 128 // 64}[name]
    model = config.model.changes
    assert model.eps == 1e-5
    assert "dropout" not in model  # BERT's 0.1
    check_config(config)  # opens no file


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name, rows in (
            ("vlp_select", ("vinvl",)),
            ("vlp_qa", ("vinvl", "q_only", "vlp_i", "vlp_t")),
        )
        for row in ("", *rows)
        for mode in (row, f"{row}_runlocal".lstrip("_"))
    ],
)
def test_every_row_can_be_trained_as_far_as_its_config_tells(name, mode):
    config = read(name, mode)
    check_config(config)
    if mode.endswith("runlocal"):
        assert (config.init, config.train.steps, config.model.changes.hidden) == ("scratch", 4, 64)


def test_questions_that_share_a_mean_divide_the_batch():
    config = read("vlp_qa")
    config.questions_per_mean, config.train.accumulate = 8, 32
    refuses(r"questions_per_mean=8: .*in train\.accumulate=32 parts", check_config, config)
    config.train.accumulate = 16
    check_config(config)


def test_clip_patches_ask_for_the_converted_clip():
    config = read("vlp_qa", "clip_patches")
    refuses(r"weights/clip: no such file or folder", check_config, config)


# Sequences


@pytest.fixture(scope="module")
def tokenizer():
    return minilm_tokenizer()


def words(rng, count):
    return rng.integers(2000, 3000, count).tolist()


def regions(count, value):
    return np.full((count, 2048), value, "f4"), np.full((count, 1607), -value, "f4")


def full_mask(packed):
    context, answer = packed["context_mask"], packed["answer_mask"]
    causal = np.tril(np.ones((len(context), len(context)), bool))
    return context[None, :] | (answer[:, None] & answer[None, :] & causal)


def expect_equal(packed, ids, wanted, pictures, answered):
    """Column by column; a sequence of one picture lacks the baseline's 100 closed slots."""
    wanted_ids, segments, positions, mask = wanted
    columns = np.arange(512)
    if pictures == 1:
        assert not mask[:, 101:201].any()
        columns = np.concatenate([columns[:101], columns[201:]])
    real = wanted_ids[columns] != PAD
    if not answered:  # there the baseline has the answer, which nobody sees
        slot = (columns >= 1) & (columns <= 200) & (pictures is not None)
        real &= mask[0, columns].astype(bool) | slot
    np.testing.assert_array_equal(ids[real], wanted_ids[columns][real])
    np.testing.assert_array_equal(packed["token_type_ids"][real], segments[columns][real])
    np.testing.assert_array_equal(packed["position_ids"][real], positions[columns][real])
    rows = np.flatnonzero(real)
    np.testing.assert_array_equal(
        full_mask(packed)[rows], mask[np.ix_(columns[rows], columns)].astype(bool)
    )


def longest_bucket(config, pictures):
    return config.buckets.index(Bucket(pictures, LONGEST[pictures]))


@pytest.mark.parametrize("pictures", [None, 1])
def test_selection_reads_what_the_baseline_lets_be_seen(tokenizer, pictures):
    rng = np.random.default_rng(3)
    source, question, answer = words(rng, 30), words(rng, 17), words(rng, 9)
    given = None if pictures is None else regions(100, 0.5)
    packing = read_task(read("vlp_select")).packing_config()
    packed = Packer(tokenizer, packing).pack_for_selection(
        Example((SourceTokens(source, given),), question, answer),
        longest_bucket(packing, pictures or 0),
        rng,
    )
    wanted = training([source], pictures, question, answer, select=True)
    expect_equal(packed, packed["input_ids"], wanted, pictures, answered=False)
    assert packed["context_mask"].sum() == wanted[3][0].sum()


@pytest.mark.parametrize(("pictures", "found"), [(None, 0), (1, 100), (2, 100), (2, 37)])
def test_qa_sequences_are_the_baselines(tokenizer, pictures, found):
    """Facts end to end; two pictures' regions and captions; a detector may find fewer than 100."""
    rng = np.random.default_rng(4)
    sources, question, answer = [words(rng, 21), words(rng, 13)], words(rng, 17), words(rng, 9)
    sources = sources[: pictures or 2]
    given = [None if pictures is None else regions(found, 0.5 + i) for i in range(len(sources))]
    packing = read_task(read("vlp_qa")).packing_config()
    bucket = longest_bucket(packing, pictures or 0)
    example = Example(tuple(map(SourceTokens, sources, given)), question, answer)
    masking = MaskingConfig(**read("vlp_qa").masking)
    packed = masking.pack(Packer(tokenizer, packing), example, bucket, rng)
    ids, weights = packed["input_ids"].copy(), packed["masked_weights"] > 0
    masked = packed["masked_positions"][weights]
    ids[masked] = packed["masked_ids"][weights]
    wanted = training(sources, pictures, question, answer)
    expect_equal(packed, ids, wanted, pictures, answered=True)
    # n_pred: half of the answer and its [SEP], with pictures three at least; max_pred 50 columns.
    assert weights.sum() == 5
    assert packed["masked_ids"].shape == (50,)
    assert not packed["masked_positions"][~weights].any()
    assert packed["answer_mask"][masked].all()
    if pictures:
        slots = packed["region_features"].reshape(pictures, 100, 2048)[:, :, 0]
        np.testing.assert_array_equal(
            slots[:, :found], [[0.5 + i] * found for i in range(pictures)]
        )
        assert not slots[:, found:].any()


@pytest.mark.parametrize(
    ("answer", "count"), [(1, (1, 2)), (2, (2, 3)), (6, (4, 4)), (200, (50, 50))]
)
def test_how_many_words_are_predicted(tokenizer, answer, count):
    """min(50, max(1 or min(3, L), round(L / 2))) of the L answer tokens with their [SEP]."""
    rng = np.random.default_rng(5)
    packing = read_task(read("vlp_qa")).packing_config()
    for pictures, wanted in zip((0, 1), count, strict=True):
        source = SourceTokens(words(rng, 5), regions(100, 1.0) if pictures else None)
        example = Example((source,), words(rng, 8), words(rng, answer))
        packed = MaskingConfig(0.5, 50).pack(
            Packer(tokenizer, packing), example, longest_bucket(packing, pictures), rng
        )
        assert (packed["masked_weights"] > 0).sum() == wanted


def test_long_texts_lose_their_heads_or_tails(tokenizer):
    """Sources to 400, captions to 200, question and answer together to 109, ends by fair coins."""
    packing = read_task(read("vlp_qa")).packing_config()
    packer, masking = Packer(tokenizer, packing), MaskingConfig(0.5, 50)
    heads = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        pictures = seed % 2
        source = np.arange(2000, 2450)
        pair = np.arange(5000, 5129)  # 129 tokens: 20 too many
        given = SourceTokens(source, regions(100, 1.0) if pictures else None)
        example = Example((given,), pair[:60], pair[60:])
        packed = masking.pack(packer, example, longest_bucket(packing, pictures), rng)
        ids = packed["input_ids"].copy()
        weights = packed["masked_weights"] > 0
        ids[packed["masked_positions"][weights]] = packed["masked_ids"][weights]
        kept = ids[(ids >= 2000) & (ids < 2450)]
        limit = 200 if pictures else 400
        np.testing.assert_array_equal(kept, source[kept[0] - 2000 :][:limit])
        both = ids[ids >= 5000]
        np.testing.assert_array_equal(both, pair[both[0] - 5000 :][:109])
        answered = packed["answer_mask"].sum()
        assert answered == both[-1] - 5060 + 1 + 1  # the answer's rest and [SEP]
        assert packed["truncated"] == 450 - limit + 20
        heads.append(both[0] - 5000)
    assert 7 < np.mean(heads) < 13  # 20 coins: mean 10
    assert len(set(heads)) > 5


def test_a_long_answer_beside_a_short_question_stays_whole(tokenizer):
    packing = read_task(read("vlp_qa")).packing_config()
    rng = np.random.default_rng(0)
    example = Example((SourceTokens(words(rng, 3)),), words(rng, 10), words(rng, 99))
    packed = MaskingConfig(0.5, 50).pack(
        Packer(tokenizer, packing), example, longest_bucket(packing, 0), rng
    )
    assert packed["answer_mask"].sum() == 100
    assert packed["truncated"] == 0


@pytest.mark.parametrize("pictures", [0, 1, 2])
def test_decoding_starts_where_the_baselines_does(tokenizer, pictures):
    """472 columns at most; positions 0..n, then 0; sources to 400 or 200, the question to 70."""
    rng = np.random.default_rng(6)
    packing = read_task(read("vlp_qa")).packing_config(inference=True)
    columns = {0: (0, 472), 1: (1, 272), 2: (2, 272)}
    assert max(b.pictures * 100 + b.text for b in packing.buckets) == 472
    bucket = packing.buckets.index(Bucket(*columns[pictures]))
    sources = [SourceTokens(words(rng, 300), regions(100, 1.0)) for _ in range(pictures)]
    question = words(rng, 90)
    example = Example(tuple(sources or [SourceTokens(words(rng, 500))]), question)
    packed = Packer(tokenizer, packing).pack_for_decoding(example, bucket)
    text = 200 if pictures else 400
    start = 201 if pictures else 1
    # [CLS] slots text [SEP] question, nothing else open; one picture opens 100 slots of 200.
    assert packed["context_mask"].sum() == 2 + 100 * pictures + text + 70
    length = int(packed["length"])
    assert packed["position_ids"][length - 1] + 1 == start + text + 1 + 70  # the first new word's
    assert packed["position_ids"][1 + 100 * pictures] == start
    assert packed["input_ids"][length - 70 : length].tolist() == question[:70]
    assert not packed["answer_mask"].any()


def test_the_published_shapes_are_the_configs_longest():
    packing = read_task(read("vlp_qa")).packing_config()
    assert packing.positions == 512
    published = AtlasPackingConfig(**vars(VLP_WEBQA))  # with none of its additions
    for field in dataclasses.fields(AtlasPackingConfig):
        if field.name != "buckets":
            assert getattr(packing, field.name) == getattr(published, field.name), field.name
    assert set(VLP_WEBQA.buckets) <= set(packing.buckets)
