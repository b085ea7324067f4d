"""A row of a paper's table as a typed value: setting, parts, data, options, published figures.

A config file gives it as a ConfigDict (configs/*/tables.py); `read_row` is the one door at which
keys and values are checked.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from ml_collections import ConfigDict

from mmqa_jax.benchmarks import NAMES
from mmqa_jax.benchmarks.benchmark import check_judged
from mmqa_jax.core import typed
from mmqa_jax.core.config import config_fingerprint, flatten, to_plain_dict
from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_json
from mmqa_jax.core.local_copies import local_copy
from mmqa_jax.core.paths import as_path, in_store
from mmqa_jax.core.workdir import is_free, read_config
from mmqa_jax.data import corpus as corpora
from mmqa_jax.data.records.corpus_records import holds_corpus, materials_of, read_manifest
from mmqa_jax.data.schema import Material, Prediction, Question, united
from mmqa_jax.evaluation.webqa import check_installed, check_threshold
from mmqa_jax.papers.setting import Setting
from mmqa_jax.retrieval.modality import of_modality
from mmqa_jax.runs import parts as part_kinds
from mmqa_jax.runs.part import OpenedParts, Part, of_path, of_questions
from mmqa_jax.runs.stages import Stage, keeping
from mmqa_jax.tasks.library import LibrarySpec, has_picture
from mmqa_jax.weights.hub import is_cached, is_hub_name

# Keys that may be changed in a workdir.
FREE = tuple(f"parts.{name}.{key}" for name in part_kinds.LLMS for key in part_kinds.LLM_FREE)
# Names of models that are installed packages.
_INSTALLED = ("minilm", "smollm2")
_ANSWERS = 2  # raised where the same row answers otherwise than before: its chunks are made again


@dataclasses.dataclass(frozen=True)
class RowData:
    """The questions of a row."""

    dir: str  # folder of `mmqa prepare`
    split: str
    # Another one, such as Wikipedia's, whose sources take the place of its own; "": none.
    sources: str = ""
    questions: int = typed.at_least(0, 0)  # so many, evenly over the split; 0: all
    # Those that need snippets (`text`) or pictures (`image`); of a benchmark those without and with
    # a picture.
    modality: Literal["", "text", "image"] = ""
    # Values that keys of the questions' `extra` must have.
    where: dict = dataclasses.field(default_factory=dict)
    # What of a question's gold sources is its caption (data/batches/vqa.py); "": questions are read
    # as they are.
    context: Literal["", *get_args(corpora.GoldContext)] = ""
    # folds, fold: of these questions only the part `fold` of `folds` (data.corpus.fold_of), for a
    # row with a part that was trained on the others.
    folds: int = typed.at_least(1, 1)
    fold: int = typed.at_least(0, 0)

    def __post_init__(self) -> None:
        if self.fold >= self.folds:
            raise UserError(
                f"config key data.fold={self.fold}: 0 to {self.folds - 1} was expected, of "
                f"data.folds={self.folds}; change one of them."
            )


@dataclasses.dataclass(frozen=True)
class Scoring:
    """The settings of the scores that do not come from answers."""

    lemmatizer: Literal["", "none", "spacy"] = ""  # of WebQA; "" is spaCy where it is installed
    bart: str = ""  # folder of BART's weights, for WebQA; "" leaves fluency out
    # BEM in transformers' layout, folder or ORG/NAME, for Encyclopedic-VQA; "": exact match.
    bem: str = ""


def _part_kinds(section: Mapping[str, Any]) -> dict[str, tuple[type[Part], bool]]:
    taken = find_setting(section["system"], section.get("setting")).parts()
    return part_kinds.kinds_of_parts(
        taken, section["parts"] if typed.is_section(section.get("parts")) else {}
    )


def _options(section: Mapping[str, Any]) -> dict[str, typed.Key]:
    """The keyword-only parameters of the setting's function; `Count` where one may be 0."""
    setting = find_setting(section["system"], section.get("setting"))
    options, keys = setting.options({}), typed.spec_of(setting.answer, minimum=1)
    return {name: key for name, key in keys.items() if name in options}


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a table."""

    row: str  # its name
    # system, setting: the function of papers/ that answers, see runs/row.py.
    system: str
    setting: str
    dataset: Literal["atlas", "webqa", "corpus", *NAMES]  # by whose rules answers are scored
    data: RowData
    # What the function takes, by the names of its parameters.
    parts: Mapping[str, Part] = typed.sections_by_name(_part_kinds)
    # Keyword arguments of the function; others have its defaults.
    options: Mapping[str, Any] = typed.mapping(_options, required=True)
    scoring: Scoring = Scoring()
    # Figures: table, row, column, published, tolerance, scorer, group.
    published: tuple[dict, ...] = ()
    made_by: tuple[tuple[str, str], ...] = ()  # path of an input -> where it comes from
    # The config that it was read from; empty of a row that was made in code.
    as_written: Mapping[str, Any] = typed.as_given()

    def __post_init__(self) -> None:
        library, retriever = self.parts.get("library"), self.parts.get("retriever")
        if isinstance(library, LibrarySpec):
            part_kinds.check_prompted(self.answering.options(self.options), library)
        if "threshold" in self.options:
            check_threshold(self.options["threshold"], "config key options.threshold")
        if isinstance(retriever, part_kinds.RetrieverSpec):
            retriever.check("parts.retriever")
        reranker = self.parts.get("reranker")
        if isinstance(reranker, part_kinds.RerankerSpec) and reranker.similarity is not None:
            reranker.similarity.check("parts.reranker.similarity")
        if self.scoring.bem:
            check_judged(self.dataset, "config key scoring.bem")
        for key in ("lemmatizer", "bart"):
            if self.dataset in NAMES and (value := getattr(self.scoring, key)):
                raise UserError(
                    f"config key scoring.{key}={value}: is part of WebQA's scores; leave it out "
                    f"for {self.dataset}."
                )
        self.answering.check_row(self.options, self.parts)

    @property
    def answering(self) -> Setting:
        """The setting that answers the row's questions."""
        return find_setting(self.system, self.setting)

    def keys(self) -> dict[str, Any]:
        """Every key of the row's config and its value, those that have defaults too."""
        sections = dataclasses.asdict(self)
        sections["options"] = self.answering.options(self.options)
        left_out = ("as_written", "published", "made_by")
        return flatten({name: value for name, value in sections.items() if name not in left_out})

    @property
    def config(self) -> Mapping[str, Any]:
        """The row's entry in config.json: the config as it was given, or all values."""
        if self.as_written:
            return self.as_written
        values = dataclasses.asdict(self)
        del values["as_written"]
        return values

    @property
    def answers(self) -> bool:
        """Whether it answers in words or by a choice, not with sources alone."""
        taken = self.answering.parts()  # a language model that only reranks is none of them
        # What takes no part answers by itself.
        return not taken or any(self.parts[name].answers for name in taken if name in self.parts)

    @property
    def finds_sources(self) -> bool:
        """Whether its sources are a result: without a part that ranks any they are given."""
        return any(part.ranks for part in self.parts.values())

    @property
    def reads_its_corpus(self) -> bool:
        """Whether its sources are the corpus's own, and no other knowledge base's."""
        knowledge = self.parts.get("knowledge")
        other = knowledge.data if isinstance(knowledge, part_kinds.KnowledgeSpec) else ""
        return other in ("", self.data.sources or self.data.dir)

    @property
    def needs_all(self) -> bool:
        """Whether an answer depends on the other questions: then they are one chunk."""
        return self.answering.needs_all

    @property
    def llm(self) -> str:
        """The name of its language model; "": it has none."""
        llm = self.parts.get("llm")
        return llm.model if isinstance(llm, part_kinds.LLMSpec) else ""

    def paths(self) -> list[str]:
        """The paths that its parts read, and names of installed models."""
        paths = [path for part in self.parts.values() for path in part.paths()]
        return list(dict.fromkeys(filter(None, paths)))

    def on_hub(self) -> list[str]:
        """Models of the Hugging Face hub that its parts name; no path that a command makes."""
        made_by = dict(self.made_by)
        return [path for path in self.paths() if is_hub_name(path) and path not in made_by]

    def missing_inputs(self) -> dict[str, str]:
        """Missing paths of data, parts and weights -> how to get each."""
        made_by = dict(self.made_by)
        # A model on the Hugging Face hub is looked for in its cache when it is opened.
        by_name = is_hub_name(self.llm) and self.llm not in made_by
        no_paths = {*_INSTALLED, *([self.llm] if by_name else [])}
        data = self.data.dir, self.data.sources, self.scoring.bart, self.scoring.bem
        paths = dict.fromkeys(filter(None, [*data, *self.paths()]))
        return {
            path: made_by.get(path, "no such path; name another with --config.KEY=PATH")
            for path in paths
            if path not in no_paths and not as_path(path).exists() and not is_cached(path)
        }

    def check_inputs(self) -> None:
        """Raises UserError that names all inputs that are missing, or spaCy."""
        check_installed(self.scoring.lemmatizer, "config key scoring.lemmatizer")
        if missing := self.missing_inputs():
            listed = "; ".join(f"{path} ({how})" for path, how in missing.items())
            raise UserError(f"row {self.row}: {len(missing)} of its inputs are missing: {listed}.")

    def open_corpus(self) -> corpora.Corpus:
        """Opens its questions and sources."""
        corpus = corpora.open_corpus(self.data.dir, self.data.sources)
        return corpora.with_gold_sources(corpus, self.data.context) if self.data.context else corpus

    def materials(self, corpus: corpora.Corpus) -> tuple[Material, ...]:
        """The materials that its pages show: of its corpus, its parts, and the runs they read."""
        read = [read_manifest(path) for path in self.paths() if holds_corpus(path)]
        for part in self.parts.values():
            if (
                isinstance(part, part_kinds.FinishedSpec)
                and (Path(part.run) / "scores.json").is_file()
            ):
                read.append(read_json(Path(part.run) / "scores.json"))
        of_parts = [part.materials for part in self.parts.values()]
        return united(corpus.materials, *of_parts, *map(materials_of, read))

    def questions(self, corpus: corpora.Corpus) -> list[Question]:
        """Returns its questions, sampled evenly down to data.questions; none are a UserError."""
        data = self.data
        questions = corpora.split_questions(corpus, Path(data.dir), data.split)
        if data.where:
            total = len(questions)
            wanted = data.where.items()
            questions = [q for q in questions if all(q.extra.get(k) == v for k, v in wanted)]
            if not questions:
                asked = " and ".join(f"{key}={value!r}" for key, value in wanted)
                raise UserError(
                    f"config key data.where: none of the {total:,} questions of "
                    f"{data.dir} ({data.split}) has {asked}; change one of them."
                )
        if self.dataset in NAMES and data.modality:
            questions = [q for q in questions if has_picture(q) == (data.modality == "image")]
        else:
            questions = of_modality(questions, corpus, data.modality or None)
        taken = corpora.evenly(questions, data.questions)
        of_fold = [
            question for question in taken if corpora.fold_of(question.id, data.folds) == data.fold
        ]
        if taken and not of_fold:
            raise UserError(
                f"config key data.fold={data.fold}: none of the {len(taken):,} questions is of "
                "this part; take more of them (data.questions), or another part."
            )
        return of_fold

    def check_questions(self, questions: Sequence[Question]) -> None:
        """Raises UserError for questions that its setting cannot answer."""
        self.answering.check_questions(self.setting, questions)

    def what(self, corpus: corpora.Corpus, questions: Sequence[Question]) -> dict[str, Any]:
        """All that its answers depend on, see core.chunks.Job."""
        used = {key: self.config.get(key) for key in ("system", "setting", "parts", "options")}
        values = flatten(to_plain_dict(used))
        affecting = {key: value for key, value in values.items() if not is_free(key, FREE)}
        return {
            "verb": "run",
            "row": self.row,
            "answers": _ANSWERS,
            "corpus": corpus.fingerprint,
            **({"asked": corpus.asked_by} if corpus.asked_by else {}),
            "questions": of_questions(questions),
            "config": config_fingerprint(affecting),
            "inputs": {
                path: of_path(local_copy(path) if in_store(path) else path) for path in self.paths()
            },
        }

    def stage(
        self, what: Mapping[str, Any], questions: Sequence[Question], opened: OpenedParts
    ) -> Stage:
        """Makes the stage that answers the questions: the row's setting with its parts."""

        def predict(asked: Sequence[Question], parts: Mapping[str, Any]) -> list[Prediction]:
            return self.answering.run(asked, opened.corpus, parts, self.options)

        check = functools.partial(self.answering.check_inputs, questions, self.options)
        return Stage(what, self.parts, keeping(predict, opened), check=check)


