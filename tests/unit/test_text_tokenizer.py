"""Tokenizers from published files, against the libraries that they were published for."""

import json
import shutil

import gguf
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mmqa_jax.core.errors import UserError
from mmqa_jax.prompting.backends import Message
from mmqa_jax.prompting.text_tokenizer import open_text_tokenizer
from mmqa_jax.weights.bundled import smollm2_path
from tests.refusals import refuses

# Some of it repeats so that merges are learned.
CORPUS = [
    "A chat between a curious user and an artificial intelligence assistant.",
    "USER: What is in the picture?  ASSISTANT: a red bus, a man and 2 dogs",
    "Question: which of these states is farthest north? Answer: the answer is (B).",
    "===\nContext: a man rides a wave on a surfboard.\n===\nQ: what sport is this?\nA: surfing",
] * 3
TEXTS = [
    *CORPUS[:4],
    "",
    "unseen words, naïve é 漢字 😀\ttab",
    "a  b   c    d ",
    "line\n\nbreak\n",
    "123 4567",
]
BEGIN_WITH_A_SPACE = [" leading", "  two", " ", "   "]
TURNS = [
    Message("user", ("What is this?",)),
    Message("assistant", ("A bus.",)),
    Message("user", ("Which color?",)),
]
PLAIN = [{"role": turn.role, "content": turn.text} for turn in TURNS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A SentencePiece model with LLaMA's settings."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    (folder / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=420,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True,
        minloglevel=2,
    )  # fmt: skip
    return folder / "tokenizer.model"


@pytest.fixture(scope="module")
def original(model):
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


def folder_with(folder, model, **settings):
    """A folder as LLaMA-2's or Vicuna's, without tokenizer.json."""
    folder.mkdir()
    shutil.copy(model, folder / "tokenizer.model")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


VICUNA = {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}


@pytest.mark.parametrize(
    "settings", [{}, VICUNA, {**VICUNA, "legacy": True}], ids=["none", "vicuna", "legacy"]
)
def test_sentencepiece_model_splits_as_sentencepiece_itself(tmp_path, model, original, settings):
    tokenizer = open_text_tokenizer(folder_with(tmp_path / "model", model, **settings))
    for text in [*TEXTS, *BEGIN_WITH_A_SPACE]:
        want = original.encode(text)
        assert tokenizer.encode_plain(text) == want, text
        assert tokenizer.encode(text) == [original.bos_id(), *want]
        assert tokenizer.decode(want) == text
    assert tokenizer.bos == original.bos_id()
    assert tokenizer.end_ids == (original.eos_id(),)


def test_sentencepiece_model_is_as_in_transformers(tmp_path, model):
    from transformers import AutoTokenizer

    folder = folder_with(tmp_path / "model", model, **VICUNA, chat_template="{{ bos_token }}")
    theirs, ours = AutoTokenizer.from_pretrained(folder), open_text_tokenizer(folder)
    for text in [*TEXTS, "x</s>y", "<s>[INST] hi [/INST]", "A bus.</s>USER: why?"]:
        assert ours.encode(text) == theirs.encode(text), text
    # transformers loses a space at the beginning; the original and ours keep it.
    assert [theirs.encode(f" {text}") for text in "ab"] == [theirs.encode(text) for text in "ab"]


@pytest.mark.parametrize(
    ("settings", "after_end"), [({}, "▁a"), (VICUNA, "a")], ids=["legacy", "not legacy"]
)
def test_prefix_space_after_a_special_token(tmp_path, model, original, settings, after_end):
    """LLaMA-2 as published puts it there, `legacy: false` only at the beginning."""
    tokenizer = open_text_tokenizer(folder_with(tmp_path / "model", model, **settings))
    pieces = [original.id_to_piece(i) for i in tokenizer.encode_plain("is</s>a")]
    assert "".join(pieces[: pieces.index("</s>")]) == "▁is"
    assert "".join(pieces[pieces.index("</s>") + 1 :]) == after_end


def test_settings_turn_off_first_token_and_prefix_space(tmp_path, model, original):
    settings = {**VICUNA, "add_bos_token": False, "add_prefix_space": False}
    tokenizer = open_text_tokenizer(folder_with(tmp_path / "model", model, **settings))
    assert tokenizer.bos is None
    assert "".join(original.id_to_piece(i) for i in tokenizer.encode("user a")) == "user▁a"


