"""What a checkpoint's config says is read or refused by name; what nothing says is asked for."""

import json
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tiny_checkpoints import CONFIGS, SETTINGS, make_source, published_arrays

from mmqa_jax.cli import main
from mmqa_jax.core.errors import UserError
from mmqa_jax.models.bart.network import BartConfig
from mmqa_jax.models.bert.keys import bert_config, read_bert_config, unknown_heads
from mmqa_jax.models.bert.network import bert_tiny
from mmqa_jax.models.llama.config import LlamaConfig, RopeScaling
from mmqa_jax.models.llama.gguf import gguf_config
from mmqa_jax.models.llama.keys import meta_config, read_meta, unknown_scaling
from mmqa_jax.models.llava.keys import llava_config, original_config
from mmqa_jax.models.oscar.keys import oscar_config
from mmqa_jax.models.two_towers.keys import clip_config
from mmqa_jax.models.two_towers.processor import check_processor
from mmqa_jax.weights.bundled import minilm_path
from mmqa_jax.weights.folder import read_record
from mmqa_jax.weights.formats.gguf import GGUFSource
from mmqa_jax.weights.layouts import require_given
from mmqa_jax.weights.registry import architecture
from tests.refusals import refuses

pytestmark = pytest.mark.slow

LLAVA_ORIGINAL = {
    "model_type": "llava", "mm_vision_tower": "openai/clip-vit-large-patch14-336",
    "mm_projector_type": "mlp2x_gelu",
}  # fmt: skip
LLAMA_TEXT = {"text_config": {"model_type": "llama"}}


def bart(published):
    return BartConfig.from_hf(published)


def llama(published):
    return LlamaConfig.from_hf(published)


def llava(published):
    return llava_config({"model_type": "llava", **LLAMA_TEXT} | published)


def original_llava(published):
    return original_config(LLAVA_ORIGINAL | published, None)


READERS = [clip_config, bert_config, oscar_config, bart, llama, llava, original_llava]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_keys_that_nobody_knows_are_refused(reader):
    harmless = {"architectures": ["X"], "_name_or_path": "a/b", "transformers_version": "4.1"}
    harmless |= {"sep_token_id": 3, "new_list": [], "new_key": None, "pruned_heads": {}}
    assert reader(harmless) == reader({})
    refuses(r"key 'logit_softcap' \(30\.0\) .* take it out of the", reader, {"logit_softcap": 30.0})
    with pytest.raises(UserError, match=r"quantization_config is .* use a checkpoint without it"):
        reader({"quantization_config": {"bits": 4}})
    refuses(r"pruned_heads is \{'0': \[1\]\}", reader, {"pruned_heads": {"0": [1]}})


CHANGES = [
    (bert_config, {"is_decoder": True}, "is_decoder is True"),
    (bert_config, {"add_cross_attention": True}, "add_cross_attention is True"),
    (bert_config, {"is_causal": True}, "is_causal is True"),
    (oscar_config, {"is_decoder": True}, "is_decoder is True"),
    (llama, {"is_causal": False}, "is_causal is False"),
    (llama, {"rope_interleaved": True}, "rope_interleaved is True"),
    (llama, {"rope_condense_ratio": 8}, "key 'rope_condense_ratio'"),
    (llama, {"sliding_window": 4096}, "key 'sliding_window'"),
    (
        llama,
        {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 0.7}},
        "rope scaling: the key 'mscale'",
    ),
    (llama, {"rope_theta": 0.0}, r"rope_theta is 0\.0: expected a number above 0"),
    (
        llama,  # transformers has no defaults for these
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "lacks its `low_freq_factor`, `high_freq_factor`; add it",
    ),
    (bart, {"is_causal": False}, "is_causal"),
    (bart, {"add_bias_logits": True}, "add_bias_logits True"),
    (bart, {"extra_pos_embeddings": 0}, "extra_pos_embeddings 0"),
    (bart, {"is_encoder_decoder": False}, "is_encoder_decoder is False"),
    (clip_config, {"text_config": {"is_causal": False}}, "text_config: is_causal is False"),
    (clip_config, {"vision_config": {"num_channels": 4}}, "vision_config: num_channels is 4"),
    (clip_config, {"text_config_dict": {"use_rope": True}}, "text_config_dict: the key 'use_rope'"),
    (llava, {"text_config": {"is_causal": False}}, "text_config: is_causal is False"),
    (llava, {"vision_config": {"num_channels": 1}}, "num_channels is 1"),
    (llava, {"vision_feature_layer": 25}, "feature_layer is 25: the vision tower has 24 layers"),
    (llava, {"vision_feature_layer": True}, "vision_feature_layer is True"),
    (original_llava, {"mm_vision_select_layer": [-2]}, r"mm_vision_select_layer is \[-2\]"),
    (original_llava, {"is_causal": False}, "is_causal is False"),
    (original_llava, {"image_aspect_ratio": "anyres"}, "image_aspect_ratio is 'anyres'"),
    (original_llava, {"mm_new_option": 1}, "key 'mm_new_option'"),
]


