"""Beam bookkeeping on a toy model whose next token depends on the sequence so far."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mmqa_jax.decoding import beam

pytestmark = pytest.mark.slow

END = 2


def toy_log_probs(tokens: tuple[int, ...], question: int, vocab: int) -> np.ndarray:
    seed = np.random.SeedSequence([question, *tokens, 99])
    logits = 2.0 * np.random.default_rng(seed).normal(size=vocab)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def published_search(question, vocab, beams, steps, length_penalty):
    """BertForWebqaDecoder.beam_search written out with lists: frames, back pointers, traces."""
    chosen, scores, parents = [], [], []
    sequences = [()]
    for _ in range(steps):
        proposals = []
        for k, sequence in enumerate(sequences):
            log_probs = toy_log_probs(sequence, question, vocab)
            base = scores[-1][k] if scores else 0.0
            if chosen and chosen[-1][k] == END:
                base -= 10000.0
            for w in np.argsort(-log_probs, kind="stable")[:beams]:
                proposals.append((base + float(log_probs[w]), k, int(w)))
        proposals.sort(key=lambda p: -p[0])
        frame = proposals[:beams]
        scores.append([p[0] for p in frame])
        parents.append([p[1] for p in frame])
        chosen.append([p[2] for p in frame])
        sequences = [(*sequences[p[1]], p[2]) for p in frame]
    last = next((i for i, ws in enumerate(chosen) if all(w == END for w in ws)), steps - 1)
    found = {}
    for frame in range(last + 1):
        for slot, token in enumerate(chosen[frame]):
            if (token == END or frame == last) and slot not in found:
                found[slot] = (scores[frame][slot] + length_penalty * (frame + 1), frame)
    results = []
    for slot, (score, frame) in sorted(found.items(), key=lambda item: -item[1][0]):
        sequence, position = [], slot
        for f in range(frame, -1, -1):
            sequence.append(chosen[f][position])
            position = parents[f][position]
        results.append((score, sequence[::-1]))
    return results


complete = jax.jit(beam.complete, static_argnames=("only_best", "length_penalty"))
advance = jax.jit(beam.advance, static_argnames=("end_id", "length_penalty"))
ranked = jax.jit(beam.ranked)
forbid_repeats = jax.jit(beam.forbid_repeats, static_argnames="ngram")
start = jax.jit(beam.start, static_argnums=(0, 1, 2))


def our_search(questions, vocab, beams, steps, length_penalty, only_best=False):
    state = start(questions, beams, steps)
    used = 0
    while used < steps and not np.all(
        complete(state, only_best=only_best, length_penalty=length_penalty)
    ):
        log_probs = np.concatenate(
            [
                [toy_log_probs(tuple(np.asarray(s[:used]).tolist()), q, vocab) for s in row]
                for q, row in enumerate(np.asarray(state.tokens))
            ]
        )
        before = np.asarray(state.tokens)
        state, parents = advance(state, log_probs, end_id=END, length_penalty=length_penalty)
        kept = np.take_along_axis(before, np.asarray(parents)[:, :, None], axis=1)
        np.testing.assert_array_equal(kept[..., :used], np.asarray(state.tokens)[..., :used])
        used += 1
    return jax.device_get(ranked(state)), used


@pytest.mark.parametrize(
    ("vocab", "beams", "steps", "penalty"),
    [(7, 1, 6, 0.0), (7, 3, 6, 0.0), (5, 5, 8, 0.0), (9, 4, 5, 0.7), (6, 3, 7, -0.4)],
)
def test_equals_the_published_algorithm(vocab, beams, steps, penalty):
    questions = 7
    result, _ = our_search(questions, vocab, beams, steps, penalty)
    for q in range(questions):
        expected = published_search(q, vocab, beams, steps, penalty)
        assert len(expected) == beams
        for k, (score, sequence) in enumerate(expected):
            length = int(result.lengths[q, k])
            assert result.tokens[q, k, :length].tolist() == sequence
            assert not np.any(result.tokens[q, k, length:])
            np.testing.assert_allclose(result.scores[q, k], score, rtol=1e-6, atol=2e-3)


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_only_best_stops_earlier_with_the_same_best_answer(penalty):
    whole, steps_whole = our_search(7, 5, 3, 12, penalty)
    best, steps_best = our_search(7, 5, 3, 12, penalty, only_best=True)
    np.testing.assert_array_equal(whole.tokens[:, 0], best.tokens[:, 0])
    np.testing.assert_array_equal(whole.scores[:, 0], best.scores[:, 0])
    assert steps_best <= steps_whole
    if penalty == 0.0:
        assert steps_best < steps_whole


def test_first_step_takes_different_words_and_ended_beams_give_way():
    state = start(1, 2, 4)
    log_probs = np.log([[0.1, 0.2, 0.6, 0.1]] * 2).astype(np.float32)
    state, _ = advance(state, log_probs, end_id=END)
    assert np.asarray(state.tokens)[0, :, 0].tolist() == [2, 1]
    state, parents = advance(state, log_probs, end_id=END)
    assert parents.tolist() == [[1, 1]]  # beam 0 ended: both beams continue beam 1
    np.testing.assert_allclose(np.asarray(state.final_scores)[0, 0], np.log(0.6), rtol=1e-6)


def test_no_ngram_is_completed_a_second_time():
    """Against the rule written out with lists, for all lengths of what is generated."""
    rng, ngram = np.random.default_rng(3), 3
    tokens = rng.integers(0, 3, (4, 2, 9))
    for step in range(10):
        changed = forbid_repeats(jnp.zeros((8, 3)), tokens, step, ngram).reshape(4, 2, 3)
        for row in np.ndindex(4, 2):
            written = tokens[row][:step].tolist()
            begun = {tuple(written[i : i + ngram]) for i in range(step - ngram + 1)}
            tail = tuple(written[step - ngram + 1 :]) if step >= ngram - 1 else None
            forbidden = [tail is not None and (*tail, token) in begun for token in range(3)]
            np.testing.assert_array_equal(np.asarray(changed[row]) < -5e3, forbidden)
