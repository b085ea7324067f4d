"""Dequantized blocks of GGUF files beside the package gguf's, bit by bit."""

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from mmqa_jax.weights.formats import gguf_blocks
from mmqa_jax.weights.formats.gguf import GGUFSource
from tests.refusals import refuses

ROWS, ROW = 5, 1 << 16  # more values than are dequantized at a time
OURS = [kind.name for kind in gguf_blocks._KINDS.values()]
LEFT_TO_THE_PACKAGE = ["IQ2_XXS", "IQ3_S", "IQ1_M", "TQ2_0"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file with random bytes as a tensor of each kind, and what the package makes of them."""
    path, rng = tmp_path_factory.mktemp("gguf") / "m.gguf", np.random.default_rng(0)
    writer, values = gguf.GGUFWriter(path, "llama"), {}
    for name in (*OURS, *LEFT_TO_THE_PACKAGE):
        kind = GGMLQuantizationType[name]
        block, size = GGML_QUANT_SIZES[kind]
        rows = ROWS if name in OURS else 1
        raw = rng.integers(0, 256, (rows, ROW // block * size), np.uint8)
        if name == "MXFP4":  # scales of a normal float32
            raw[:, ::size] |= 4
        with np.errstate(all="ignore"):
            plain = raw.view({"F32": np.float32, "F16": np.float16}.get(name, np.uint8))
            values[name] = gguf.quants.dequantize(plain, kind)
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, values


@pytest.mark.parametrize("without_processor", [False, True], ids=["JAX", "NumPy"])
def test_all_kinds_are_the_packages(file, without_processor, monkeypatch):
    path, values = file
    if without_processor:  # as where JAX_PLATFORMS names accelerators alone
        monkeypatch.setattr(gguf_blocks, "_processor", lambda: None)
    source = GGUFSource(path)
    for name, expected in values.items():
        read = source.read(name)
        assert read.shape == expected.shape, name
        numbers = ~np.isnan(expected)
        assert numbers.mean() > 0.8, name
        np.testing.assert_array_equal(
            read[numbers].view(np.uint32), expected[numbers].view(np.uint32), name
        )
        assert np.isnan(read[~numbers]).all(), name


def test_sizes_are_the_packages():
    for number, kind in gguf_blocks._KINDS.items():
        theirs = GGMLQuantizationType(number)
        assert (kind.name, GGML_QUANT_SIZES[theirs]) == (theirs.name, (kind.values, kind.bytes))


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (999, "tensor 'x': quantization 999 is not known; convert"),
        (GGMLQuantizationType.I32, "tensor 'x': quantization I32 is not known; convert"),
    ],
)
def test_kinds_that_cannot_be_read_are_refused(number, message):
    refuses(message, gguf_blocks.kind_of, number, "tensor 'x'")