def test_continuations_do_not_merge_into_the_prompt(tmp_path, model):
    """What is scored are the tokens after the prompt's, which stay as they are."""
    tokenizer = open_text_tokenizer(folder_with(tmp_path / "model", model, **VICUNA))
    for prompt in ("Q: what sport is this?\nA:", "USER: hello ASSISTANT:"):
        ids = tokenizer.encode(prompt)
        for option in (" surfing", " (B)", " 2 dogs", " a red bus"):
            whole = tokenizer.encode(prompt + option)
            assert whole[: len(ids)] == ids
            assert tokenizer.decode(whole[len(ids) :]) == option.removeprefix(" ")


def test_broken_and_foreign_files_are_one_sentence(tmp_path, model):
    folder = folder_with(tmp_path / "broken", model)
    (folder / "tokenizer.model").write_bytes(model.read_bytes()[:2000] + b"no vocabulary")
    refuses(r"transformers cannot open its tokenizer .* --tokenizer", open_text_tokenizer, folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        open_text_tokenizer(tmp_path / "empty")


LETTER = Tokenizer(models.BPE({"a": 0}, [])).to_str()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{}"}, r"tokenizer\.json: not a tokenizer \(.*\); give"),
        *(
            (
                {"tokenizer.json": LETTER, name: "[]"},
                rf"{name}: is not an object; fetch the file ag",
            )
            for name in ("tokenizer_config.json", "generation_config.json")
        ),
        *(
            (
                {"tokenizer.json": LETTER, name: json.dumps({"eos_token_id": end})},
                rf"{name}: eos_token_id is .*, a token's number or a list of at most .*; fetch the fi",
            )
            for name in ("generation_config.json", "config.json")
            for end in ("x", -1, 1.5, True, [[1]])
        ),
        *(
            (
                {
                    "tokenizer.json": LETTER,
                    "tokenizer_config.json": json.dumps({"chat_template": template}),
                },
                r"tokenizer_config\.json, chat_template: a text was expected, or .*; fetch the file",
            )
            for template in (3, {"a": 1}, [3], [{"name": "default"}])
        ),
        (
            {"tokenizer.json": LETTER, "added_tokens.json": '{"b": "c"}'},
            r"added_tokens\.json: 'c' is no token's number; fetch the file again",
        ),
        (
            {"tokenizer.json": LETTER, "added_tokens.json": '{"b": 7}'},
            r"added_tokens\.json: the token 'b' is number 7 there, and 1 in tokenizer\.json; fetch",
        ),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json: is not an object; fetch"),
        (
            {"tokenizer_config.json": '{"tokenizer_class": "ByT5Tokenizer"}'},
            r": its ByT5Tokenizer .*; name",
        ),
    ],
)
def test_files_that_are_no_tokenizer(files, message, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    refuses(message, open_text_tokenizer, tmp_path)


def test_code_of_a_model_is_not_run(tmp_path):
    """A tokenizer class in the folder, as trust_remote_code would load it."""
    trace = tmp_path / "it_ran"
    (tmp_path / "tokenization_own.py").write_text(f"open({str(trace)!r}, 'w')\n")
    settings = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    refuses("transformers cannot open its tokenizer", open_text_tokenizer, tmp_path)
    assert not trace.exists()


# LLaMA-3's splitting, from its tokenizer.json.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|begin_of_text|>", "<|eot_id|>"]


def byte_level(split: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """A byte-level BPE trained on the corpus, with LLaMA-3's special tokens at its end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def llama3_splitting() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def write_gguf(file, kind, splitting, tokens, types, **more):
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_sentencepiece_in_a_gguf_file(tmp_path, original):
    count = original.get_piece_size()
    pieces = [original.id_to_piece(i) for i in range(count)]
    types = [
        2 if original.is_unknown(i) else 3 if original.is_control(i) else
        6 if original.is_byte(i) else 1
        for i in range(count)
    ]  # fmt: skip
    file = write_gguf(
        tmp_path / "model.gguf", "llama", "default", pieces, types,
        token_scores=[original.get_score(i) for i in range(count)],
        bos_token_id=original.bos_id(), eos_token_id=original.eos_id(), add_bos_token=True,
        chat_template="{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}",
    )  # fmt: skip
    tokenizer = open_text_tokenizer(file)
    for text in [*TEXTS, *BEGIN_WITH_A_SPACE]:
        want = original.encode(text)
        assert tokenizer.encode(text) == [original.bos_id(), *want], text
        assert tokenizer.decode(want) == text
    assert tokenizer.end_ids == (original.eos_id(),)
    assert tokenizer.template.render(0, TURNS) == "<s>What is this?</s>"


def test_llama3_in_a_gguf_file(tmp_path):
    """Words that are tokens stay whole even where merges do not lead to them."""
    theirs = byte_level(llama3_splitting())
    theirs.model.ignore_merges = True
    vocabulary = theirs.get_vocab()
    whole = "Ġunmerged"
    tokens = [*sorted(set(vocabulary) - set(SPECIAL), key=vocabulary.get), whole, *SPECIAL]
    merges = [" ".join(pair) for pair in json.loads(theirs.to_str())["model"]["merges"]]
    settings = json.loads(theirs.to_str())
    settings["model"]["vocab"] = {token: n for n, token in enumerate(tokens[: -len(SPECIAL)])}
    for added in settings["added_tokens"]:
        added["id"] = tokens.index(added["content"])
    theirs = Tokenizer.from_str(json.dumps(settings))
    file = write_gguf(
        tmp_path / "model.gguf", "gpt2", "llama-bpe", tokens,
        [1] * (len(tokens) - len(SPECIAL)) + [3] * len(SPECIAL), token_merges=merges,
        bos_token_id=len(tokens) - 2, eos_token_id=len(tokens) - 1, add_bos_token=True,
    )  # fmt: skip
    tokenizer = open_text_tokenizer(file)
    for text in [*TEXTS, *BEGIN_WITH_A_SPACE, "it's 2024, I'LL stay unmerged", "x<|eot_id|>\n"]:
        want = theirs.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == [len(tokens) - 2, *want], text
        assert tokenizer.decode(want) == text
    assert tokens.index(whole) in tokenizer.encode("stay unmerged")
    other = write_gguf(tmp_path / "o.gguf", "gpt2", "chatglm-bpe", ["a"], [1])
    refuses(r"pre-tokenizer is 'chatglm-bpe', .*--tokenizer", open_text_tokenizer, other)
    refuses(r"absent\.gguf: no such file; check the", open_text_tokenizer, tmp_path / "absent.gguf")


def test_vocabulary_and_merges_of_a_class_that_the_folder_names(tmp_path):
    theirs = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    theirs.model.save(str(tmp_path))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|eot_id|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = open_text_tokenizer(tmp_path)
    for text in [*TEXTS, *BEGIN_WITH_A_SPACE]:
        assert tokenizer.encode(text) == theirs.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text)) == text


# Templates ---------------------------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message.role == 'system' %}{{ raise_exception('no system') }}{% endif %}\n"
    "{{ '[' + message.role + '] ' + message['content'] | trim }}{{ eos_token }}\n"
    "{% if loop.first %}{% continue %}{% endif %}{{ message | tojson }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat_folder(folder, template, **files):
    byte_level(llama3_splitting()).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": {"__type": "AddedToken", "content": SPECIAL[1], "special": True},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (folder / name.replace("_jinja", ".jinja")).write_text(content)


@pytest.mark.parametrize(
    ("template", "files"),
    [
        (TEMPLATE, {}),
        ([{"name": "tool_use", "template": "x"}, {"name": "default", "template": TEMPLATE}], {}),
        ("not this one", {"chat_template_jinja": TEMPLATE}),
    ],
    ids=["config", "named", "file"],
)
def test_chat_template_of_a_folder_is_as_in_transformers(tmp_path, template, files):
    from transformers import AutoTokenizer

    chat_folder(tmp_path, template, **files)
    ours, theirs = open_text_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    want = theirs.apply_chat_template(PLAIN, tokenize=False, add_generation_prompt=True)
    assert want.startswith("<|begin_of_text|>")
    assert want.endswith("[assistant]")
    assert ours.template.render("q", TURNS) == want
    # The template spells the special tokens: none are added.
    ids = theirs.apply_chat_template(PLAIN, add_generation_prompt=True, return_dict=False)
    assert ours.encode_plain(want) == ids


def test_chat_template_of_smollm2_is_as_in_transformers():
    from transformers import PreTrainedTokenizerFast

    path = smollm2_path()
    theirs = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name)
    want = theirs.apply_chat_template(PLAIN, tokenize=False, add_generation_prompt=True)
    tokenizer = open_text_tokenizer(path)
    assert tokenizer.template.render("q", TURNS) == want
    assert tokenizer.decode(tokenizer.encode_plain(want)) == want


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages", r"chat_template: not a Jinja template"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", r"request 'q': .* template rejects"),
        ("{{ messages.append(1) }}", r"request 'q': .* template rejects"),
        ("{{ 1 // 0 }}", r"request 'q': .* template rejects its messages \(integer div"),
        ("{{ raise_exception('only one turn') }}", r"request 'q': .* \(only one turn\)"),
    ],
)
def test_broken_templates_and_such_as_leave_the_sandbox_are_refused(tmp_path, template, message):
    chat_folder(tmp_path, template)
    refuses(message, open_text_tokenizer(tmp_path).template.render, "q", TURNS)


# Tokens that stand beside tokenizer.json alone

_TURN = {"special": True, "normalized": False}
_IMAGE = {"content": "<img>", "special": False, "lstrip": True, "rstrip": True}
_DECODER = {"257": {"content": "<|im_start|>", **_TURN}, "258": {"content": "<|im_end|>", **_TURN}}


WHOLE = ("<|im_start|>", "<|im_end|>", "<|end|>", "<img>")


def bytes_alone(folder, settings, files=()):
    """A tokenizer.json of single bytes, and `<|end|>` that is a plain entry of its vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*letters, "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    for name, content in {"tokenizer_config.json": settings, **dict(files)}.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("settings", "files", "tokens"),
    [
        ({"added_tokens_decoder": _DECODER, "eos_token": "<|im_end|>"}, {}, 2),
        ({"added_tokens_decoder": _DECODER | {"259": _IMAGE}, "eos_token": "<|end|>"}, {}, 4),
        ({"extra_special_tokens": ["<|end|>"]}, {}, 1),
        # As transformers 2 to 4.33 wrote them.
        (
            {},
            {
                "added_tokens.json": {"<img>": 257},
                "special_tokens_map.json": {"eos_token": {"content": "<|end|>"}},
            },
            2,
        ),
    ],
)
def test_tokens_beside_the_tokenizer_are_read(settings, files, tokens, tmp_path):
    import transformers

    folder = bytes_alone(tmp_path, settings, files)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_text_tokenizer(folder)
    texts = ["<|im_start|>user hi<|im_end|> x<|end|>y", "a <img> b<img>c", "none"]
    for text in texts:
        assert ours.encode_plain(text) == theirs(text, add_special_tokens=False)["input_ids"]
    whole = {token for token in WHOLE if len(ours.encode_plain(token)) == 1}
    assert len(whole) == tokens
    if ours.end_ids:
        assert ours.decode(ours.end_ids) == settings["eos_token"]


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ({"300": {"content": "<x>"}}, "'<x>' is number 300 there, and 257 in tokenizer.json"),
        ({"257": "<x>"}, "added_tokens_decoder 257: is '<x>', not a token"),
        ({"257": {"content": "<x>", "special": 1}}, "not a token"),
        ({"a": {"content": "<x>"}}, "'a' is no token's number"),
        (["<x>"], "added_tokens_decoder: is not an object"),
    ],
)
def test_tokens_beside_the_tokenizer_that_do_not_fit(decoder, message, tmp_path):
    folder = bytes_alone(tmp_path, {"added_tokens_decoder": decoder})
    refuses(message, open_text_tokenizer, folder)


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_is_split_as_sentencepiece_does_and_comes_back(opened, original, text):
    ids = opened.encode_plain(text)
    assert ids == original.encode(text)
    assert opened.decode(ids) == original.decode(ids)
    assert opened.decode(ids) == text


@pytest.fixture(scope="module")
def opened(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("opened") / "model"
    return open_text_tokenizer(folder_with(folder, model, **VICUNA))


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_bytes_of_tokens_are_those_of_the_text(kind, tmp_path):
    """Also where a character is several tokens (shared/cases/doc_12)."""
    if kind == "bytes":
        tokenizer = open_text_tokenizer(smollm2_path())
    else:
        (tmp_path / "texts.txt").write_text("\n".join(CORPUS))
        sentencepiece.SentencePieceTrainer.train(
            input=str(tmp_path / "texts.txt"), model_prefix=str(tmp_path / "tokenizer"),
            vocab_size=400, byte_fallback=True, model_type="bpe", minloglevel=2,
        )  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        settings_of = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_of))
        tokenizer = open_text_tokenizer(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode_plain(text)
        spelled = b"".join(map(tokenizer.token_bytes, ids))
        assert spelled.removeprefix(b" ").decode() == text.removeprefix(" ")
