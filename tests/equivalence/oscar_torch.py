"""Oscar in plain torch, stated anew from the published layers, for test_oscar*.py.

microsoft/Oscar oscar/modeling/modeling_bert.py and modeling_utils.py, run_captioning.py. The
text embeddings and the layers are transformers' BertModel's, which are the same; names of
parameters are those of the published `pytorch_model.bin`.
"""

import numpy as np
import torch
import transformers
from torch import nn

CLS, SEP, PAD, MASK = 1, 2, 0, 3


class TorchOscar(nn.Module):
    def __init__(
        self, config: transformers.BertConfig, regions: int, norm: bool, region_eps: float
    ):
        super().__init__()
        size = config.hidden_size
        self.bert = transformers.BertModel(config)
        self.bert.img_embedding = nn.Linear(regions, size)
        if norm:
            self.bert.LayerNorm = nn.LayerNorm(size, eps=region_eps)
        self.cls = nn.Module()
        self.cls.predictions = head = nn.Module()
        head.bias = nn.Parameter(torch.zeros(config.vocab_size))
        head.transform = nn.Module()
        head.transform.dense = nn.Linear(size, size)
        head.transform.LayerNorm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        head.decoder = nn.Linear(size, config.vocab_size, bias=False)
        head.decoder.weight = self.bert.embeddings.word_embeddings.weight

    def embed(self, ids, types, positions, features):
        text = self.bert.embeddings(ids, types, positions)
        regions = self.bert.img_embedding(features)
        if hasattr(self.bert, "LayerNorm"):
            regions = self.bert.LayerNorm(regions)
        return torch.cat([text, regions], dim=1)

    def layers(self, x, mask):
        """Output of every layer; mask (B, L, L) or (B, L), 1 = seen."""
        mask = mask[:, None, None, :] if mask.ndim == 2 else mask[:, None]
        additive = (1.0 - mask.to(x.dtype)) * -10000.0
        outputs = []
        for layer in self.bert.encoder.layer:
            y = layer(x, additive)
            x = y[0] if isinstance(y, tuple) else y
            outputs.append(x)
        return outputs

    def words(self, hidden):
        head = self.cls.predictions
        x = head.transform.dense(hidden)
        x = head.transform.LayerNorm(x * 0.5 * (1.0 + torch.erf(x / 2.0**0.5)))
        return head.decoder(x) + head.bias

    def forward(self, ids, types, positions, features, mask):
        return self.layers(self.embed(ids, types, positions, features), mask)[-1]


class Tensorizer:
    """CaptionTensorizer: input ids, segments and mask of one picture's caption and labels."""

    def __init__(self, caption: int, text: int, regions: int):
        self.caption, self.text, self.regions = caption, text, regions

    def __call__(self, caption: list[int], labels: list[int], features: np.ndarray):
        tokens = [CLS, *caption[: self.caption - 2], SEP]
        a = len(tokens)
        segments = [0] * a
        if labels:
            tokens += [PAD] * (self.caption - a)
            segments += [0] * (self.caption - a)
            kept = labels[: self.text - len(tokens) - 1]
            tokens += [*kept, SEP]
            segments += [1] * (len(kept) + 1)
        end = len(tokens)
        tokens += [PAD] * (self.text - end)
        segments += [0] * (self.text - end)
        count = min(len(features), self.regions)
        padded = np.zeros((self.regions, features.shape[1]), np.float32)
        padded[:count] = features[:count]
        mask = np.zeros((self.text + self.regions,) * 2, np.int64)
        c, l, r = slice(0, a), slice(self.caption, end), slice(self.text, self.text + count)  # noqa: E741
        mask[c, c] = np.tril(np.ones((a, a)))
        for rows, columns in ((l, l), (r, r), (c, l), (c, r), (l, r), (r, l)):
            mask[rows, columns] = 1
        return np.array(tokens), np.array(segments), padded, mask


class TorchCaptioner:
    """generate() for one picture, every caption encoded from scratch at every step."""

    def __init__(self, model: TorchOscar, caption: int, most: int, text: int, regions: int):
        self.model, self.most, self.start = model, most, max(caption, most)
        self.tensorizer = Tensorizer(most, most + text - caption, regions)

    @torch.no_grad()
    def next_words(self, written: list[list[int]], labels: list[int], features: np.ndarray):
        """log p of the word after each beam's [CLS] w1 .. wt (prepare_inputs_for_generation)."""
        tokens, segments, padded, mask = self.tensorizer([MASK] * self.most, labels, features)
        now = len(written[0]) + 1  # with [MASK]
        keep = np.r_[0:now, self.most : len(tokens)]
        with_regions = np.r_[keep, len(tokens) : len(mask)]
        positions = np.r_[0 : self.most, self.start : self.start + len(tokens) - self.most]
        ids = np.array([[*words, MASK, *tokens[self.most :]] for words in written])
        beams = len(written)
        repeat = lambda x: torch.tensor(np.repeat(x[None], beams, axis=0))  # noqa: E731
        hidden = self.model(
            torch.tensor(ids),
            repeat(segments[keep]),
            repeat(positions[keep]),
            repeat(padded),
            repeat(mask[np.ix_(with_regions, with_regions)]),
        )
        return self.model.words(hidden[:, now - 1]).log_softmax(-1).double().numpy()

    def greedy(self, labels, features):
        """_generate_no_beam_search -> (tokens without [CLS], score)."""
        words, total = [CLS], 0.0
        while len(words) < self.most:
            log_probs = self.next_words([words], labels, features)[0]
            word = int(log_probs.argmax())
            total += log_probs[word]
            words.append(word)
            if word in (SEP, PAD):
                break
        count = len(words) - 1
        return [*words[1:-1], SEP], total / count

    def beam_search(self, labels, features, beams, keep, length_penalty=1.0):
        """_generate_beam_search with BeamHypotheses -> [(tokens without [CLS], score)]."""
        found, worst = [], 1e9  # (score, words)
        living = [(0.0, [CLS])] + [(-1e9, [CLS])] * (beams - 1)
        longest = self.most - 1
        for now in range(1, self.most):
            log_probs = self.next_words([words for _, words in living], labels, features)
            totals = (log_probs + np.array([score for score, _ in living])[:, None]).reshape(-1)
            order = np.argsort(-totals, kind="stable")[: 2 * beams]
            if len(found) >= keep and worst >= totals[order].max() / longest**length_penalty:
                break
            going = []
            for choice in order:
                parent, word = divmod(int(choice), log_probs.shape[1])
                if word in (SEP, PAD) or now + 1 == self.most:
                    score = totals[choice] / now**length_penalty
                    if len(found) < keep or score > worst:
                        found.append((score, living[parent][1][1:now]))
                        if len(found) > keep:
                            found.remove(min(found, key=lambda f: f[0]))
                            worst = min(score for score, _ in found)
                        else:
                            worst = min(score, worst)
                else:
                    going.append((totals[choice], [*living[parent][1], word]))
                if len(going) == beams:
                    break
            if now + 1 == self.most:
                break
            assert len(going) == beams  # so does the original
            living = going
        found.sort(key=lambda f: -f[0])
        return [([*words, SEP], score) for score, words in found]