def recorded_row(folder: Path) -> Row:
    """The row of a workdir of `mmqa run`."""
    recorded = read_config(folder).to_dict()
    recorded.pop("limit", None)
    return read_row(ConfigDict(recorded))


def read_row(config: ConfigDict, *, split: str | None = None) -> Row:
    """The row of a config; a `split` takes the place of the config's own."""
    if not isinstance(config.get("row"), str) or not config.get("system"):
        raise UserError(
            "--config: the file does not define a row of a table (no key `row`); name one such as "
            "configs/webqa/tables.py:vlp."
        )
    if split and isinstance(config.get("data"), ConfigDict):
        with config.data.unlocked():
            config.data.split = split
    return typed.read_typed(Row, config)


# The systems that rows name.
#
# A system is what has `SETTINGS`: the settings (papers/setting.py) by the names that rows have
# for them. It is a module of papers/ or extensions/, or a class in the config file of its rows.


class OwnSystem:
    """A system that is no module of this package: a subclass, in the config file of its rows.

    Its `name` is the key `system` of a row; its SETTINGS are as those of a paper.
    """

    name: ClassVar[str]
    SETTINGS: ClassVar[Mapping[str, Setting]]


# A system's name -> the module with its settings, which is imported when a row names it.
BUILT_IN = {
    **{name: f"mmqa_jax.papers.{name}" for name in ("webqa", "pica", "rmr", "prophet")},
    "mavl": "mmqa_jax.extensions.mavl_votes",  # the paper's setting, and other votes
    **{name: f"mmqa_jax.papers.{name}" for name in ("llava", "kat", "mmcot", "echosight")},
    **{name: f"mmqa_jax.papers.{name}" for name in ("mmmu", "mragbench", "mathvista")},
    "search_r1": "mmqa_jax.papers.search_r1",
    "opensearch_vl": "mmqa_jax.papers.opensearch_vl",
    "tool_search": "mmqa_jax.extensions.tool_search",
}


def find_setting(system: str, setting: str | None) -> Setting:
    """The setting that a row names; UserError for an unknown one, or an unknown system."""
    outside = {kind.name: kind for kind in OwnSystem.__subclasses__()}
    if system not in outside and system not in BUILT_IN:
        known = ", ".join({**BUILT_IN, **outside})
        raise UserError(f"config key system={system}: use one of {known}.")
    settings = (outside.get(system) or importlib.import_module(BUILT_IN[system])).SETTINGS
    if setting not in settings:
        raise UserError(f"config key setting={setting}: use one of {', '.join(settings)}.")
    return settings[setting]
