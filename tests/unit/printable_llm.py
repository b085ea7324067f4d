"""A tiny random LLaMA that writes printable characters, JSON among them."""

import dataclasses

from tiny_llm import SIZES, TEMPLATE, llama_config, tiny_llama
from tokenizers import AddedToken, Tokenizer, decoders, models

from mmqa_jax.decoding.engine import Engine
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.prompting.backends.engine import EngineBackend
from mmqa_jax.prompting.text_tokenizer import ChatTemplate, TextTokenizer

PRINTABLE = [chr(n) for n in range(32, 127)] + ["\n", '{"', '":', '",', "<tool"]
START, END = len(PRINTABLE), len(PRINTABLE) + 1
VOCABULARY = END + 1


def printable_tokenizer(template: ChatTemplate = ChatTemplate(TEMPLATE)) -> TextTokenizer:  # noqa: B008
    """A token for each printable character, a few longer ones, ChatML's marks and template."""
    tokens = Tokenizer(models.BPE({word: n for n, word in enumerate(PRINTABLE)}, []))
    tokens.add_special_tokens(
        [AddedToken(mark, special=True) for mark in ("<|im_start|>", "<|im_end|>")]
    )
    tokens.decoder = decoders.Fuse()
    return TextTokenizer(tokens, template, (END,))


def printable_llama() -> Llama:
    """The model, always the same."""
    return tiny_llama(llama_config(VOCABULARY, positions=1200))


def printable_engine(**sizes) -> Engine:
    """An engine of it, of 160 tokens where no length is given."""
    config = dataclasses.replace(SIZES, **sizes)
    return Engine(printable_llama(), printable_tokenizer(), end_ids=(END,), config=config)


def printable_backend(template: ChatTemplate = ChatTemplate(TEMPLATE)) -> EngineBackend:  # noqa: B008
    """A backend of it, whose prompts have room for functions."""
    engine = printable_engine(length=1200)
    return EngineBackend(
        lambda demand: engine, printable_tokenizer(template), length=1200, fingerprint="printable"
    )
