r"""The log-probability of an answer is of its text, without end token and stop string.

So PICa (gpt3_api_okvqa.py) and Prophet (stage2/prompt.py) sum it: up to the token `\n`, and the
latter to `<|endoftext|>` as well. Engine and servers give the same, whatever a server reports.
"""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_stub import Stub, answer
from test_pica import EXAMPLES, QUERIES
from test_shots import FakeEmbedder

from mmqa_jax.decoding.requests import Request, Result
from mmqa_jax.decoding.scheduler import Chunking, TokenizedRequest
from mmqa_jax.papers.pica import answer_pica
from mmqa_jax.prompting.backends import Completion, Decoding
from mmqa_jax.prompting.backends.http import OpenAIBackend, ServerConfig
from mmqa_jax.prompting.backends.openai_replies import read_candidates
from mmqa_jax.prompting.examples.library import Embedders, ExampleLibrary

END = "<|endoftext|>"
PIECES = [" Paris", " in", ".", "\n", "\n\n", ".\n", " é", "\u6211", "</", "Answer", ">", "", END]
ID = {piece: number for number, piece in enumerate(PIECES)}


class Pieces:
    """A tokenizer of whole pieces; the end token has no text."""

    def encode(self, text):
        raise NotImplementedError

    def decode(self, ids):
        return "".join(PIECES[number] for number in ids if PIECES[number] != END)


def generated(pieces, stops, limit=99):
    """The engine's candidate where the model gives these pieces, and the pieces it had until
    then."""
    request = Request("q", (0,), limit, stop=stops, logprobs=True)
    tokenized = TokenizedRequest(request, (0,), {}, Pieces(), frozenset((ID[END],)), Chunking((8,)))
    (sequence,) = tokenized.sequences
    for number, piece in enumerate(pieces):
        if sequence.append(ID[piece], -0.5 - number):
            break
    else:
        sequence.finish = "length"
    (candidate,) = tokenized.result().candidates
    return candidate, [PIECES[token] for token in candidate.tokens]


def legacy(pieces, values):
    return {"tokens": pieces, "token_logprobs": values}


def content(pieces, values):
    return {"content": [{"token": p, "logprob": v} for p, v in zip(pieces, values, strict=True)]}


def in_bytes(pieces, values):
    """The tokens' bytes count, not their texts (which cannot show half a character)."""
    rows = content(pieces, values)["content"]
    return {
        "content": [{**row, "token": "�", "bytes": list(row["token"].encode())} for row in rows]
    }


def escaped(pieces, values):
    tokens = ["bytes:" + "".join(rf"\x{b:02x}" for b in p.encode()) if p else p for p in pieces]
    return legacy(tokens, values)


FORMS = [legacy, content, in_bytes, escaped]


def served(candidate, pieces, values, form, stops, text=None):
    finish = "length" if candidate.finish == "length" else "stop"
    choice = {
        "text": candidate.text if text is None else text,
        "finish_reason": finish,
        "logprobs": form(pieces, values),
    }
    (read,) = read_candidates({"choices": [choice]}, True, stops=stops)
    return read


@pytest.mark.parametrize(
    ("pieces", "stops", "count"),
    [
        ([" Paris", "\n", " in"], ("\n",), 1),
        ([" Paris", END], ("\n",), 1),
        ([" Paris", " in", "\n\n"], ("\n",), 2),
        ([" Paris", ".\n"], ("\n",), 2),  # the full stop is in the answer
        ([" Paris", " é", "\u6211", END], (), 3),
        ([" Paris", "</", "Answer", ">"], ("</Answer>", "\n"), 1),
        ([" Paris", "</", "Answer", "\n"], ("</Answer>", "\n"), 3),
        (["\n"], ("\n",), 0),
        ([END], ("\n",), 0),
        ([" Paris", " in", "."], ("\n",), 3),  # by length: nothing follows the text
    ],
)
def test_what_stands_before_the_end_is_summed(pieces, stops, count):
    candidate, whole = generated(pieces, stops)
    values = [-0.5 - number for number in range(len(whole))]
    assert candidate.total == math.fsum(values[:count])
    assert candidate.logprobs == tuple(values)  # of all tokens
    for form in FORMS:
        full = served(candidate, whole, values, form, stops)
        cut = served(candidate, whole[:count], values[:count], form, stops)
        assert full.total == cut.total == candidate.total, form
        assert full.logprobs == tuple(values)
        assert full.text == candidate.text
    # With a text that the server did not cut, or whose spaces it took away.
    uncut = "".join(whole).removesuffix(END)
    assert served(candidate, whole, values, legacy, stops, uncut).text == candidate.text
    for text in (uncut, candidate.text.strip()):
        assert served(candidate, whole, values, legacy, stops, text).total == candidate.total


