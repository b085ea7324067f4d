"""Configs, corpora and bases that a task refuses before anything is trained."""

import functools
import operator
from dataclasses import replace

import pytest
from cli_runs import ROOT
from flax import nnx
from tiny_llm import llama_config, text_tokenizer, write_folder
from tiny_t5 import t5_config

from mmqa_jax.core.config import load_config
from mmqa_jax.core.errors import UserError
from mmqa_jax.data.answers import AnswerVocabulary
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.published_tokenizers import QuestionWords
from mmqa_jax.data.schema import Question
from mmqa_jax.models.t5.config import MultimodalT5Config
from mmqa_jax.models.t5.network import T5, MultimodalT5
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.prompting.examples.training import encode_text
from mmqa_jax.tasks.registry import read_task
from mmqa_jax.tasks.solved_questions import OptionLikelihood
from mmqa_jax.tasks.trained_readers import open_published_reader
from mmqa_jax.tasks.vqa import VQAObjective, pretrained_answers, vqa_loader
from mmqa_jax.weights.folder import save_trained
from tests.drawn_weights import drawn
from tests.refusals import refuses

TASKS = {
    "contrastive": "atlas/contrastive.py:runlocal",
    "clip": "webqa/contrastive.py",
    "siglip": "webqa/contrastive.py:siglip",
    "vlp": "atlas/rerank.py:runlocal",
    "answer": "atlas/answer.py:runlocal",
    "on_clip": "webqa/vlp_select.py:clip_patches",
    "examples": "scienceqa/rmr_retriever.py:runlocal",
    "t5": "scienceqa/t5_finetune.py:runlocal",
    "llm": "scienceqa/rmr_finetune.py:runlocal",
    "fusion": "webqa/fusion_in_decoder.py:runlocal",
    "vqa": "okvqa/mcan.py:runlocal",
    "grid": "okvqa/mcan.py:head",
    "regions": "okvqa/mcan.py:openvqa",
    "pictured_t5": "scienceqa/multimodal_cot.py:runlocal",
}


def config_of(task: str, **changes):
    """The task's config; keyword `a__b` sets key `a.b`, which need not be there."""
    config = load_config(f"{ROOT}/configs/{TASKS[task]}")
    with config.unlocked():
        for key, value in changes.items():
            *sections, name = key.split("__")
            functools.reduce(operator.getitem, sections, config)[name] = value
    return config


