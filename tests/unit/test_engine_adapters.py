"""Several adapters over one base in the engine, beside the model that each is merged into."""

import contextlib
import dataclasses
import json
import shutil

import numpy as np
import pytest
from cli_runs import done, quietly
from served_app import openai_client, serving
from tiny_llm import END, MODEL, SIZES, by_id, tiny_llama, write_folder

from mmqa_jax.core.errors import UserError
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Request, Result, Scoring
from mmqa_jax.models.llama.lora import Additions
from mmqa_jax.prompting.backends.local_model import open_backend
from mmqa_jax.prompting.backends.served import ServedModel
from mmqa_jax.runs.ask_corpus import AskedCorpus
from mmqa_jax.serve import ServeOptions
from mmqa_jax.serve.app import make_app
from mmqa_jax.serve.systems import Parts, Threads
from tests.refusals import refuses

pytestmark = pytest.mark.slow

# Beside each other: another rank, other projections.
RANKS = {"cook": (4, ("q", "v", "down")), "poet": (2, MODEL.linears)}
PROMPTS = [[8 + n % 45 for n in range(length)] for length in (3, 40, 70)]  # each begins the next


def additions_of(seed: int, rank: int, targets: tuple[str, ...]) -> Additions:
    rng = np.random.default_rng(seed)
    layers = tiny_llama().layers

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    shapes = {name: getattr(layers, name).kernel.shape for name in targets}
    matrices = {
        name: (draw(count, inputs, rank), draw(count, rank, outputs))
        for name, (count, inputs, outputs) in shapes.items()
    }
    return Additions(2.0, matrices)


ADAPTERS = {name: additions_of(n, *RANKS[name]) for n, name in enumerate(RANKS)}


def merged(name: str):
    """The base with an adapter in its kernels: W + alpha / r A B."""
    model = tiny_llama()
    if name:
        factor, matrices = ADAPTERS[name]
        for target, (a, b) in matrices.items():
            kernel = getattr(model.layers, target).kernel
            kernel.set_value(kernel.get_value() + factor * np.einsum("lir,lro->lio", a, b))
    return model


def requests(adapters) -> list[Request | Scoring]:
    asked = []
    for name in adapters:
        for number, prompt in enumerate(PROMPTS):
            asked += [
                Request((name, number, "greedy"), prompt, 12, adapter=name),
                Request((name, number, "drawn"), prompt, 6, temperature=1.0, n=2, adapter=name),
                Scoring((name, number, "score"), prompt, [[9, 10], [11]], adapter=name),
            ]
        asked.append(Request((name, "beams"), PROMPTS[0], 5, beams=2, adapter=name))
    order = np.random.default_rng(1).permutation(len(asked))
    return [asked[n] for n in order]


def answers(engine: Engine, asked) -> dict:
    """(tokens, log-probability) of the candidates of each request, in the order of the tokens, and
    the log-probability of each continuation."""
    found = {}
    for key, result in by_id(engine.serve(asked)).items():
        if isinstance(result, Result):
            found[key] = sorted((one.tokens, one.total) for one in result.candidates)
        else:
            found[key] = [((), score.total) for score in result.scores]
    return found


@pytest.mark.parametrize("scan", [False, True])
def test_a_mixed_batch_answers_as_each_merged_model(scan):
    """Prompts that begin alike share a prefix with their own adapter's alone; where layers are not
    scanned, the base's answers are the same bits as those of an engine without adapters."""
    sizes = dataclasses.replace(SIZES, scan_layers=scan)
    options = {"end_ids": [END], "config": sizes}
    mixed = Engine(tiny_llama(), **options, adapters=ADAPTERS)
    got = answers(mixed, requests(["", *ADAPTERS]))
    assert mixed.throughput.reused_tokens
    greedy = set()
    for name in ("", *ADAPTERS):
        alone = [dataclasses.replace(one, adapter="") for one in requests([name])]
        for key, want in answers(Engine(merged(name), **options), alone).items():
            assert [tokens for tokens, _ in got[key]] == [tokens for tokens, _ in want], key
            within = 3e-4 if name or scan else 0  # of sums of up to 30
            totals = [[total for _, total in one] for one in (got[key], want)]
            np.testing.assert_allclose(*totals, rtol=0, atol=within)
        greedy.add(str(got[name, 2, "greedy"][0][0]))
    assert len(greedy) == 3  # the adapters change what is answered


def test_an_adapter_that_the_engine_lacks_is_refused():
    engine = Engine(tiny_llama(), end_ids=[END], config=SIZES, adapters=ADAPTERS)
    message = r"request 0: adapter is 'painter', and the engine has cook, poet; name one of its own"
    for request in (Request(0, [9], adapter="painter"), Scoring(0, [9], [[10]], adapter="painter")):
        refuses(message, engine.tokenized, request)


# Adapters of PEFT, over a published base.


