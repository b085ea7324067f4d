"""VLP's beam search against BertForWebqaDecoder.beam_search, restated over the torch model."""

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from vlp_pair import Pair, batch, loop_mask, make_pair
from vlp_torch import TorchVLP

from mmqa_jax.decoding.masked_lm import beam_search
from mmqa_jax.models.vlp.network import VLPInputs

MASK, SEP, TYPE, STEPS = 4, 3, 5, 8
ENDED = FORBIDDEN = -10000.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    def end_some(theirs: TorchVLP) -> None:
        theirs.cls["predictions"].bias[SEP] += 2.2  # some answers end early, some late, some never

    return make_pair("x101", tmp_path_factory.mktemp("x101"), end_some)


def to_decode(pair: Pair, regions: int) -> dict[str, np.ndarray]:
    """[CLS] regions, source [SEP] question, padded on the right as the original pads it."""
    x = batch(pair.config, regions, rows=5)
    columns = np.arange(x["input_ids"].shape[1])
    real = columns <= np.max(columns * x["context_mask"], axis=1, keepdims=True)
    x["input_ids"] = np.where(real, x["input_ids"], 0)
    x["position_ids"] = np.where(real, x["position_ids"], 0)
    x["token_type_ids"] = np.where(real, x["token_type_ids"], TYPE)
    x["answer_mask"] = np.zeros_like(real)
    return x


def log_probs_at_mask(theirs: TorchVLP, x: dict, written: torch.Tensor) -> torch.Tensor:
    """[B, K, T] words written after the padding, then [MASK] -> log-probabilities there [B, K, V].

    The original keeps every layer's states of all but the [MASK]; here each step encodes all anew.
    """
    beams, count = written.shape[1], written.shape[2] + 1
    each = {name: torch.tensor(array).repeat_interleave(beams, 0) for name, array in x.items()}
    rows = len(each["input_ids"])
    new = torch.cat([written.reshape(rows, -1), torch.full((rows, 1), MASK)], dim=1)
    start = each["position_ids"].amax(1, keepdim=True) + 1  # right after the question
    added = {
        "input_ids": new,
        "token_type_ids": torch.full_like(new, TYPE),
        "position_ids": start + torch.arange(count),
        "context_mask": torch.zeros_like(new, dtype=torch.bool),
        "answer_mask": torch.ones_like(new, dtype=torch.bool),
    }
    whole = each | {name: torch.cat([each[name], more], dim=1) for name, more in added.items()}
    mask = loop_mask({name: tensor.numpy() for name, tensor in whole.items()})
    hidden = theirs(whole, torch.tensor(mask))[-1]
    return theirs.words(hidden[:, -1]).log_softmax(-1).unflatten(0, (-1, beams))


def repeats(words: list[int], ngram: int) -> set[int]:
    """Words that would complete an n-gram of `words` a second time."""
    if len(words) < ngram:
        return set()
    tail = words[len(words) - ngram + 1 :]
    starts = range(len(words) - ngram + 1)
    return {words[i + ngram - 1] for i in starts if words[i : i + ngram - 1] == tail}


@torch.no_grad()
def original_search(
    theirs: TorchVLP, x: dict, beams: int, penalty: float, ngram: int
) -> list[dict[float, list[int]]]:
    """modeling.py l.1344-1615: of every question, sequence by score, the best first."""
    rows = len(x["input_ids"])
    written = torch.zeros(rows, 1, 0, dtype=torch.long)
    scores, ids, parents = [], [], []  # a step's each, [B, K]
    for step in range(STEPS):
        log_probs = log_probs_at_mask(theirs, x, written)  # [B, K, V], K = 1 in the first step
        if ngram:
            for b, question in enumerate(written.tolist()):
                for k, words in enumerate(question):
                    log_probs[b, k, sorted(repeats(words, ngram))] += FORBIDDEN
        best, proposed = log_probs.topk(beams)  # [B, K, K]
        if step:
            best = best + (scores[-1] + ENDED * (ids[-1] == SEP))[:, :, None]
        total, choice = best.flatten(1).topk(beams)
        scores.append(total)
        parents.append(choice // beams if step else torch.zeros_like(choice))
        ids.append(proposed.flatten(1).gather(1, choice))
        kept = written.gather(1, parents[-1][:, :, None].expand(-1, -1, step))
        written = torch.cat([kept, ids[-1][:, :, None]], dim=2)

    found = []
    for b in range(rows):
        frames = [step[b].tolist() for step in ids]
        last = next((n for n, frame in enumerate(frames) if set(frame) == {SEP}), STEPS - 1)
        places: dict[float, tuple[int, int]] = {}
        used = set()
        for frame in range(last + 1):
            for k in range(beams):
                if k not in used and (frames[frame][k] == SEP or frame == last):
                    used.add(k)
                    places[scores[frame][b, k].item() + penalty * (frame + 1)] = (frame, k)
        sequences = {}
        for score in sorted(places, reverse=True):
            frame, k = places[score]
            words = []
            for step in range(frame, -1, -1):
                words.append(frames[step][k])
                k = parents[step][b, k]
            sequences[score] = words[::-1]
        found.append(sequences)
    return found


@pytest.mark.parametrize(
    ("regions", "beams", "penalty", "ngram"), [(0, 5, 0.0, 0), (5, 3, 0.4, 0), (5, 4, 0.0, 2)]
)
def test_answers_and_scores_are_the_originals(pair, regions, beams, penalty, ngram):
    x = to_decode(pair, regions)
    wanted = original_search(pair.theirs, x, beams, penalty, ngram)
    result = beam_search(
        *nnx.split(pair.ours),
        VLPInputs(**x),
        mask_id=MASK,
        sep_id=SEP,
        num_beams=beams,
        max_new_tokens=STEPS,
        token_type=TYPE,
        length_penalty=penalty,
        no_repeat_ngram=ngram,
    )
    result = jax.device_get(result)
    for b, sequences in enumerate(wanted):
        assert len(sequences) == beams  # no two scores are equal
        for k, (score, words) in enumerate(sequences.items()):
            got = result.tokens[b, k, : result.lengths[b, k]].tolist()
            assert got == words, (b, k)
            np.testing.assert_allclose(result.scores[b, k], score, rtol=1e-6, atol=1e-4)
    lengths = {len(words) for sequences in wanted for words in sequences.values()}
    assert len(lengths) > 2
    if ngram:
        free = original_search(pair.theirs, x, beams, penalty, 0)
        assert [list(s.values()) for s in free] != [list(s.values()) for s in wanted]
