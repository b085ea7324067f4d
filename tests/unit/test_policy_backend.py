"""A policy's turns keep their tokens: prompts begin with them, and their bits are the trainer's."""

import dataclasses

import jax
import numpy as np
import pytest
from printable_llm import END, VOCABULARY, printable_llama, printable_tokenizer
from tiny_llm import SIZES, TEMPLATE

import mmqa_jax as mmqa
from mmqa_jax.core.mesh import EXACT_ON_CPU
from mmqa_jax.data.batches.texts import RowSize, packed_batch
from mmqa_jax.data.schema import Question
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import Scoring
from mmqa_jax.prompting.backends import Chat, Decoding, Message
from mmqa_jax.prompting.backends.policy import PolicyBackend, Transcript
from mmqa_jax.prompting.search_actions import SearchTexts
from mmqa_jax.prompting.search_loop import Budget, run_episodes
from mmqa_jax.prompting.text_tokenizer import ChatTemplate
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever
from mmqa_jax.tasks.policy import GrpoSection, PolicyObjective

# Compiled as for users: other programs have other bits.
pytestmark = [pytest.mark.slow, pytest.mark.optimized]

LENGTH, TURNS, NEW = 320, 3, 24
CONFIG = dataclasses.replace(SIZES, length=LENGTH)
STOP = "L"  # which the model often draws


@pytest.fixture(scope="module")
def corpus():
    return mmqa.open_corpus(["Wash the <|im_end|> filter.", "The pump is on the left."])


class Searching:
    """Searches whatever the model writes, and answers in the last turn."""

    decoding = Decoding(NEW, temperature=1.0, stop=(STOP,))

    def __init__(self, corpus):
        self.corpus, self._turns = corpus, {}

    def messages(self, episode):
        messages = [Message("user", (episode.question.question,))]
        for turn in episode.turns:
            back = turn.ranking and self.corpus.sources[self.corpus.row[turn.ranking.sources[0]]]
            messages.append(Message("assistant", (turn.text,)))
            messages += [Message("user", (back.text,))] if back else []
        return messages

    def query(self, episode, query_id):
        return Chat(query_id, tuple(self.messages(episode)), self.decoding)

    def read(self, text, *, stopped):
        return text + STOP * stopped, SearchTexts("the filter")


def ran(corpus, tokenizer, seed_of):
    """Ended episodes, their backend, and what its engine drew: query -> tokens."""
    made, drawn = [], {}

    def make_engine(model):
        made.append(Engine(model, tokenizer, end_ids=(END,), config=CONFIG))
        return made[0]

    class Watched(PolicyBackend):
        def answer(self, queries):
            for result in super().answer(queries):
                drawn[result.id] = result.candidates[0].tokens
                yield result

    backend = Watched(make_engine, tokenizer, length=LENGTH)
    backend.use(printable_llama(), seed_of)
    questions = [Question(f"q{n}", "", f"What of <|im_end|> {n}?") for n in range(6)]
    style, budget = Searching(corpus), Budget(turns=TURNS, text_searches=TURNS, top_k=1)
    episodes = run_episodes(questions, style, backend, BM25Retriever(corpus), budget, quiet=True)
    return episodes, backend, drawn


@pytest.fixture(scope="module")
def run(corpus):
    return ran(corpus, printable_tokenizer(), lambda name: int(name[0][1:]) * 10 + name[1])


def test_tokens_are_those_that_were_drawn(run, corpus):
    episodes, backend, drawn = run
    tokenizer, style, finishes = printable_tokenizer(), Searching(corpus), set()
    for episode in episodes:
        transcript = backend.transcripts[episode.question.id]
        turns = [drawn[episode.question.id, n] for n in range(TURNS)]
        assert [transcript.tokens[n] for n in transcript.drawn] == [t for x in turns for t in x]
        assert len(transcript.log_probs) == len(transcript.drawn)
        finishes |= {turn.text.endswith(STOP) for turn in episode.turns}
        # The conversation as the template writes it, up to the end of what was drawn last.
        before = dataclasses.replace(episode, turns=episode.turns[:-1])
        whole = ChatTemplate(TEMPLATE).render("", style.messages(before)) + episode.turns[-1].text
        assert tokenizer.decode(transcript.tokens).removesuffix("<|im_end|>") == whole
    assert finishes == {True, False}


def test_other_seeds_draw_other_turns(run, corpus):
    episodes, _, _ = run
    others, _, _ = ran(corpus, printable_tokenizer(), lambda name: 999 + int(name[0][1:]))
    assert all(a.turns[0].text != b.turns[0].text for a, b in zip(episodes, others, strict=True))


def test_log_probs_have_the_engines_bits(run):
    _, backend, _ = run
    for name, transcript in backend.transcripts.items():
        tokens, drawn = transcript.tokens, np.array(transcript.drawn)
        spans = np.split(drawn, np.flatnonzero(np.diff(drawn) > 1) + 1)
        assert len(spans) == TURNS
        scored = [
            score
            for span in spans
            for score in next(
                backend.engine.score(
                    [Scoring(name, tokens[: span[0]], [tokens[span[0] : span[-1] + 1]])]
                )
            )
            .scores[0]
            .logprobs
        ]
        assert scored == transcript.log_probs


def test_the_trainer_computes_the_same_bits(run):
    _, backend, _ = run
    transcripts = list(backend.transcripts.values())
    size = RowSize(LENGTH, TURNS * NEW)
    batch = packed_batch([[transcript.example()] for transcript in transcripts], size)
    model = printable_llama()
    assert model.config.vocab_size == VOCABULARY
    objective = PolicyObjective(model.config, None, GrpoSection(kl_weight=0.0), CONFIG)
    policy = jax.jit(objective.policy, compiler_options=EXACT_ON_CPU)
    computed = np.asarray(policy(model, batch))
    for row, transcript in zip(computed, transcripts, strict=True):
        assert row[: len(transcript.log_probs)].tolist() == transcript.log_probs


def test_a_template_that_changes_earlier_messages_ends_the_episode(corpus):
    strict = TEMPLATE.replace("message['content'] ", "message['content'] | trim | upper ")
    tokenizer = printable_tokenizer()
    tokenizer.template = ChatTemplate(strict).shielding(tokenizer.shield)
    episodes, _, _ = ran(corpus, tokenizer, lambda name: 3)
    assert all(len(episode.turns) < TURNS for episode in episodes)
    assert all("does not begin with the turns before it" in e.problem for e in episodes)


@pytest.mark.parametrize(
    ("closing", "prompt", "rest"),
    [
        (("</search>",), "Q: a</search> b", " b"),  # the stop string is among the tokens
        ((), "Q: a b", " b"),
        (("<|im_end|>",), "Q: a b", " b"),  # an end token that the next prompt lacks
        ((), "Q: x", None),
    ],
)
def test_what_follows_a_transcript(closing, prompt, rest):
    assert Transcript("Q: a", [1, 2], [1], [-0.5], closing).rest(prompt) == rest
