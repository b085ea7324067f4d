"""WebQA's fluency: BARTScore of an answer given each reference, relative to the reference's own.

BARTScore s(x -> y) is the mean log-probability of y's tokens, `<s>` and `</s>` among them, given x
(Yuan et al. 2021; neulab/BARTScore bart_score.py). The official script (WebQA_Baseline
vlp/eval_1022.py:30-34) scores with bart-large-cnn's architecture and BARTScore's ParaBank2
weights, `bart.pth`: only with them is a score named `official`. With bart-large-cnn's own weights
it is named `bart-large-cnn`, and without weights fluency is not scored.
"""

from __future__ import annotations

import string
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from mmqa_jax.core.errors import UserError, check_several
from mmqa_jax.core.files import read_text
from mmqa_jax.core.mesh import platform
from mmqa_jax.data.schema import Prediction, Question
from mmqa_jax.data.tokenizer_files import tokenizer_of
from mmqa_jax.evaluation.scores import (
    Scores,
    predictions_by_question,
    questions_that_count,
    scores_of,
)
from mmqa_jax.models.bart.network import Bart, BartConfig
from mmqa_jax.weights.published import load_published

PARABANK = "bart.pth"  # BARTScore's file of ParaBank2 weights
BartWeights = Literal["official", "bart-large-cnn"]  # ParaBank2's, or the folder's own
BUCKETS = (16, 32, 64, 128, 256, 512, 1024)  # tokens, of source and target alike
MAX_LENGTH = 1024  # of BARTScore

_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation))

Progress = Callable[[int, int], None]


class LikelihoodScorer(Protocol):
    """Scores targets by their mean token log-probability given sources."""

    def score(
        self, sources: Sequence[str], targets: Sequence[str], progress: Progress | None = None
    ) -> Float[np.ndarray, " pairs"]: ...