@pytest.fixture(scope="module")
def peft_model(tmp_path_factory):
    """A tiny LLaMA of transformers with two adapters of PEFT, and the folder of base and adapters."""
    import peft
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("peft")
    write_folder(folder / "llm")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "llm")
    for name, (rank, linears) in {
        "cook": (4, ["q_proj", "v_proj", "down_proj"]),
        "poet": (2, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
    }.items():
        config = peft.LoraConfig(
            r=rank, lora_alpha=24, target_modules=linears, init_lora_weights=False,
            task_type="CAUSAL_LM",
        )  # fmt: skip
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    model.save_pretrained(folder)
    return model.eval(), folder


def theirs(model, name: str, prompt: list[int]) -> tuple[int, ...]:
    import torch

    ids = torch.tensor([prompt])
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad(), contextlib.ExitStack() as stack:
        if name:
            model.set_adapter(name)
        else:
            stack.enter_context(model.disable_adapter())
        return tuple(model.generate(input_ids=ids, **options)[0, len(prompt) :].tolist())


def test_tokens_are_those_of_peft(peft_model, cli_cache):
    """And of the same adapter as `mmqa convert` writes it, beside the two."""
    model, folder = peft_model
    with quietly(cli_cache):
        source, out = folder / "cook", folder / "converted"
        done("convert", "--model=llama", f"--source={source}", f"--out={out}")
    folders = {"cook": source, "poet": folder / "poet", "cook_again": out}
    engine = open_backend(folder / "llm", engine=SIZES, adapters=folders).engine
    asked = [
        Request((name, number), prompt, 12, adapter=name)
        for number, prompt in enumerate(PROMPTS)
        for name in ("", *folders)
    ]
    got = {key: result.candidates[0].tokens for key, result in by_id(engine.serve(asked)).items()}
    for name in ("", "cook", "poet"):
        for number, prompt in enumerate(PROMPTS):
            assert got[name, number] == theirs(model, name, prompt), (name, number)
    assert [got["cook_again", n] for n in range(3)] == [got["cook", n] for n in range(3)]
    assert len({got[name, 2] for name in ("", "cook", "poet")}) == 3


def test_the_api_has_a_model_for_each_adapter(peft_model):
    """Its answers, whole and in pieces, are those of the engine."""
    import openai

    _, folder = peft_model
    folders = {name: folder / name for name in ("cook", "poet")}
    backend = open_backend(folder / "llm", engine=SIZES, adapters=folders)
    ids = backend.tokenizer.encode("what is")
    names = ("tiny", *folders)
    asked = [
        Request(name, ids, 8, adapter="" if name == "tiny" else name, logprobs=True)
        for name in names
    ]
    wanted = {key: result.text for key, result in by_id(backend.engine.serve(asked)).items()}
    assert len(set(wanted.values())) == 3
    model = ServedModel(backend, 16)
    threads, corpus = Threads(2), AskedCorpus(Corpus([]))
    parts = Parts("tiny", model, "tiny", None, "vectors", {}, corpus, threads, tuple(folders))
    with serving(make_app(parts, ServeOptions())) as address:
        client = openai_client(address, 60)
        parents = {one.id: getattr(one, "parent", None) for one in client.models.list().data}
        assert parents == {"tiny": None, "cook": "tiny", "poet": "tiny", "vectors": None}
        for name in names:
            options = {"model": name, "prompt": "what is", "max_tokens": 8, "temperature": 0}
            assert client.completions.create(**options).choices[0].text == wanted[name]
            pieces = client.completions.create(**options, stream=True)
            assert "".join(one.choices[0].text for one in pieces) == wanted[name]
        with pytest.raises(openai.NotFoundError, match="these do: tiny, cook, poet"):
            client.completions.create(model="painter", prompt="a")
    parts.close()


def with_config(folder, out, **changes):
    """A copy of PEFT's folder with another config."""
    shutil.copytree(folder, out)
    file = out / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return out


REFUSED = {
    "gone": r"gone: no such folder; name that of a LoRA run, or of PEFT",
    "whole": r"whole: holds a whole model, and an adapter was expected; name it as --model",
    "other_base": r"other_base: is an adapter of another model \(.*other\) than .*llm holds; serve",
    "other_size": r"does not fit the model \(12 shapes that differ: .*lora_A.weight \(4, 48\)",
    "empty": r"empty.*model\.json",
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_do_not_fit_are_refused(peft_model, tmp_path, cli_cache, case):
    _, folder = peft_model
    cook = folder / "cook"
    if case == "whole":
        with quietly(cli_cache):
            source, out = folder / "llm", tmp_path / case
            done("convert", "--model=llama", f"--source={source}", f"--out={out}")
    elif case == "other_base":
        other = write_folder(tmp_path / "other")
        (other / "generation_config.json").write_text("{}")
        with_config(cook, tmp_path / case, base_model_name_or_path=str(other))
    elif case == "other_size":  # the base that it names is not here: its shapes tell
        with_config(cook, tmp_path / case, base_model_name_or_path="no/base", r=3)
    elif case == "empty":
        (tmp_path / case).mkdir()
    with pytest.raises(UserError, match=REFUSED[case]):
        open_backend(folder / "llm", engine=SIZES, adapters={"x": tmp_path / case})
