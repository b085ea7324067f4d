"""What a checkpoint's files claim, and how its tokenizer treats texts: refused by name, fast."""

import dataclasses
import json
import time

import gguf
import numpy as np
import pytest
from tiny_checkpoints import CONFIGS, make_source
from tokenizers import Tokenizer

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.published_tokenizers import load_encoder_tokenizer
from mmqa_jax.data.tokenizer_files import tokenizer_of
from mmqa_jax.models.llama.gguf import gguf_config
from mmqa_jax.models.t5.keys import t5_gguf_config
from mmqa_jax.prompting.text_tokenizer import TextTokenizer
from mmqa_jax.weights.formats.gguf import GGUFSource
from mmqa_jax.weights.published import load_published
from tests.refusals import refuses

pytestmark = pytest.mark.slow

SECONDS = 10.0  # generous to a busy machine; below one elsewhere
FEW = r"expected a whole number of at most 10,000; repair the file"
HUGE = r"expected a whole number of at most 2,147,483,647; repair"
STAGES = r"give four numbers from 1 to 200, one a stage"


def changed(value, path, new):
    """JSON with one value replaced."""
    copy = list(value) if isinstance(value, list) else dict(value)
    copy[path[0]] = changed(value[path[0]], path[1:], new) if path[1:] else new
    return copy


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Opens the tiny checkpoint of a family with one value of its config.json replaced."""
    root, made = tmp_path_factory.mktemp("checkpoints"), {}

    def opened(family, path, value):
        if family not in made:
            source = make_source(family, root / family)
            made[family] = source, json.loads((source.path / "config.json").read_text())
        source, config = made[family]
        path = path.split("/")
        path = [int(part) if part.isdigit() else part for part in path]
        (source.path / "config.json").write_text(json.dumps(changed(config, path, value)))
        began = time.monotonic()
        try:
            return load_published(family, source.path)
        finally:
            assert time.monotonic() - began < SECONDS

    return opened


@pytest.mark.parametrize(
    ("family", "path", "value", "message"),
    [
        *(
            (family, path, 10**9, rf"{path.rpartition('/')[2]} is 1000000000, {FEW}")
            for family, path in (
                ("clip", "vision_config/num_hidden_layers"),
                ("clip", "text_config/num_hidden_layers"),
                ("siglip", "vision_config/num_hidden_layers"),
                ("bert", "num_hidden_layers"),
                ("oscar", "num_hidden_layers"),
                ("bart", "encoder_layers"),
                ("bart", "decoder_layers"),
                ("t5", "num_layers"),
                ("t5", "num_decoder_layers"),
                ("multimodal_t5", "num_layers"),
                ("llama", "num_hidden_layers"),
                ("llava", "text_config/num_hidden_layers"),
                ("onevision", "vision_config/num_hidden_layers"),
                ("qwen_vl", "vision_config/depth"),
                ("qwen_vl", "vision_config/spatial_merge_size"),
            )
        ),
        *(
            (family, path, 2**40, rf"{path.rpartition('/')[2]} is 1099511627776, {HUGE}")
            for family, path in (
                ("bert", "hidden_size"),
                ("clip", "text_config/vocab_size"),
                ("t5", "d_ff"),
                ("llama", "head_dim"),
                ("llama", "max_position_embeddings"),
            )
        ),
        ("detector", "mmqa_jax/config/backbone/blocks/1", 9999, STAGES),
        ("detector", "mmqa_jax/config/classes", 2**40, "expected int"),
        # What the tensors do not have, beside what they have.
        ("llama", "num_hidden_layers", 9999, r"layers \[3, 4, .*, 12 and 9,986 more\]"),
        ("llama", "hidden_size", 10**9, r"shapes that differ: .*1000000000"),
        ("llama", "rope_scaling/factor", float("nan"), "factor"),
        ("llama", "rope_scaling/factor", float("inf"), "factor"),
        ("llama", "rms_norm_eps", float("nan"), "rms_norm_eps is nan, expected a number from 0 on"),
        ("llama", "quantization_config", {"bits": 4}, "quantization_config is"),
    ],
)
def test_sizes_that_the_weights_do_not_have(checkpoints, family, path, value, message):
    assert family in CONFIGS
    refuses(message, checkpoints, family, path, value)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"block_count": 10**9}, r"llama\.block_count is 1,000,000,000, expected 1 to 2,"),
        ("llama", {"block_count": 0}, r"llama\.block_count is 0, expected 1 to 2,"),
        (
            "llama",
            {"block_count": 2**40},
            r"'llama\.block_count' is 1099.*, expected one number bel",
        ),
        ("llama", {"embedding_length": 2**40}, r"embedding_length' is 1099.*, expected one number"),
        (
            "llama",
            {"attention.layer_norm_rms_epsilon": float("nan")},
            r"epsilon' is nan, expected a",
        ),
        ("gemma3", {"block_count": 10**9}, r"gemma3\.block_count is 1,000,000,000, expected 1 to"),
        (
            "t5",
            {"block_count": 10**9},
            r"t5\.block_count is 1,000,000,000, expected 1 to 2, the num",
        ),
        ("t5", {"decoder_block_count": 10**9}, r"t5\.decoder_block_count is 1,000,000,000, expect"),
    ],
)
def test_sizes_that_a_gguf_files_tensors_do_not_have(tmp_path, architecture, changes, message):
    sizes = {
        "block_count": 1, "embedding_length": 8, "feed_forward_length": 8, "context_length": 8,
        "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.key_length": 4, "attention.value_length": 4,
    } | ({"attention.relative_buckets_count": 4} if architecture == "t5" else {}) | changes  # fmt: skip
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    for key, value in sizes.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint64
        add(f"{architecture}.{key}", value)
    for name in ("token_embd.weight", "output_norm.weight"):
        writer.add_tensor(name, np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = t5_gguf_config if architecture == "t5" else gguf_config
    with pytest.raises(UserError, match=message):
        read(GGUFSource(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            lambda: dataclasses.replace(CONFIGS["bert"], layers=10**9),
            "model.layers is 1000000000: exp",
        ),
        (
            lambda: dataclasses.replace(CONFIGS["llama"], layers=10_001),
            "model.layers is 10001: expec",
        ),
        (
            lambda: dataclasses.replace(CONFIGS["t5"], encoder_layers=10**9),
            "model.encoder_layers is ",
        ),
        (
            lambda: dataclasses.replace(CONFIGS["bart"], decoder_layers=10**9),
            "model.decoder_layers is",
        ),
        (lambda: dataclasses.replace(CONFIGS["clip"].vision, layers=10**9), "vision.layers is"),
        (lambda: dataclasses.replace(CONFIGS["siglip"].text, layers=10**9), "text.layers is"),
        (
            lambda: dataclasses.replace(CONFIGS["mcan"].fusion, layers=10**9),
            "mcan.fusion.layers is",
        ),
    ],
)
def test_a_config_without_weights_has_no_more_layers_than_a_program(config, message):
    refuses(message, config)


# Tokenizers.

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
EXPLODES = r"^T: cannot split some short texts \((Onig: .*retry-limit|it takes over 3 seconds)"
GROWS = r"^T: cannot split some short texts \(it makes [\d,]+ characters or tokens of \d+\)"
TAKES_MUCH = (
    r"^T: cannot split some short texts \(it (takes over|crashes, as).* or a replacement grows"
)


def written(model=None, **parts):
    model = model or {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model} | parts)


def split(pattern):
    shape = {"type": "Split", "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": shape | {"pattern": {"Regex": pattern}}}


def replace(place, pattern, content):
    return {place: {"type": "Replace", "pattern": pattern, "content": content}}


def in_turn(steps):
    return {"normalizer": {"type": "Sequence", "normalizers": steps}}


@pytest.mark.parametrize(
    "parts",
    [
        split(GPT_2),
        split(LLAMA_3),
        in_turn(
            [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ]
        ),
        replace("normalizer", {"Regex": " {2,}"}, "▁"),
        replace("decoder", {"String": "▁"}, " "),
    ],
)
def test_published_patterns_and_replacements_are_opened(parts):
    text = written(**parts)
    assert tokenizer_of(text, "T").to_str() == Tokenizer.from_str(text).to_str()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (written(**split(pattern)), EXPLODES)
            for pattern in (
                "(a+)+$", "(x|x)*y", r"(\w+\s?)*\.$", "(?=(q+)+$)", "(foo|f|o|oo)+bar$",
                "a*a*a*$", "(?:ab|a|b)*c$",
            )
        ),
        (written(**replace("normalizer", {"Regex": "(a+)+$"}, "b")), EXPLODES),
        (written(**replace("decoder", {"Regex": "(a+)+$"}, "b")), EXPLODES),
        (written(**in_turn([{"type": "Sequence", "normalizers": [
            replace("x", {"Regex": "(a+)+$"}, "b")["x"]]}])), EXPLODES),
        (written(**replace("normalizer", {"String": ""}, "x" * 1_000_000)), TAKES_MUCH),
        (written(**in_turn([replace("x", {"String": "a"}, "aa")["x"]] * 40)), TAKES_MUCH),
        (written(**replace("decoder", {"String": ""}, "x" * 100_000)), GROWS),
        (written(normalizer={"type": "Prepend", "prepend": "x" * 1_000_000}),
         GROWS),
        (written(normalizer={"type": "Prepend", "prepend": "x" * 10_000_000}), r"^T: its normalizer has 10,000,034 char"),
        (written(post_processor={"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                                 "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 10_000}),
         r"^T: its post_processor has \d+,\d+ characters; give"),
        (written(**split("(" * 100_000 + ")" * 100_000)), r"^T: not a tokenizer \(Oniguruma error"),
        (written({"type": "WordLevel", "vocab": {"a": 2**40}}), "^T: has a token of the number 1,09"),
        (written({"type": "BPE", "vocab": {"a": 2**24}}), "^T: has a token of the number 16,777,216;"),
        (written(added_tokens=[{"id": 2**31, "content": "<a>"}]), "^T: has a token of the number 2,1"),
        (written({"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}), r"^T: not a tokenizer .* out of vocab"),
        ('{"normalizer":' + '{"type":"Sequence","normalizers":[' * 5000, "^T: lists or objects nes"),
        ("[]", r"^T: not a tokenizer \("),
    ],
    ids=len,  # the texts are too long
)  # fmt: skip
def test_tokenizers_that_explode_or_grow(text, message):
    began = time.monotonic()
    refuses(message, tokenizer_of, text, "T")
    assert time.monotonic() - began < 5 * SECONDS


def test_a_tokenizer_that_gives_up_later_is_a_users_mistake():
    tokenizer = Tokenizer.from_str(written(**split("(a+)+$")))
    text = TextTokenizer(tokenizer)
    assert text.encode("aaa") == [0]
    for call in (text.encode, text.encode_plain):
        refuses(r"^a tokenizer cannot split a text \(Onig: .*use the", call, "a" * 40 + "!")


def test_a_token_number_beyond_the_models_table(tmp_path):
    parts = {"single": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}}
    processor = {"type": "TemplateProcessing", "pair": parts["single"] * 2} | parts
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 4_000_000}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(written(model, post_processor=processor))
    with pytest.raises(UserError, match=r"tokenizer\.json: .* 4,000,001 tokens, the model 9;"):
        load_encoder_tokenizer(tmp_path, 9, pairs=False)