class BartScorer:
    """BARTScore: s(source -> target), in fixed shapes and batches.

    Each pair is padded to the smallest bucket that fits both texts, so each bucket is compiled
    only once. Longer texts are truncated to the largest bucket, as in BARTScore.

    Args:
      model: a BART.
      tokenizer: adds `<s>` and `</s>` and truncates but does not pad; see load_bart_tokenizer.
      buckets: sequence lengths; those beyond the model's positions are ignored.
      batch_tokens: tokens per batch, padding included; by default chosen for the device.
    """

    def __init__(
        self,
        model: Bart,
        tokenizer: Tokenizer,
        *,
        buckets: Sequence[int] = BUCKETS,
        batch_tokens: int | None = None,
    ):
        longest = longest_text(model.config)
        self.buckets = (*(size for size in sorted(buckets) if size < longest), longest)
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(longest)
        self._batch_tokens = batch_tokens or tokens_per_batch(platform())
        self._pad = model.config.pad
        graphdef, self._state = nnx.split(model)
        self._means = make_likelihoods(graphdef)

    def score(
        self, sources: Sequence[str], targets: Sequence[str], progress: Progress | None = None
    ) -> Float[np.ndarray, " pairs"]:
        """s(source -> target) of every pair, at most 0.

        `progress`: called with (done, total) pairs.
        """
        check_several(sources, "the fluency of answers")
        check_several(targets, "the fluency of answers")
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources and {len(targets)} targets")
        texts = list(dict.fromkeys((*sources, *targets)))
        encoded = self._tokenizer.encode_batch(texts)
        ids = {text: text_ids.ids for text, text_ids in zip(texts, encoded, strict=True)}
        lengths = [max(len(ids[s]), len(ids[t])) for s, t in zip(sources, targets, strict=True)]
        buckets = np.searchsorted(self.buckets, lengths)
        scores = np.empty(len(lengths))
        done = 0
        for bucket in np.unique(buckets):
            size = self.buckets[bucket]
            rows = np.flatnonzero(buckets == bucket)
            batch = max(1, self._batch_tokens // size)
            for start in range(0, len(rows), batch):
                chunk = rows[start : start + batch]
                filled = np.resize(chunk, batch)  # the last batch repeats rows
                inputs = (
                    *self._padded([ids[sources[row]] for row in filled], size),
                    *self._padded([ids[targets[row]] for row in filled], size),
                )
                means = self._means(self._state, *jax.device_put(inputs))
                scores[chunk] = np.asarray(means)[: len(chunk)]
                done += len(chunk)
                if progress is not None:
                    progress(done, len(scores))
        return scores

    def _padded(
        self, rows: Sequence[list[int]], size: int
    ) -> tuple[Int[np.ndarray, "B L"], Int[np.ndarray, " B"]]:
        padded = np.full((len(rows), size), self._pad, np.int32)
        for row, ids in zip(padded, rows, strict=True):
            row[: len(ids)] = ids
        return padded, np.array([len(ids) for ids in rows], np.int32)


def longest_text(config: BartConfig) -> int:
    """Tokens that a source or a target has at most, the largest bucket."""
    return min(MAX_LENGTH, config.positions)


def tokens_per_batch(kind: str) -> int:
    """Tokens of a batch on a platform, padding included.

    The float32 logits dominate memory: 4 bytes x 50,264 vocabulary entries x this.
    """
    return 2048 if kind == "cpu" else 16_384


def make_likelihoods(graphdef: nnx.GraphDef) -> Callable[..., jax.Array]:
    """A BART's jitted (state, sources, source_lengths, targets, target_lengths) -> scores [B].

    Sources and targets are int32 [B, L], their lengths int32 [B].
    """

    @jax.jit
    def means(state, sources, source_lengths, targets, target_lengths):
        model = nnx.merge(graphdef, state)
        columns = jnp.arange(sources.shape[1])  # [L]
        mask = columns < source_lengths[:, None]  # [B, L]
        with jax.default_matmul_precision("highest"):
            log_probs = model.log_probs(sources, mask, targets)  # [B, L]
        of_target = jnp.where(columns < target_lengths[:, None], log_probs, 0.0)
        return of_target.sum(axis=1) / target_lengths  # [B]

    return means


class LoadedBart(NamedTuple):
    """BARTScore, the path of its weights, and the variant that names its scores."""

    scorer: BartScorer
    path: Path
    weights: BartWeights


def load_bart_scorer(folder: Path, **options) -> LoadedBart:
    """Opens BARTScore with the options of BartScorer.

    The folder has bart-large-cnn's config.json and tokenizer (tokenizer.json, or vocab.json and
    merges.txt), and BARTScore's bart.pth; without that file its own weights are used.
    """
    if not folder.is_dir():
        raise UserError(
            f"--bart={folder}: no such folder; give a folder of bart-large-cnn that contains "
            f"BARTScore's {PARABANK}."
        )
    tokenizer = load_bart_tokenizer(folder)
    finetuned = folder / PARABANK
    is_original = not finetuned.exists()
    model = load_published("bart", folder) if is_original else _load_parabank(finetuned)
    if tokenizer.get_vocab_size() > model.config.vocab_size:
        raise UserError(
            f"{folder}: its tokenizer has {tokenizer.get_vocab_size()} tokens, its model "
            f"{model.config.vocab_size}; give the tokenizer and the model of the same checkpoint."
        )
    scorer = BartScorer(model, tokenizer, **options)
    if is_original:
        return LoadedBart(scorer, folder, "bart-large-cnn")
    return LoadedBart(scorer, finetuned, "official")


def _load_parabank(path: Path) -> Bart:
    """BARTScore's fine-tuned weights; UserError where they are another model's."""
    try:
        return load_published("bart", path)
    except UserError as error:
        reason = textwrap.shorten(str(error).removeprefix(f"{path}: "), 200, placeholder=" ...")
        raise UserError(
            f"{path}: is not BARTScore's ParaBank2 weights of the model in {path.parent} "
            f"({reason.rstrip('.')}); download it again, or remove it to score with the folder's "
            "own weights."
        ) from error


def load_bart_tokenizer(folder: Path) -> Tokenizer:
    """BART's byte-level BPE: tokenizer.json, or vocab.json and merges.txt."""
    combined, vocab, merges = (folder / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    try:
        if combined.exists():
            tokenizer = tokenizer_of(read_text(combined), str(combined))
        elif vocab.exists() and merges.exists():
            tokenizer = _byte_level(vocab, merges)
        else:
            raise UserError(
                f"{folder}: holds neither tokenizer.json nor vocab.json with merges.txt; download "
                "them from facebook/bart-large-cnn."
            )
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exception for every error
        raise UserError(
            f"{folder}: its tokenizer cannot be read ({error}); download it again."
        ) from error
    if tokenizer.encode("").tokens != ["<s>", "</s>"]:
        raise UserError(f"{folder}: its tokenizer does not wrap texts in <s> and </s>; use BART's.")
    return tokenizer


def _byte_level(vocab: Path, merges: Path) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    sep, cls = ((token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>"))
    tokenizer.post_processor = processors.RobertaProcessing(sep, cls, add_prefix_space=False)
    return tokenizer


def plain(text: str) -> str:
    """A text as the official script passes it to BART: no ASCII punctuation, single spaces."""
    return " ".join(text.translate(_PUNCTUATION).split())


def score_fluency(
    questions: Sequence[Question],
    predictions: Sequence[Prediction],
    scorer: LikelihoodScorer,
    *,
    weights: BartWeights = "official",
    progress: Progress | None = None,
) -> Scores:
    """Fluency of the answers: `webqa_fl/official` and `webqa_fl/paper_eq1`.

    `official`: min(1, max over references r of exp(s(r -> c)) / exp(s(r -> r))), as in the official
    script. `paper_eq1`: the paper's equation 1 taken literally, max over r of min(1, s(r -> c) /
    s(r -> r)) with the log-probabilities themselves. Both are negative, so an answer less likely
    than its reference scores 1; it is uninformative and given only for comparison. With other
    weights than the official script's (`load_bart_scorer` tells which), the names say so:
    `webqa_fl/bart-large-cnn` and `webqa_fl/paper_eq1_bart-large-cnn`.

    Questions without a reference answer are left out and counted; missing predictions score 0 and
    are counted.
    """
    by_question = predictions_by_question(questions, predictions)
    what = "a reference answer to measure fluency against"
    scored = questions_that_count(questions, lambda question: bool(question.answers), what)
    answered = [question for question in scored if question.id in by_question]
    pairs: dict[tuple[str, str], int] = {}  # (source, target) -> row, each once
    for question in answered:
        answer = plain(by_question[question.id].answer)
        for reference in map(plain, question.answers):
            pairs.setdefault((reference, reference), len(pairs))
            pairs.setdefault((reference, answer), len(pairs))
    likelihood = scorer.score([s for s, _ in pairs], [t for _, t in pairs], progress)  # [pairs]
    ratios, literals = {}, {}  # question id -> score
    for question in answered:
        answer = plain(by_question[question.id].answer)
        references = [plain(reference) for reference in question.answers]
        of_answer = np.array([likelihood[pairs[r, answer]] for r in references])  # [references]
        of_reference = np.array([likelihood[pairs[r, r]] for r in references])
        ratio = np.exp(of_answer) / np.exp(of_reference)
        ratios[question.id] = min(1.0, ratio.max())
        # The log-probability is 0 where the model is fully certain.
        literal = of_answer / np.minimum(of_reference, -np.finfo(float).tiny)
        literals[question.id] = np.minimum(1.0, literal).max()
    literal_name = "paper_eq1" if weights == "official" else f"paper_eq1_{weights}"
    values = {f"webqa_fl/{weights}": ratios, f"webqa_fl/{literal_name}": literals}
    per_question = {
        metric: np.array([by_id.get(q.id, 0.0) for q in scored]) for metric, by_id in values.items()
    }
    return scores_of(questions, scored, by_question, per_question)


def fluency_times_accuracy(
    fluency: Scores, accuracy: Scores, weights: BartWeights = "official"
) -> Scores | None:
    """FL * Acc of every question that has both, per variant of the accuracy.

    `webqa_fl_acc/official` is the leaderboard's QA score: the mean of products, not the product of
    means. With other `weights` of the fluency the official accuracy gives
    `webqa_fl_acc/bart-large-cnn`, another one such as no_lemma
    `webqa_fl_acc/bart-large-cnn_no_lemma`. None if no question has both.
    """
    values_of = fluency.per_question[f"webqa_fl/{weights}"]
    fluent = dict(zip(fluency.question_ids, values_of, strict=True))
    rows = [row for row, name in enumerate(accuracy.question_ids) if name in fluent]
    if not rows:
        return None
    shared = tuple(accuracy.question_ids[row] for row in rows)
    factor = np.array([fluent[question_id] for question_id in shared])
    products = {}
    for metric, values in accuracy.per_question.items():
        scorer, _, variant = metric.partition("/")
        if scorer == "webqa_acc":
            deviations = [part for part in (weights, variant) if part != "official"]
            name = "_".join(deviations) or "official"
            products[f"webqa_fl_acc/{name}"] = factor * values[rows]
    return Scores(
        question_ids=shared,
        categories=tuple(accuracy.categories[row] for row in rows),
        per_question=products,
        missing=accuracy.missing,
        unscored=accuracy.unscored + accuracy.n - len(rows),
    )
