"""A searcher that learns by reward (ours): GRPO and its relatives on Search-R1's episodes.

For every question the policy searches and answers several times over an index in the same process
(papers/search_r1.py); what an answer earns is the section `reward` (search_rewards.py), how it is
learned the section `grpo` (tasks/policy.py). An episode is a row: what the policy wrote is learned,
prompts and what came back are not. Every batch of episodes is kept in the run's folder `rollouts`.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from mmqa_jax.core.errors import RunError, UserError
from mmqa_jax.core.files import write_jsonl
from mmqa_jax.core.hosts.distributed import gather
from mmqa_jax.core.mesh import make_mesh
from mmqa_jax.core.typed import at_least
from mmqa_jax.data.batches.texts import RowSize, TokenExample
from mmqa_jax.data.corpus import Corpus, evenly
from mmqa_jax.data.schema import Modality, Question, Ranking
from mmqa_jax.decoding.engine import Engine
from mmqa_jax.decoding.requests import TooLong, Unanswerable
from mmqa_jax.decoding.slot_runner import EngineConfig
from mmqa_jax.extensions.search_rewards import METRICS, RewardSection
from mmqa_jax.extensions.tool_search import STOP as TOOL_STOP
from mmqa_jax.extensions.tool_search import ToolStyle
from mmqa_jax.models.llama.config import LlamaConfig
from mmqa_jax.models.llama.lora import language_model
from mmqa_jax.models.llama.network import Llama
from mmqa_jax.models.llava.config import PictureConfig
from mmqa_jax.papers.search_r1 import ResultsBy, SearchR1Style
from mmqa_jax.prompting.backends import Decoding
from mmqa_jax.prompting.backends.policy import PolicyBackend, Transcript
from mmqa_jax.prompting.search_loop import Budget, Episode, run_episodes
from mmqa_jax.prompting.text_tokenizer import TextTokenizer
from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever
from mmqa_jax.retrieval.modality import of_modality
from mmqa_jax.retrieval.rankings import Retriever, ranking_of, ranking_row
from mmqa_jax.tasks.base_llm import TextModelTask, check_rows, model_config
from mmqa_jax.tasks.language_model import LanguageModelSection
from mmqa_jax.tasks.policy import (
    Answer,
    Arrays,
    Group,
    GrpoSection,
    LogProbs,
    PolicyBatches,
    PolicyObjective,
    PolicyRows,
    batch_shapes,
    check_groups,
    engine_mesh,
    make_log_probs,
    seeing,
    served_copy,
)
from mmqa_jax.tasks.task import ANY_VOCABULARY, Recipe

_MOST_FAILED = 0.1  # of a batch's rewards, above which the run ends
_STOP = ("</search>", "</answer>")
NO_TRANSCRIPT = Transcript("", [0], [], [])
Rewarded = list[tuple[Episode, dict[str, float]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchedData:
    """The section `data`: questions with answers of a prepared corpus, which is searched.

    Attributes:
      dir: folder of `mmqa prepare`.
      split: of the questions.
      modality: only questions that need sources of this one; None: all.
      model, index: an encoder and the folder of its `mmqa index`; "": BM25 searches.
    """

    dir: str
    split: str = "train"
    modality: Modality | None = None
    model: str = ""
    index: str = ""

    def retriever(self, corpus: Corpus) -> Retriever:
        """Opens what the policy searches with."""
        if not self.model:
            return BM25Retriever(corpus)
        from mmqa_jax.retrieval.embeddings import open_embeddings
        from mmqa_jax.retrieval.indexes.index import load_index
        from mmqa_jax.retrieval.late_interaction import dense_retriever
        from mmqa_jax.tasks.embedder import open_embedder

        embedder, pictures = open_embedder(Path(self.model), corpus)
        folder, of_model = Path(self.index), embedder.fingerprint
        embeddings = open_embeddings(folder / "embeddings", of_model, corpus.fingerprint)
        index = load_index(folder / "index", embeddings, of_model)
        return dense_retriever(corpus, embedder, index, pictures)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeSection:
    """The section `episodes`; see papers/search_r1.py:answer_search_r1.

    Attributes:
      turns: that the policy writes; the last one cannot search.
      top_k: sources of a search.
      new_tokens: of a turn.
      template: how actions are written: Search-R1's tags, or calls of tools (tool_search.py).
      results_by: whether results continue the model's message or are the user's, as tools' are.
      pages, picture_searches, zooms: that tools may ask for; the latter two of a model that sees.
      tokens: of all turns; 0: as many as each one's new_tokens.
      slots: episodes that are drawn at once.
      dir: where every batch is kept; "": the run's folder `rollouts`.
    """

    turns: int = at_least(1, 3)
    top_k: int = at_least(1, 3)
    new_tokens: int = at_least(1, 80)
    template: Literal["search_r1", "tools"] = "search_r1"
    results_by: ResultsBy = "message"
    pages: int = at_least(0, 0)
    picture_searches: int = at_least(0, 0)
    zooms: int = at_least(0, 0)
    tokens: int = at_least(0, 0)
    slots: int = at_least(2, 16)
    dir: str = ""

    @property
    def budget(self) -> Budget:
        """The most that the policy may do for a question."""
        names = ("turns", "picture_searches", "pages", "zooms", "top_k", "tokens")
        limits = {name: getattr(self, name) for name in names}
        return Budget(text_searches=self.turns, **limits)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidateSearches:
    """The section `validate`: what the policy's likeliest episodes earn.

    Attributes:
      split: of the questions.
      questions: how many of it, evenly; 0: all.
      metric: decides on the best step; None: none is chosen.
    """

    split: str = "val"
    questions: int = at_least(0, 0)
    metric: str | None = None

    def __post_init__(self):
        if self.metric not in (None, "reward", *METRICS):
            raise UserError(
                f"config key validate.metric={self.metric}: reward, {', '.join(METRICS)} or None "
                "was expected; change it."
            )


class SharedSearch:
    """Searches for a part of the questions on each process of a launch; all get all rankings, or
    the same error."""

    def __init__(self, retriever: Retriever):
        self._retriever = retriever

    def search(self, questions: Sequence[Question], top_k: int) -> list[Ranking]:
        """Searches as the retriever, whose rankings no other question changes."""
        count, mine = jax.process_count(), questions[jax.process_index() :: jax.process_count()]
        try:
            found = list(map(ranking_row, self._retriever.search(mine, top_k) if mine else ()))
        except Exception as error:
            found = f"{error!r:.500}"
        parts = gather("searches", found)
        if problem := next((part for part in parts if isinstance(part, str)), ""):
            raise RuntimeError(problem)
        places = (divmod(number, count) for number in range(len(questions)))
        return [ranking_of(parts[process][place]) for place, process in places]


class Searches:
    """Lets a policy search and answer.

    Args:
      corpus: that is searched.
      retriever: over it.
      tokenizer: of the policy.
      options: see EpisodeSection.
      engine: sizes of the policy's engine.
      mesh: of the training run.
      pictures: the config of a model that sees; None: it reads texts alone.
      most_pictures: that an episode may show.
    """

    def __init__(
        self,
        corpus: Corpus,
        retriever: Retriever,
        tokenizer: TextTokenizer,
        options: EpisodeSection,
        engine: EngineConfig,
        mesh: Mesh | None,
        pictures: PictureConfig | None = None,
        most_pictures: int = 0,
    ):
        self._corpus, self._options = corpus, options
        self._retriever = retriever if jax.process_count() == 1 else SharedSearch(retriever)
        self._mesh = mesh
        self._model: nnx.Module  # of `use`

        def make_engine(llama: Llama) -> Engine:
            ends = tokenizer.end_ids
            model = llama if pictures is None else seeing(self._model, llama)
            return Engine(model, tokenizer, end_ids=ends, config=engine, mesh=mesh)

        self.backend = PolicyBackend(
            make_engine,
            tokenizer,
            length=engine.length,
            pictures=pictures,
            most_pictures=most_pictures,
        )

    def use(self, model: nnx.Module, seed_of: Callable[[Hashable], int] = lambda _: 0) -> None:
        """Takes the model that the next episodes are drawn from; its arrays are not kept.

        Args:
          seed_of: (question's id, turn) -> the seed of its draw.
        """
        self._model = model
        self.backend.use(served_copy(language_model(model), self._mesh), seed_of)

    def style(self, temperature: float) -> SearchR1Style | ToolStyle:
        """The prompts, drawn at a temperature; 0: the likeliest tokens."""
        options, backend = self._options, self.backend
        stop = TOOL_STOP if options.template == "tools" else _STOP
        decoding = Decoding(options.new_tokens, temperature=temperature, stop=stop)
        if options.template == "tools":
            sees = bool(backend.takes_pictures)
            return ToolStyle(self._corpus, decoding, options.budget, sees=sees)
        return SearchR1Style(self._corpus, decoding, backend.takes_messages, options.results_by)

    def fits(self, question: Question) -> bool:
        """Whether a question's first turn fits a row."""
        try:
            self.backend.check(self.style(0.0).query(Episode(question), (question.id, 0)))
        except (TooLong, Unanswerable):
            return False
        return True

    def run(self, questions: Sequence[Question], temperature: float) -> list[Episode]:
        """Ended episodes of questions with different ids."""
        style, budget = self.style(temperature), self._options.budget
        return run_episodes(questions, style, self.backend, self._retriever, budget, quiet=True)


class SearchGroups(PolicyBatches):
    """Draws groups of episodes.

    Args:
      searches: draws them.
      questions: that are asked.
      reward: of an episode.
      folder: where batches are kept.
      log_probs, options: see PolicyBatches.
    """

    def __init__(
        self,
        searches: Searches,
        questions: Sequence[Question],
        reward: RewardSection,
        folder: Path,
        log_probs: LogProbs,
        **options: Any,
    ):
        super().__init__(len(questions), log_probs, **options)
        self._searches, self._questions = searches, questions
        self._reward, self._folder = reward, folder
        self._rows: list[dict[str, Any]] = []  # of the batch that is being drawn

    def _draw(self) -> Arrays:
        """The next batch, whose episodes are written, one a line; a batch that is drawn again has
        equal ones."""
        self._rows = []
        batch = super()._draw()
        if jax.process_index() == 0:
            write_jsonl(self._folder / f"{self._drawn:06d}.jsonl", self._rows)
        return batch

    def _groups(self, model: Llama, prompts: Sequence[int], seeds: Sequence[int]) -> list[Group]:
        draws = self._options.group
        asked = {
            f"{number}, draw {draw}": (self._questions[prompt], (seed, draw))
            for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            for draw in range(draws)
        }

        def seed_of(query_id: Any) -> int:
            name, turn = query_id
            return int(np.random.default_rng((34, *asked[name][1], turn)).integers(2**31))

        self._searches.use(model, seed_of)
        questions = [dataclasses.replace(q, id=name) for name, (q, _) in asked.items()]
        episodes = self._searches.run(questions, self._options.temperature)
        # Process 0's, as a function of one's own may give others elsewhere.
        earned, *_ = gather("rewards", [self._reward.of(episode) for episode in episodes])
        rewarded = list(zip(episodes, earned, strict=True))
        self._check_failed(rewarded)
        groups = [rewarded[first : first + draws] for first in range(0, len(rewarded), draws)]
        self._keep([self._questions[number].id for number in prompts], groups)
        return [Group([self._answer(*pair, group) for pair in group]) for group in groups]

    def _answer(self, episode: Episode, earned: Mapping[str, float], group: Rewarded) -> Answer:
        """An episode as a row. One whose reward failed counts as the others' mean: it teaches
        nothing, and does not move them."""
        transcript = self._transcript(episode)
        others = [r["reward"] for _, r in group if not math.isnan(r["reward"])]
        reward = earned["reward"]
        if math.isnan(reward):
            reward = float(np.mean(others)) if others else 0.0
        drawn = transcript.log_probs if self._options.temperature == 1 else ()
        example = self._example(transcript)
        return Answer(example, reward, {n: earned[n] for n in METRICS}, drawn[: example.targets])

    def _transcript(self, episode: Episode) -> Transcript:
        """Its tokens; one that no token was drawn for, such as of a broken picture, has one."""
        return self._searches.backend.transcripts.get(episode.question.id) or NO_TRANSCRIPT

    def _example(self, transcript: Transcript) -> TokenExample:
        return transcript.example()

    def _check_failed(self, rewarded: Rewarded) -> None:
        failed = [e for e, earned in rewarded if math.isnan(earned["reward"])]
        if not failed:
            return
        message = (
            f"batch {self._drawn}: the reward of {len(failed)} of {len(rewarded)} episodes raised "
            "an error or was no finite number, or its search failed, such as that of "
            f"{failed[0].question.question!r}"
        )
        if len(failed) > _MOST_FAILED * len(rewarded):
            raise RunError(
                f"{message}; more than {_MOST_FAILED:.0%} end the run: repair reward.function="
                f"{self._reward.function}, and start the same command again."
            )
        if jax.process_index() == 0:
            print(f"{message}; they teach nothing.", file=sys.stderr)

    def _keep(self, names: Sequence[str], groups: Sequence[Rewarded]) -> None:
        """Takes the episodes of a batch, and which tokens of each were drawn."""
        self._rows += [
            {
                "question_id": name,
                "question": episode.question.question,
                "turns": [turn.record() for turn in episode.turns],
                "tokens": [turn.tokens for turn in episode.turns],
                "drawn": self._transcript(episode).drawn_tokens,
                "problem": episode.problem,
                "earned": {key: None if math.isnan(x) else x for key, x in earned.items()},
            }
            for name, group in zip(names, groups, strict=True)
            for episode, earned in group
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searcher(TextModelTask):
    """A LLaMA learns to search and to answer by what its own episodes earn.

    Attributes:
      exact: whether the trainer's log-probabilities have the engine's bits, so that the first
        ratios are 1 and `engine_gap` is 0 (decoding/ENGINE.md, "The same bits"); grpo.temperature
        is then 1.
    """

    name: ClassVar[str] = "searcher"
    product: ClassVar[str] = "searcher"
    unit: ClassVar[str] = "episodes"
    architecture: ClassVar[str] = "llama"

    data: SearchedData
    model: LanguageModelSection
    batches: PolicyRows
    inference: Any = None
    episodes: EpisodeSection = dataclasses.field(default_factory=EpisodeSection)
    reward: RewardSection = dataclasses.field(default_factory=RewardSection)
    grpo: GrpoSection = dataclasses.field(default_factory=GrpoSection)
    validate: ValidateSearches | None = None
    exact: bool = False

    def _check(self, files: bool) -> None:
        self.check_trained()
        check_groups(self)
        self.reward.check()
        self.config(ANY_VOCABULARY)
        if self.episodes.new_tokens >= self.batches.length:
            raise UserError(
                f"config key batches.length={self.batches.length}: holds no prompt beside a turn "
                f"of episodes.new_tokens={self.episodes.new_tokens}; raise it."
            )
        if self.exact and self.grpo.temperature != 1:
            raise UserError(
                f"config key exact=True: the engine tells log-probabilities at temperature 1, and "
                f"grpo.temperature={self.grpo.temperature}; set one of them."
            )
        if bool(self.data.model) != bool(self.data.index):
            raise UserError(
                "config key data.index: an encoder searches by its index; give both data.model and "
                "data.index, or neither, and BM25 searches."
            )

    @property
    def row_length(self) -> int | None:
        return None if self.exact else self.batches.length

    def config(self, vocab_size: int) -> LlamaConfig:
        """The model's."""
        return model_config(self, vocab_size)

    @property
    def _engine(self) -> EngineConfig:
        """Sizes of the policy's engine."""
        slots, length = self.episodes.slots, self._columns
        return EngineConfig(slots=slots, length=length, buckets=(32,))

    @property
    def _columns(self) -> int:
        """Tokens of a row, those of its pictures among them."""
        return self.batches.length

    @property
    def _size(self) -> RowSize:
        return RowSize(self.batches.length, self.episodes.turns * self.episodes.new_tokens)

    def objective(self, vocab_size: int, mesh: Mesh | None = None) -> PolicyObjective:
        config, lora = self.config(vocab_size), self.model.lora
        if not self.exact:
            return PolicyObjective(config, lora, self.grpo)
        return PolicyObjective(config, lora, self.grpo, self._engine, engine_mesh(mesh))

    def batch(self) -> dict[str, Any]:
        drawn, rows = self.grpo.temperature == 1, self.batches.batch_size
        return batch_shapes(self.grpo, self._size, rows, METRICS, drawn=drawn, exact=self.exact)

    def in_folder(self, folder: str | os.PathLike) -> Self:
        if self.episodes.dir:
            return self
        episodes = dataclasses.replace(self.episodes, dir=str(Path(folder) / "rollouts"))
        return dataclasses.replace(self, episodes=episodes)

    def training_questions(self, corpus: Corpus) -> list[Question]:
        return self._asked(corpus, self.data.split)

    def _asked(self, corpus: Corpus, split: str) -> list[Question]:
        questions = [question for question in corpus.questions(split) if question.answers]
        return of_modality(questions, corpus, self.data.modality) if questions else []

    def _searches(self, corpus: Corpus, tokenizer: TextTokenizer) -> Searches:
        retriever, mesh = self.data.retriever(corpus), engine_mesh(make_mesh(self.mesh))
        return Searches(corpus, retriever, tokenizer, self.episodes, self._engine, mesh)

    def _recipe(self, corpus: Corpus, questions: list[Question], tokenizer: Any) -> Recipe:
        mesh = make_mesh(self.mesh)
        objective = self.objective(tokenizer.vocab_size, mesh)
        self._check_model(objective.config, tokenizer)
        self._check_actions(tokenizer)
        searches = self._searches(corpus, tokenizer)
        batches = self._make_batches(
            searches,
            self._fitting(questions, searches),
            self.reward,
            Path(self.episodes.dir),
            make_log_probs(objective, mesh),
            per_batch=self.part().batches.batch_size // self.grpo.rows,
            size=self._size,
            options=self.grpo,
            seed=self.seed,
            mesh=mesh,
        )
        return self.recipe_of(objective, batches, tokenizer)

    def _check_model(self, config: Any, tokenizer: TextTokenizer) -> None:
        check_rows(self, config, tokenizer)

    def _make_batches(self, *parts: Any, **options: Any) -> SearchGroups:
        return SearchGroups(*parts, **options)

    def _check_actions(self, tokenizer: TextTokenizer) -> None:
        """Refuses a model that cannot write the actions of the template."""
        by_tools = self.episodes.template == "tools"
        if by_tools and tokenizer.template is None:
            raise UserError(
                f"config key episodes.template=tools: init={self.init} has no chat template, and "
                "calls of tools are messages; name a chat model, or set it to search_r1."
            )
        for tag in TOOL_STOP if by_tools else _STOP:
            if tokenizer.decode(tokenizer.encode_plain(tag)) != tag:
                raise UserError(
                    f"config key tokenizer={self.tokenizer}: has no tokens for {tag}, which ends "
                    "an action; name one that writes any text, such as the base's own."
                )

    def _fitting(self, questions: Sequence[Question], searches: Searches) -> list[Question]:
        fitting = [question for question in questions if searches.fits(question)]
        if not fitting:
            raise UserError(
                f"config key batches.length={self.batches.length}: no question fits a row with a "
                f"turn of episodes.new_tokens={self.episodes.new_tokens}; raise it."
            )
        if len(fitting) < len(questions) and jax.process_index() == 0:
            print(f"{len(questions) - len(fitting)} questions fit no row.", file=sys.stderr)
        return fitting

    def evaluation(
        self, corpus: Corpus, tokenizer: Any, model: nnx.Module
    ) -> Callable[[nnx.Module], Mapping[str, float]]:
        section = self.validate
        assert section is not None
        searches = self._searches(corpus, tokenizer)
        questions = evenly(self._asked(corpus, section.split), section.questions)
        if not questions:
            raise UserError(
                f"config key validate.split={section.split}: {self.place} holds no such questions "
                "with answers; choose another split, or set train.evaluate_every to 0."
            )

        def evaluate(model: nnx.Module) -> dict[str, float]:
            searches.use(model)
            earned = [self.reward.of(episode) for episode in searches.run(questions, 0.0)]
            return validated(earned)

        return evaluate


def validated(earned: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The means of what episodes earned; a reward that failed, or whose search did, counts 0."""
    failed = sum(math.isnan(values["reward"]) for values in earned)
    if failed and jax.process_index() == 0:
        print(
            f"validation: the search or the reward of {failed} of {len(earned)} episodes failed; "
            "each counts 0.",
            file=sys.stderr,
        )
    return {n: float(np.mean(np.nan_to_num([e[n] for e in earned]))) for n in earned[0]}