@pytest.mark.parametrize(("reader", "change", "message"), CHANGES)
def test_keys_that_change_numbers_are_refused(reader, change, message):
    refuses(message, reader, change)


WRONG_KINDS = [
    (clip_config, {"vision_config": {"num_attention_heads": "12"}}, "vision_config: num_attention"),
    (clip_config, {"vision_config": [1]}, r"vision_config is \[1\], expected an object"),
    (clip_config, {"vision_config": {"hidden_size": 0}}, "hidden_size is 0, expected a whole num"),
    (clip_config, {"text_config": {"layer_norm_eps": "a"}}, "layer_norm_eps is 'a', expected a nu"),
    (bert_config, {"hidden_size": None}, "hidden_size is None, expected a whole number of at leas"),
    (bert_config, {"vocab_size": 2.5}, r"vocab_size is 2\.5, expected a whole number"),
    (bert_config, {"layer_norm_eps": float("nan")}, "layer_norm_eps is nan, expected a number"),
    (bert_config, {"hidden_act": {}}, "hidden_act is {}, expected a name"),
    (bart, {"encoder_layers": None}, "encoder_layers is None, expected a whole number"),
    (bart, {"scale_embedding": "yes"}, "scale_embedding is 'yes', expected true or false"),
    (llama, {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or"),
    (llama, {"num_attention_heads": 0}, "num_attention_heads is 0, expected a whole number"),
    (llama, {"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
    (llama, {"rope_scaling": {"type": "linear", "factor": "x"}}, "factor is 'x', expected a numb"),
    (llama, {"rope_theta": "a"}, "rope_theta is 'a', expected a number"),
    (llava, {"text_config": 3}, "text_config is 3, expected an object"),
    (llava, {"image_token_index": "a"}, "image_token_index is 'a', expected a whole number"),
]


@pytest.mark.parametrize(("reader", "change", "message"), WRONG_KINDS)
def test_values_of_another_kind_are_refused(reader, change, message):
    refuses(message, reader, change)


def test_keys_beside_the_rope_are_read():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    found = llama({"rope_scaling": scaling, "original_max_position_embeddings": 4096})
    assert found.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 4096)


META = {"dim": 64, "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5, "multiple_of": 32}


def test_meta_folders(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(META | {"quantization_args": {"bits": 4}}))
    (tmp_path / "consolidated.00.pth").touch()
    refuses(r"params\.json: the key 'quantization_args'", read_meta, tmp_path)
    # Scaled positions: 8 or 32, which the sizes of the published models tell.
    for sizes, factor in [
        ((4096, 32), 8.0),
        ((8192, 80), 8.0),
        ((2048, 16), 32.0),
        ((3072, 28), 32.0),
    ]:
        params = META | {"dim": sizes[0], "n_layers": sizes[1], "use_scaled_rope": True}
        config = meta_config(params, 100)
        assert config.rope_scaling == RopeScaling("llama3", factor)
        assert not unknown_scaling(config)
    other = meta_config(META | {"use_scaled_rope": True}, 100)
    assert unknown_scaling(other) == {"rope_scaling.factor": 8.0}
    assert not unknown_scaling(meta_config(META, 100))


@pytest.mark.parametrize("model", ["vlp", "mcan", "mcan_openvqa"])
def test_heads_that_nothing_shows_are_asked_for(model, tmp_path, capsys):
    source = make_source(model, tmp_path / "source")
    command = ["convert", f"--model={model}", f"--source={source.path}", f"--out={tmp_path / 'a'}"]
    assert main(command) == 2
    message = capsys.readouterr().err
    heads = [setting.partition("=")[0] for setting in SETTINGS[model] if "heads" in setting]
    for name in heads:
        assert f"--set {name}=" in message
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("model", ["vlp", "mcan"])  # of one part with heads, and of two
def test_an_export_says_its_heads(model, tmp_path):
    """To whoever gives the file in its folder; the folder itself: test_cli_convert.py."""
    source = make_source(model, tmp_path / "source")
    assert main([*source.flags(model), f"--out={tmp_path / 'hf'}", "--export=hf"]) == 0
    opened = architecture(model).open(tmp_path / "hf" / "model.safetensors")
    require_given(opened, ())
    assert opened.config == CONFIGS[model]


def test_published_widths_have_known_heads(tmp_path):
    assert unknown_heads(768, "bert.heads") == unknown_heads(1024, "bert.heads") == {}
    assert unknown_heads(384, "bert.heads") == {"bert.heads": 6}  # MiniLM's are 12
    source = make_source("mcan", tmp_path / "source")
    tensors = {key: torch.from_numpy(array) for key, array in source.arrays.items()}
    assert set(architecture("mcan").open(source.path).unknown) == {"text.heads", "fusion.heads"}
    # Without the rotary tables nothing checks the grid and the base.
    torch.save({key: t for key, t in tensors.items() if ".rope." not in key}, source.path)
    unknown = architecture("mcan").open(source.path).unknown
    assert set(unknown) == {"text.heads", "fusion.heads", "grid", "rope_base"}


def test_a_bart_without_config_is_large_cnn(tmp_path, capsys):
    arrays = published_arrays("bart", CONFIGS["bart"])
    save_file(arrays, tmp_path / "bart.safetensors")
    command = ["convert", "--model=bart", f"--source={tmp_path / 'bart.safetensors'}"]
    assert main([*command, f"--out={tmp_path / 'out'}"]) == 2
    message = capsys.readouterr().err
    assert "shared.weight is [31, 12], bart-large-cnn's is [50264, 1024]" in message
    assert f"put its config.json beside the weights ({tmp_path / 'config.json'})" in message


def test_a_resnets_heads_are_read(tmp_path, capsys):
    source = make_source("modified_resnet", tmp_path / "resnet")
    content = {"model_cfg": {"vision_cfg": {"layers": [1, 1, 2, 1], "head_width": 32}}}
    (source.path.parent / "open_clip_config.json").write_text(json.dumps(content))
    command = [*source.flags("modified_resnet"), f"--out={tmp_path / 'out'}"]
    assert main(command) == 2
    assert "leave the pool out with `--set attention_pool=false`" in capsys.readouterr().err
    assert main([*command, "--set", "attention_pool=false"]) == 0


# sentence-transformers' folders


@pytest.fixture
def minilm(tmp_path):
    """MiniLM's folder without its weights."""
    folder = tmp_path / "minilm"
    ignore = shutil.ignore_patterns("*.safetensors", "tokenizer*", "vocab*", "README*", "data*")
    shutil.copytree(minilm_path(), folder, ignore=ignore)
    return folder


def change_json(file: Path, **changes):
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(content))


def test_sentences_are_means(minilm):
    assert read_bert_config(minilm).hidden == 384
    file = minilm / "1_Pooling" / "config.json"
    change_json(file, pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    with pytest.raises(UserError) as caught:
        read_bert_config(minilm)
    assert "1_Pooling/config.json: pooling_mode_cls_token is True" in str(caught.value)
    assert "move modules.json and the folders that it names away" in str(caught.value)
    (minilm / "modules.json").unlink()  # a copy without it
    refuses("pooling_mode_cls_token is True", read_bert_config, minilm)
    shutil.rmtree(minilm / "1_Pooling")  # the remedy
    assert read_bert_config(minilm).hidden == 384


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"pooling_mode": "mean", "embedding_dimension": 384}, None),  # since version 5
        ({"pooling_mode": "lasttoken"}, "pooling_mode is 'lasttoken'"),
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is True"),
        ({"pooling_mode_weightedmean_tokens": True}, "pooling_mode_weightedmean_tokens is True"),
        ({"include_prompt": False}, "include_prompt is False"),
        ({"pooling_mode_new": True}, "key 'pooling_mode_new'"),
    ],
)
def test_other_poolings_are_refused(pooling, message, minilm):
    change_json(minilm / "1_Pooling" / "config.json", **pooling)
    if message is None:
        read_bert_config(minilm)
        return
    refuses(message, read_bert_config, minilm)