@pytest.mark.parametrize("task", TASKS)
def test_without_changes_none_is_refused(task):
    read_task(config_of(task)).check_sizes(files=False)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("t5", {"train__optimizer__trainable": "lora"}, r"trainable=lora: .*set it to None"),
        ("t5", {"batches__targets": 0}, r"key batches\.targets=0: give 1 or more"),
        *(
            ("t5", {"batches__lengths": lengths}, r"batches\.lengths=.*: ascending .*; change")
            for lengths in ((), (0, 8), (8, 4), (8, 8))
        ),
        *(
            (
                "fusion",
                {
                    f"{section}__knowledge__rankings": "r.jsonl",
                    f"{section}__knowledge__{other}": "x",
                },
                rf"key {section}\.knowledge\.rankings=r\.jsonl: .*KAT's entities .*; leave one",
            )
            for section, other in (("passages", "answers"), ("validate", "entities"))
        ),
        ("pictured_t5", {"pictures__features": 7}, r"pictures\.features=7: .* 6 values .*; ch"),
        ("pictured_t5", {"train__evaluate_every": 2}, r"task=multimodal_cot: .*evaluate_every"),
        *(
            ("vlp", changes, rf"key {key}: the longest .*, the model 512; use shorter buckets")
            for key, changes in (
                (r"inference\.packing\.buckets", {"inference__packing": {"buckets": ((1, 600),)}}),
                (r"packing\.buckets", {"packing__buckets": ((1, 600),)}),
            )
        ),
        *(
            ("siglip", {"inference__buckets": buckets}, r"inference\.buckets: 32 .* 64; set it")
            for buckets in ((32,), (32, 64))
        ),
        (
            "vqa",
            {"model__answer_embeddings": True, "init": "minilm"},
            r"key model\.fusion\.flat_out=32: .* MiniLM's vectors of 384 values; set it to that, or",
        ),
        ("vqa", {"batches__lengths": (16, 600)}, r"lengths=\(16, 600\): .* 3 to 512 .*; change"),
        *(
            ("contrastive", {key: lengths}, rf"key {place}=\(.*\): .* from 3 .*; change them")
            for key, place, wrong in (
                ("batches__source_lengths", r"batches\.source_lengths", ((), (2, 8))),
                ("inference__buckets", r"inference\.buckets", ((), (2, 8), (8, 4), (8, 8))),
            )
            for lengths in wrong
        ),
        *(
            (task, {key: value}, rf"key {key.replace('__', '.')}={value}: at least \d was expected")
            for task, key, value in (
                ("contrastive", "batches__query_length", 2),
                ("contrastive", "batches__num_negatives", -1),
                ("examples", "batches__length", 2),
                ("examples", "batches__candidates", 0),
                ("llm", "examples__shots", -1),
                ("vlp", "batches__choices_per_question", 0),
                ("vlp", "batches__slack", -1),
                ("answer", "batches__max_sources", -1),
                ("answer", "masking__max_pred", 0),
                ("answer", "masking__keyword_weight", -1.0),
                ("on_clip", "features__slots", 0),
            )
        ),
        *(
            ("llm", {"validate__shots": shots}, r"key validate\.shots=\(.*\): .* from 0 .*; change")
            for shots in ((), (0, -1))
        ),
        *(
            (task, {key: share}, rf"{key.replace('__', '.')}={share}: a share .*; ch")
            for task, key in (
                ("vlp", "batches__alike_share"),
                ("vlp", "batches__second_hop_prob"),
                ("answer", "batches__distractor_prob"),
                ("answer", "batches__no_source_prob"),
                ("answer", "masking__mask_prob"),
            )
            for share in (-0.5, 1.5)
        ),
        *(
            ("vlp", {f"packing__{key}": -1}, rf"packing\.{key}=-1: give 0 or more")
            for key in ("max_question_tokens", "max_caption_tokens", "max_pair_tokens")
        ),
        (
            "vlp",
            {"packing__buckets": ((-1, 64), (0, 64))},
            r"packing\.buckets: -1 pictures; give 0",
        ),
        ("llm", {"init": ""}, r"key init=: no such file or folder; name a LLaMA as .*, or scratch"),
    ],
)
def test_the_config_alone_is_wrong(task, changes, message):
    with pytest.raises(UserError, match=message):
        read_task(config_of(task, **changes)).check_sizes(files=False)


# On a corpus

CHOICE = Question(
    "q1", "train", "Which?", answers=("red",), choices=("red", "blue"), answer_index=0,
    rationale="It is.",
)  # fmt: skip
BARE = Question("q2", "train", "Which?")
LETTERS = text_tokenizer()
TOO_SMALL = {"model__changes__vocab_size": 40, "tokenizer": "letters"}


@pytest.mark.parametrize(
    ("task", "changes", "questions", "message"),
    [
        ("fusion", {}, [BARE], r"key data\.split=train: tiny .* with answers; choose"),
        *(
            ("pictured_t5", {}, [question], r"data\.split=train: tiny .* a known answer; choose")
            for question in (replace(CHOICE, answer_index=None), replace(CHOICE, choices=()))
        ),
        ("llm", {}, [BARE], r"key data\.split=train: tiny .* with choices .*; choose another"),
        ("t5", {}, [BARE], r"key data\.split=train: tiny .*answer.*; choose another"),
        *(
            (
                task,
                TOO_SMALL,
                [CHOICE],
                r"key tokenizer=letters: has 60 tokens, the model 40; leave",
            )
            for task in ("llm", "t5", "fusion", "pictured_t5")
        ),
    ],
)
def test_the_corpus_does_not_fit(task, changes, questions, message):
    described = read_task(config_of(task, data__dir="tiny", **changes))
    described.check_sizes(files=False)
    refuses(message, described.recipe, Corpus([], questions), LETTERS)