def test_an_end_token_of_another_name_or_none():
    candidate, whole = generated([" Paris", " in", END], ("\n",))
    for name in ("</s>", "<|im_end|>", ""):
        read = served(candidate, [*whole[:-1], name], [-1.0, -2.0, -4.0], legacy, ("\n",))
        assert read.total == -3.0
    # Tokens as the vocabulary spells them.
    spelled = ["ĠParis", "Ġin", "</s>"]
    assert served(candidate, spelled, [-1.0, -2.0, -4.0], legacy, ("\n",)).total == -3.0
    # Without tokens nothing tells an end token from others.
    choice = {"text": " Paris", "logprobs": {"token_logprobs": [-1.0, -2.0]}}
    (read,) = read_candidates({"choices": [choice]}, True, stops=("\n",))
    assert read.total == -3.0


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(PIECES[:4]), max_size=6),
    st.sampled_from(["\n", END]),
    st.sampled_from(FORMS),
)
def test_the_authors_sum(pieces, last, form):
    """The originals' loop, on one-character stops, beside both backends."""
    candidate, whole = generated([*pieces, last], ("\n",))
    values = [-0.25 * (number + 1) for number in range(len(whole))]
    kept = list(
        itertools.takewhile(
            lambda pair: pair[0] not in ("\n", END), zip(whole, values, strict=True)
        )
    )
    want = math.fsum(value for _, value in kept)
    assert served(candidate, whole, values, form, ("\n",)).total == want
    assert candidate.total == -math.fsum(0.5 + number for number in range(len(kept)))


def test_draws_are_ranked_by_their_texts():
    request = Request("q", (0,), 5, temperature=1.0, n=2, stop=("\n",))
    tokenized = TokenizedRequest(request, (0,), {}, Pieces(), frozenset(), Chunking((8,)))
    for sequence, (first, end) in zip(
        tokenized.sequences, [((" in", -1.0), -0.1), ((" Paris", -0.5), -3.0)], strict=True
    ):
        assert not sequence.append(ID[first[0]], first[1])
        assert sequence.append(ID["\n"], end)
    result = tokenized.result()
    assert isinstance(result, Result)
    assert [(c.text, c.total) for c in result.candidates] == [(" Paris", -0.5), (" in", -1.0)]


@pytest.mark.parametrize("reported", [True, False])
def test_pica_elects_the_same_whether_or_not_a_server_reports_the_stop(reported, tmp_path):
    def reply(body):
        own = [" sea", "\n"] if "ask 3 ?" in body["prompt"] else [" lake", "\n"]
        values = [-0.5, -2.0] if "ask 3 ?" in body["prompt"] else [-0.75, -0.01]
        shown = len(own) - (not reported)
        logprobs = legacy(own[:shown], values[:shown])
        return answer(
            {"choices": [{"text": own[0], "finish_reason": "stop", "logprobs": logprobs}]}
        )

    library = ExampleLibrary(EXAMPLES, Embedders(FakeEmbedder()), cache=tmp_path)
    with Stub(reply).serving():
        backend = OpenAIBackend("tiny", ServerConfig(retries=0))
        found = answer_pica(QUERIES, backend, library, shots=6, ensemble=2, similarity="question")
        (result,) = backend.answer(
            [Completion("a", "ask 3 ?", Decoding(stop=("\n",), logprobs=True))]
        )
    assert [prediction.answer for prediction in found] == ["sea"] * 3
    assert {one["logprob"] for p in found for one in p.trace["outputs"]} == {-0.5, -0.75}
    assert result.candidates[0].total == -0.5