def test_other_modules_and_prompts_are_refused(minilm):
    modules = json.loads((minilm / "modules.json").read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    (minilm / "modules.json").write_text(json.dumps([*modules, dense]))
    refuses(r"modules\.json: holds the layer 'Dense'", read_bert_config, minilm)
    own = modules[0] | {"type": "custom_st.Transformer"}  # code in the folder
    (minilm / "modules.json").write_text(json.dumps([own, *modules[1:]]))
    refuses(r"holds the layer 'custom_st\.Transformer'", read_bert_config, minilm)
    (minilm / "modules.json").write_text(json.dumps(modules))
    file = minilm / "sentence_bert_config.json"
    change_json(file, do_lower_case=True)
    refuses("do_lower_case puts every text in lower case", read_bert_config, minilm)
    change_json(file, do_lower_case=False)
    file = minilm / "config_sentence_transformers.json"
    change_json(file, prompts={"query": "query: "}, default_prompt_name="query")
    refuses("default_prompt_name 'query' puts 'query: ' before every", read_bert_config, minilm)
    change_json(file, default_prompt_name=None)
    read_bert_config(minilm)


def test_presets_stay_readable():
    """Our own exports pass."""
    from mmqa_jax.models.bert.keys import bert_to_hf

    assert bert_config(bert_to_hf(bert_tiny())) == bert_tiny()


def test_angles_in_a_llama2c_file_are_the_models(tmp_path, capsys):
    """Version 0 keeps the rotary angles; nothing else says what rope_theta is."""
    dim, mlp, heads, vocabulary, context = 8, 12, 2, 11, 6
    rng = np.random.default_rng(0)
    size = vocabulary * dim + 2 * dim + 4 * dim * dim + 3 * dim * mlp + dim
    angles = np.arange(context)[:, None] / 500.0 ** (np.arange(2) / 2)
    tables = [np.cos(angles), np.sin(angles)]
    header = struct.pack("<7i", dim, mlp, 1, heads, heads, vocabulary, context)
    values = [rng.normal(size=size), *tables]
    content = b"".join(np.asarray(part, "<f4").tobytes() for part in values)
    (tmp_path / "a.bin").write_bytes(header + content)
    command = ["convert", "--model=llama", f"--source={tmp_path / 'a.bin'}"]
    assert main([*command, f"--out={tmp_path / 'out'}"]) == 2
    message = capsys.readouterr().err
    assert "its rotary angles are not those of rope_theta 10000; add `--set rope_theta=" in message
    assert main([*command, f"--out={tmp_path / 'out'}", "--set=rope_theta=500"]) == 0
    assert read_record(tmp_path / "out").config.rope_theta == 500.0


def test_gguf_metadata(tmp_path):
    def config(**metadata):
        writer = gguf.GGUFWriter(str(tmp_path / "a.gguf"), "llama")
        writer.add_head_count(2)
        writer.add_embedding_length(8)
        writer.add_block_count(1)
        writer.add_feed_forward_length(12)
        writer.add_context_length(16)
        writer.add_layer_norm_rms_eps(1e-5)
        for key, value in metadata.items():
            add = writer.add_bool if isinstance(value, bool) else writer.add_float32
            add = writer.add_uint32 if type(value) is int else add
            add(f"llama.{key.replace('__', '.')}", value)
        writer.add_tensor("token_embd.weight", np.zeros((5, 8), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return gguf_config(GGUFSource(tmp_path / "a.gguf"))

    assert config(attention__causal=True, vocab_size=5, attention__value_length=4).heads == 2
    for metadata, message in [
        ({"attention__causal": False}, r"llama\.attention\.causal is False"),
        ({"expert_shared_count": 8}, r"key 'llama\.expert_shared_count'"),
        ({"logit_scale": 0.5}, r"llama\.logit_scale is 0\.5"),
        ({"attention__value_length": 6}, r"value_length is 6, a head has 4"),
        ({"new_trick": 3}, r"key 'llama\.new_trick'"),
    ]:
        refuses(message, config, **metadata)


# transformers' image processor beside a CLIP


@pytest.mark.parametrize(
    ("name", "processor", "message"),
    [
        ("preprocessor_config.json", {}, None),
        ("preprocessor_config.json", {"size": 16, "crop_size": 16, "resample": 3}, None),
        ("preprocessor_config.json", {"image_mean": [0.5, 0.5, 0.5]}, r"image_mean is \[0\.5"),
        ("preprocessor_config.json", {"image_std": 0.5}, r"image_std is 0\.5"),
        ("preprocessor_config.json", {"resample": 2}, "resample is 2, expected bicubic"),
        ("preprocessor_config.json", {"do_center_crop": False}, "do_center_crop is False"),
        ("preprocessor_config.json", {"crop_size": {"height": 32, "width": 32}}, "crop_size is"),
        ("preprocessor_config.json", {"size": {"shortest_edge": [16]}}, r"size is .*\[16\]"),
        ("preprocessor_config.json", [], r"preprocessor_config\.json: is no JSON object of an im"),
        ("processor_config.json", {"image_processor": {"size": {"shortest_edge": 8}}}, "size is"),
    ],
)
def test_pictures_are_prepared_as_the_file_says(name, processor, message, tmp_path):
    folder = make_source("clip", tmp_path / "clip").path  # of 16 pixels
    (folder / name).write_text(json.dumps(processor))
    if message is None:
        architecture("clip").open(folder)
        return
    with pytest.raises(UserError, match=message):
        architecture("clip").open(folder)


def test_transformers_own_processors_pass(tmp_path):
    import transformers

    for kind in (transformers.CLIPImageProcessor, transformers.CLIPImageProcessorPil):
        sizes = {"size": {"shortest_edge": 16}, "crop_size": 16}
        kind(**sizes).save_pretrained(tmp_path)
        check_processor(tmp_path, 16)
        refuses("size is", check_processor, tmp_path, 32)