@pytest.mark.parametrize(
    ("task", "tokenizer", "message"),
    [
        ("llm", "", r"config key tokenizer is empty, .*; write corpus:N or name a tokenizer"),
        ("t5", "corpus:many", r"config key tokenizer=corpus:many: write corpus:N with a number"),
        ("t5", "corpus:-1", r"config key tokenizer=corpus:-1: write corpus:N with a number"),
        ("llm", "corpus:256", r"=corpus:256: write corpus:N with a number of tokens, 257 or more"),
        ("vqa", "corpus:9999999999", r"=corpus:9+: write corpus:N with a number of tokens"),
        ("llm", f"corpus:{10**20}", r"=corpus:10+: write corpus:N with a number of tokens, 257"),
    ],
)
def test_a_tokenizer_that_is_none(task, tokenizer, message, tmp_path):
    described = read_task(config_of(task, tokenizer=tokenizer))
    refuses(message, described.make_tokenizer, Corpus([], [CHOICE]), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A published LLaMA with fewer tokens than LETTERS."""
    return write_folder(tmp_path_factory.mktemp("base") / "llm", llama_config(40))


def test_what_the_weights_decide(base):
    described = read_task(config_of("llm", init=str(base), model__changes__layers=3))
    message = (
        r"key model\.changes\.(?!dtype)\w+: the weights of init=.* decide it; change only dtype"
    )
    refuses(message, described.check_sizes, files=False)


def test_the_width_of_pictures_is_that_of_a_base_which_reads_them(tmp_path):
    text = vars(t5_config(40))
    model = drawn(lambda: MultimodalT5(MultimodalT5Config(**text, features=6), rngs=nnx.Rngs()))
    save_trained(tmp_path, model, nnx.state(model), {})

    def check(width):
        changes = {"model__changes": {"features": width}, "pictures__features": width}
        read_task(config_of("pictured_t5", init=str(tmp_path), **changes)).check_sizes()

    check(6)
    message = (
        r"key model\.changes\.features=7: init=.* reads vectors of 6 values; set it to that, or"
    )
    refuses(message, check, 7)


def test_another_models_tokenizer(base):
    changes = {"init": str(base), "tokenizer": "letters", "model__changes": {}}
    described = read_task(config_of("llm", **changes))
    described.check_sizes()
    message = r"key tokenizer=letters: has 60 tokens, the model 40; name the model's own"
    refuses(message, described.recipe, Corpus([], [CHOICE]), LETTERS)


def test_a_question_that_fits_no_row_of_validation():
    config = config_of("llm", batches__length=16, batches__targets=8, validate__shots=(0,))
    described = read_task(config)
    corpus = Corpus([], [replace(CHOICE, split="val")])
    message = r"section validate: question q1 does not fit a row of batches\.length=16 .*; raise it"
    with pytest.raises(UserError, match=message):
        OptionLikelihood(described, corpus, encode_text(LETTERS), lambda examples: None)


# VQA models and what they start from

ANSWERS = AnswerVocabulary(["cat", "dog"])


@pytest.fixture(scope="module")
def captioned(tmp_path_factory):
    """A run of the task vqa whose model reads captions and knows two answers."""
    folder = tmp_path_factory.mktemp("vqa")
    config = read_task(config_of("vqa")).model.config(40, len(ANSWERS))
    ANSWERS.save(folder / "answers.json")
    model = drawn(VQAObjective(config).outline)
    save_trained(folder, model, nnx.state(model), {})
    return str(folder)


@pytest.mark.parametrize(
    ("task", "answers", "message"),
    [
        ("grid", ["cat", "dog"], r": holds a model of kind 'caption_mcan', mcan .*; name another"),
        ("vqa", ["dog", "cat"], r": its head has 2 answers, and the first 2 .*; set answers\.base"),
        ("vqa", ["cat", "dog", "emu"], r": its head has 2 .*, the run has 3; .* set answers\.file"),
    ],
)
def test_a_vqa_run_with_another_head(task, answers, message, captioned):
    described = read_task(config_of(task, init=captioned))
    with pytest.raises(UserError, match=rf"config key init={captioned}{message}"):
        pretrained_answers(described, AnswerVocabulary(answers))


def test_a_vqa_run_of_other_sizes(captioned):
    described = read_task(config_of("vqa", init=captioned, model__fusion__flat_out=40))
    model = nnx.eval_shape(VQAObjective(described.model.config(40, 2)).outline)
    message = rf"config key init={captioned}: .*/merge/bias \[32\] \(config: \[40\]\).*; set the"
    refuses(message, vqa_loader(described, LETTERS, ANSWERS), model)


def test_words_of_another_width(tmp_path):
    glove = tmp_path / "glove.txt"
    glove.write_text("cat 0.5 -1\n")
    words = QuestionWords(["PAD", "UNK", "CLS", "cat"])
    described = read_task(config_of("regions", init=str(glove)))
    model = nnx.eval_shape(VQAObjective(described.model.config(words.vocab_size, 2)).outline)
    message = (
        rf"config key init={glove}: vectors of 2 values, the model has 300; set model\.word_fea"
    )
    refuses(message, vqa_loader(described, words, ANSWERS), model)


# Weights of another kind


@pytest.fixture(scope="module")
def small_t5(tmp_path_factory):
    """A converted T5 with fewer tokens than LETTERS."""
    folder = tmp_path_factory.mktemp("t5")
    model = drawn(lambda: T5(t5_config(40), rngs=nnx.Rngs()))
    save_trained(folder, model, nnx.state(model), {})
    return folder


@pytest.mark.parametrize(
    ("task", "key", "kind"),
    [("clip", "init", "clip"), ("siglip", "init", "siglip"), ("on_clip", "features.root", "clip")],
)
def test_weights_of_another_model(task, key, kind, captioned):
    described = read_task(config_of(task, **{key.replace(".", "__"): captioned}))
    message = (
        rf"config key {key}={captioned}: holds a model of kind 'caption_mcan', {kind} was expected; "
        rf"convert one with `mmqa convert --model={kind}`"
    )
    refuses(message, described.check_sizes)


def test_a_language_model_that_is_none(captioned):
    message = rf"--model={captioned}: contains a caption_mcan; give a LLaMA, LLaVA, .* or T5"
    refuses(message, open_backend, captioned)


def test_a_checkpoint_whose_config_is_none(tmp_path):
    (tmp_path / "config.json").write_text("[]")
    refuses(r"config\.json: is not an object; fetch the file again", open_backend, tmp_path)


def test_a_t5_with_fewer_tokens_than_its_tokenizer(small_t5, base):
    message = rf"--model={small_t5}: its tokenizer has 60 tokens, the model 40; name .* --tokenizer"
    refuses(message, open_backend, small_t5, tokenizer=base)


def test_a_reader_whose_config_is_of_another_task(base):
    config = load_config(f"{ROOT}/configs/atlas/answer.py:runlocal")
    message = r"key parts\.fusion_reader\.config: describes task answer; name a config of fusion_in"
    refuses(message, open_published_reader, base, "", config, Corpus([]))


def test_a_reader_that_is_no_t5(captioned, base):
    message = rf"{captioned}: holds no T5, .*; name a T5 and .* \(parts\.fusion_reader\.tokenizer\)"
    refuses(message, open_published_reader, captioned, str(base), config_of("fusion"), Corpus([]))


def test_a_reader_with_fewer_tokens_than_its_tokenizer(small_t5, base):
    message = (
        rf"{small_t5}: holds .* one with fewer tokens than its tokenizer; name a T5 and its own"
    )
    refuses(message, open_published_reader, small_t5, str(base), config_of("fusion"), Corpus([]))
