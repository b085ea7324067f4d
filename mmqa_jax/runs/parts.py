"""The parts of a row: retrievers, rerankers, readers, language models and what their prompts need.

A part is a frozen dataclass whose fields are the keys of a row's section `parts.NAME`: a few plain
values that say what it reads. `open` gives the part in use over a row's corpus. The verbs `search`,
`rerank` and `answer` make the same parts of their flags.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import read_jsonl
from mmqa_jax.core.host import cache_dir
from mmqa_jax.core.serving import OnModel, ignored
from mmqa_jax.core.typed import at_least, is_section
from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.pictures.store import PictureVectors
from mmqa_jax.data.schema import Material, Modality, Question, source_text
from mmqa_jax.prompting import llm_reader
from mmqa_jax.prompting.examples import side_files
from mmqa_jax.prompting.examples.library import TEXTS
from mmqa_jax.prompting.few_shot import load_template
from mmqa_jax.retrieval.embeddings import cached_vectors
from mmqa_jax.retrieval.fusion import DEFAULT_WEIGHT, check_weight
from mmqa_jax.retrieval.indexes.milvus import PREFIX as MILVUS
from mmqa_jax.retrieval.knowledge import KnowledgeBase
from mmqa_jax.retrieval.manifest import BM25_INDEX, INDEX
from mmqa_jax.retrieval.modality import MODALITIES
from mmqa_jax.retrieval.rankings import Asks, Retriever
from mmqa_jax.runs import part
from mmqa_jax.runs.part import OpenedParts, Part
from mmqa_jax.tasks.library import LibrarySpec, check_similarity, open_text_embedder

_MOST_IN_MEMORY = 3_000_000  # sources of which BM25 makes an index in memory


@dataclasses.dataclass(frozen=True)
class RetrieverSpec(Part):
    """How sources are retrieved."""

    reads: ClassVar = ("index", "modality_model", "model")
    ranks: ClassVar = "candidates"

    # `bm25`, `dense`, or both: `fused` by a convex combination of their scores, `rrf` by
    # reciprocal-rank fusion.
    method: Literal["bm25", "dense", "fused", "rrf"]
    # Workdir of a contrastive run, a CLIP or SigLIP, a Qwen3-VL-Embedding, or a published encoder
    # of texts: its folder, or ORG/NAME in the Hugging Face cache (not for bm25).
    model: str = ""
    # Folder of `mmqa embed` and `mmqa index` with that model, or the Milvus collection that `mmqa
    # index` filled (milvus://HOST:PORT/COLLECTION). BM25 over all sources is searched from disk
    # where the folder holds an index of --kind=bm25, else made in memory: the rankings are the
    # same.
    index: str = ""
    # `unknown` searches all sources; `text` and `image` those of one modality; `known` those of the
    # gold sources' modality; `classified` those of the modality that a classifier predicts.
    modality: Literal["unknown", "known", "classified", "text", "image"] = "unknown"
    # Workdir of a modality run, the paper's BERT classifier (classified); by default logistic
    # regression over the words of the train questions (ours).
    modality_model: str = ""
    # `exact` refuses an index that searches approximately (recall@200 to 2,000 of WebQA's CLIP
    # needs all of the top 2,000); `any` takes both.
    index_kind: Literal["any", "exact"] = "any"
    # What of a question is searched for: its text and its picture (`both`), or one of them;
    # dense.DenseRetriever.
    asks: Asks = "both"
    webqa_compat: bool = False  # bm25 with the quirks of WebQA's baseline
    second_hop: bool = False  # search again with the title of the first result (ours)
    # Of the dense scores, from 0 (BM25 alone) to 1 (fused); None: the default.
    fusion_weight: float | None = None

    def check(self, section: str = "", *, restricted: bool = False) -> None:
        """Raises UserError if the values contradict each other.

        Args:
          section: of the config that has them; "": they are flags.
          restricted: whether each question's own candidates alone are ranked.
        """
        named, other = (f"config key {section}.", "") if section else ("--", "--")
        if self.webqa_compat and (self.method != "bm25" or self.second_hop):
            raise UserError(
                f"{named}webqa_compat: works only with plain {other}method=bm25; leave it out."
            )
        if self.fusion_weight is not None:
            check_weight(self.fusion_weight, f"{named}fusion_weight")
            if self.method != "fused":
                raise UserError(
                    f"{named}fusion_weight: works only with {other}method=fused; leave it out."
                )
        if restricted and (self.method in ("fused", "rrf") or self.modality != "unknown"):
            raise UserError(
                "--candidates=restricted: works with --method=bm25 or dense and without "
                "--modality; change one."
            )
        if self.modality_model and self.modality != "classified":
            raise UserError(
                f"{named}modality_model={self.modality_model}: classifies questions, but "
                f"{other}modality={self.modality}; set it to classified or leave the model out."
            )
        if self.asks == "picture" and self.method != "dense":
            raise UserError(
                f"{named}asks=picture: BM25 reads words; set {other}method to dense, or ask by the "
                "text or both."
            )
        if self.method != "bm25" and not (self.model and self.index):
            in_row = f": needs {section}.model and {section}.index"
            needs = in_row if section else " needs --model and --index"
            raise UserError(f"{named}method={self.method}{needs}; give both.")

    def fingerprint(self) -> str:
        """16 hex digits of the settings, model and index.

        Folders are identified by content, not by path; a collection of Milvus by its name.
        """
        in_milvus = self.index.startswith(MILVUS)
        named = self.index if in_milvus else ""
        settings = dataclasses.replace(self, model="", index=named, modality_model="")
        # BM25 finds the same from disk as in memory.
        no_folder = in_milvus or not self.index or self.method == "bm25"
        index = "" if no_folder else f"{self.index}/{INDEX}"
        return part.of_folders(self.model, index, self.modality_model, text=str(settings))

    def open(self, row: OpenedParts, name: str = "retriever") -> Any:
        """The retriever over the row's corpus."""
        load = functools.partial(open_retriever, row.corpus, self)
        return row.once("retriever", self.fingerprint(), load, name)


@dataclasses.dataclass(frozen=True)
class RerankerSpec(Part):
    """How sources are selected."""

    ranks: ClassVar = "relevance"

    # Workdir of a rerank run, or a published cross-encoder, Qwen3-Reranker or Qwen3-VL-Reranker:
    # its folder, or ORG/NAME in the Hugging Face cache.
    model: str
    # The retriever whose cosines are combined with VLP's relevance, and whose second hop is
    # reranked too (ours); None is the paper's VLP alone.
    similarity: RetrieverSpec | None = None
    similarity_weight: float = 0.0  # of the cosines; 0 uses the relevance alone

    def paths(self) -> list[str]:
        """The folders that it and its similarity read."""
        return [self.model, *([] if self.similarity is None else self.similarity.paths())]

    def open(self, row: OpenedParts) -> Any:
        """The reranker over the row's corpus."""

        def load() -> Any:
            from mmqa_jax.tasks.rerank import open_reranker

            return open_reranker(self.model, row.corpus, row.inference)

        made_of = part.of_folders(self.model)
        return _combined(self, row.model("reranker", made_of, load), row)


@dataclasses.dataclass(frozen=True)
class LLMRerankerSpec(llm_reader.LLMRerankerOptions, Part):
    """How the row's language model selects sources: LLMRerankerOptions, and as in RerankerSpec
    `similarity` and `similarity_weight`.
    """

    turn: ClassVar = "last"
    ranks: ClassVar = "relevance"

    similarity: RetrieverSpec | None = None
    similarity_weight: float = 0.0

    def paths(self) -> list[str]:
        """The folders that it reads."""
        return [] if self.similarity is None else self.similarity.paths()

    def open(self, row: OpenedParts) -> Any:
        """The reranker over the row's corpus; what the model said is kept by its response cache."""
        reranker = llm_reader.LLMReranker(row.corpus, row.llm, self)
        row.unscored = reranker.unscored
        return _combined(self, reranker, row)


def _combined(spec: RerankerSpec | LLMRerankerSpec, reranker: Any, row: OpenedParts) -> Any:
    """A reranker with the similarity that its spec names, if any."""
    if spec.similarity is None:
        return reranker
    retriever = spec.similarity.open(row, "reranker.similarity")
    return with_similarity(reranker, retriever, row.corpus, spec.similarity_weight)


@dataclasses.dataclass(frozen=True)
class ReaderSpec(Part):
    """How questions are answered: `model` is the workdir of a run of `answer` (VLP) or
    `fusion_in_decoder` (a T5)."""

    reads: ClassVar = ("model",)
    answers: ClassVar = True

    model: str

    def open(self, row: OpenedParts) -> Any:
        """The reader over the row's corpus."""

        def load() -> Any:
            from mmqa_jax.tasks.trained_readers import open_reader

            return open_reader(self.model, row.corpus, row.inference)

        return row.model("reader", part.of_folders(self.model), load)


@dataclasses.dataclass(frozen=True)
class LLMReaderSpec(llm_reader.LLMReaderOptions, Part):
    """How the row's language model answers questions: LLMReaderOptions."""

    turn: ClassVar = "last"
    answers: ClassVar = True

    def open(self, row: OpenedParts) -> Any:
        """The reader over the row's corpus; what the model said is kept by its response cache."""
        return llm_reader.LLMReader(row.corpus, row.llm, self)


def open_retriever(corpus: Corpus, spec: RetrieverSpec, on_model: OnModel = ignored) -> Retriever:
    """The retriever over a corpus."""
    weight = DEFAULT_WEIGHT if spec.fusion_weight is None else spec.fusion_weight
    return open_fusions(corpus, spec, on_model, remember=False)(weight)


def open_fusions(
    corpus: Corpus, spec: RetrieverSpec, on_model: OnModel = ignored, *, remember: bool = True
) -> Callable[[float], Retriever]:
    """`fused` at any weight; with `remember` all weights' retrievers search the same questions
    once.
    """
    spec.check()
    dense = None
    if spec.method != "bm25":
        from mmqa_jax.tasks.embedder import open_dense

        exact = spec.index_kind == "exact"
        dense = open_dense(corpus, spec.model, spec.index, exact=exact, asks=spec.asks)
        on_model("model", dense.embedder)

    @functools.cache
    def over(modality: Any) -> Callable[[float], Retriever]:
        return retrievers_over(corpus, spec, dense, modality, remember)

    if spec.modality == "unknown":
        return over(None)
    if spec.modality in MODALITIES:
        return over(spec.modality)
    from mmqa_jax.retrieval.modality import ByModality

    choose = open_predictor(corpus, spec, on_model)
    return lambda weight: ByModality(lambda modality: over(modality)(weight), choose)


def open_predictor(
    corpus: Corpus, spec: RetrieverSpec, on_model: OnModel = ignored
) -> Callable[[Sequence[Question]], Sequence[Modality | None]]:
    """The function that tells which modality questions need, of a spec with such a `modality`."""
    from mmqa_jax.retrieval.modality import fit_classifier, modality_predictor

    classifier = None
    if spec.modality_model:
        from mmqa_jax.tasks.modality import load_question_classifier

        classifier = load_question_classifier(spec.modality_model)
        on_model("modality_model", classifier)
    elif spec.modality != "known":
        classifier = fit_classifier(corpus.questions("train"), corpus)
    return modality_predictor(corpus, classifier)


def open_bm25(corpus: Corpus, spec: RetrieverSpec, *, asks: bool = False) -> Any:
    """The index of `mmqa index --kind=bm25` in the spec's folder, which `asks` as BM25 does.

    None if the spec names no folder, or one of a dense retriever alone: BM25 is made in memory.
    """
    from mmqa_jax.retrieval.bm25.on_disk import DiskBM25

    in_folder = bool(spec.index) and not spec.index.startswith(MILVUS)
    folder = Path(spec.index) / BM25_INDEX
    if in_folder and not folder.parent.is_dir():
        raise UserError(f"{spec.index}: no such folder; run `mmqa index` first.")
    if not in_folder or not folder.exists():
        if corpus.on_disk and len(corpus) > _MOST_IN_MEMORY:
            raise UserError(
                f"bm25: {len(corpus):,} sources are too many for an index in memory; run `mmqa "
                "index --kind=bm25` over the corpus, and name its folder as the index."
            )
        return None
    return DiskBM25(
        folder, corpus.fingerprint, lambda row: source_text(corpus.sources[row]), asks=asks
    )


def with_similarity(reranker: Any, retriever: Any, corpus: Corpus, weight: float) -> Any:
    """The reranker combined with the retriever's similarity and second hop (ours)."""
    from mmqa_jax.extensions.second_hop import SecondHopReranker, SecondHopRetriever

    return SecondHopReranker(SecondHopRetriever(retriever, corpus), reranker, weight)


def retrievers_over(
    corpus: Corpus, spec: RetrieverSpec, dense: Any, modality: Any, remember: bool = False
) -> Callable[[float], Retriever]:
    """Retrievers over the sources of one modality (None: over all), by their fusion weight.

    `dense` is the retriever over the whole corpus, None where the method needs none; `remember`:
    see HybridSearch.
    """
    from mmqa_jax.retrieval.bm25.in_memory import BM25Retriever, WebQABM25Retriever
    from mmqa_jax.retrieval.fusion import HybridSearch, RankFusion, ScoreFusion
    from mmqa_jax.retrieval.modality import ModalityIndex, one_modality

    subset = corpus if modality is None else one_modality(corpus, modality)
    retrievers: list[Any] = []
    if spec.method != "dense":
        if spec.webqa_compat:
            retrievers.append(WebQABM25Retriever(subset))
        else:
            on_disk = None if modality is not None else open_bm25(corpus, spec)
            retrievers.append(BM25Retriever(subset, on_disk))
    if dense is not None and modality is not None:
        view = ModalityIndex(dense.index, corpus.modality_rows(modality))
        dense = dense.over(subset, view)
    if dense is not None:
        retrievers.append(dense)

    def hops(retriever: Any) -> Any:
        if not spec.second_hop:
            return retriever
        from mmqa_jax.extensions.second_hop import SecondHopRetriever

        return SecondHopRetriever(retriever, subset)

    if spec.method == "fused":  # scores are combined in each hop, which ends with ranks
        hybrid = HybridSearch(dense, retrievers[0], remember=remember)
        return lambda weight: hops(ScoreFusion(hybrid, weight))
    hopping = [hops(retriever) for retriever in retrievers]
    return lambda _: hopping[0] if len(hopping) == 1 else RankFusion(hopping)


@dataclasses.dataclass(frozen=True)
class LLMSpec(Part):
    """The language model of a prompted system, or of a row's reader and reranker."""

    turn: ClassVar = "llm"
    answers: ClassVar = True

    # As `mmqa prompt --model`: `smollm2`, a folder or GGUF file, ORG/NAME in the Hugging Face
    # cache, or a server's name for it.
    model: str
    # `engine` (this process) or `openai` (a server, see prompting/backends/http.py).
    backend: Literal["engine", "openai"] = "engine"
    tokenizer: str = ""  # for the engine, if the model's folder has none
    # dtype, mesh: of the engine's weights and arithmetic, see local_model.ModelConfig.
    dtype: str = "auto"
    mesh: dict[str, int | Literal["auto"]] = dataclasses.field(default_factory=dict)
    # Whether a chat model thinks before it answers: `auto` (as it does by itself), `off`, `on`, an
    # effort (`low`, `medium`, `high`; gpt-oss), or the number of tokens that thoughts may have
    # beside those of an answer.
    thinking: str = "auto"
    # engine, server: values of these sections of configs/prompt/default.py that differ.
    engine: dict[str, Any] = dataclasses.field(default_factory=dict)
    server: dict[str, Any] = dataclasses.field(default_factory=dict)
    cache: str = ""  # folder of a response cache that several rows share; "" is the workdir's own

    def paths(self) -> list[str]:
        """Weights in this process; a server's name of its model is no path."""
        return [] if self.backend == "openai" else [self.model]

    def open(self, row: OpenedParts) -> Any:
        """The language model with its response cache."""
        return self._opened(row, "llm")

    def _opened(self, row: OpenedParts, name: str) -> Any:
        cache = (cache_dir() if row.journals is None else row.journals) / "responses"
        flag = f"config key parts.{name}.model"
        return row.language_model(str(self), lambda: open_llm(self, cache, flag), name)


@dataclasses.dataclass(frozen=True)
class PlannerSpec(LLMSpec):
    """The language model of MAVL's planners, where it is another than its agents': as LLMSpec."""

    answers: ClassVar = False

    def open(self, row: OpenedParts) -> Any:
        """The language model with its response cache; it stays open beside the row's other one."""
        return self._opened(row, "planner")


# Of an LLMSpec, what changes no answer beyond its last bits: where the engine runs, its sizes (but
# `length`, to which prompts are shortened), and how a server is asked, and where answers are kept.
LLM_FREE = (
    *("mesh", "engine.slots", "engine.buckets", "engine.prefill_tokens", "engine.page"),
    *("engine.pages", "engine.scan_layers", "server", "cache"),
)


@dataclasses.dataclass(frozen=True)
class KnowledgeSpec(Part):
    """A knowledge base and how passages are found in it."""

    reads: ClassVar = ("index", "data", "text_model")

    data: str = ""  # folder of `mmqa prepare`; "" is the row's own
    # `bm25`, `dense`, both by scores (`fused`) or ranks (`rrf`); `random` passages are a control.
    retriever: Literal["bm25", "dense", "fused", "rrf", "random"] = "bm25"
    top_k: int = at_least(1, 1)  # passages of a question
    max_words: int = at_least(0, 100)  # longer passages are cut there; 0: never
    # Only snippets (`text`), only pictures' captions (`image`), or all.
    modality: Literal["", "text", "image"] = ""
    # Of dense retrieval: `minilm`, a published encoder of texts (folder or ORG/NAME), a CLIP or
    # SigLIP or a contrastive run.
    text_model: str = "minilm"
    # Folder of `mmqa embed` and `mmqa index` with that model, or of `mmqa index --kind=bm25`; "":
    # the passages' texts are embedded here, and kept on disk by content.
    index: str = ""
    # What is searched for: the question, with hint and choices, or behind the caption.
    text: Literal["question", "question_and_choices", "question_and_caption"] = "question"
    # See KnowledgeBase; the titles of sources that may be found for a question.
    section_key: str = ""

    def open(self, row: OpenedParts) -> KnowledgeBase:
        """The knowledge base."""
        return open_knowledge(row.corpus, self, row.on_model("knowledge"))


def check_prompted(options: Mapping[str, Any], library: LibrarySpec) -> None:
    """Refuses, before anything is opened, what could only fail later: a setting's options, its
    defaults included, that the row's library does not fit.
    """
    if "template" in options:
        load_template(options["template"])
    similarity = options.get("similarity")
    if similarity in (None, "answer_aware") or options.get("shots", 1) == 0:
        return
    check_similarity(similarity, library)


def open_llm(spec: LLMSpec, cache: Path, flag: str = "config key parts.llm.model") -> Any:
    """The language model with its response cache in the folder `cache`, or in the spec's own.

    Messages name the `flag`, or the config key, that named the model.
    """
    from mmqa_jax.core.config import find_config, load_config
    from mmqa_jax.prompting.backends import WithRoom
    from mmqa_jax.prompting.backends.cache import Cached, ResponseCache
    from mmqa_jax.prompting.backends.config import open_backend, spans_processes
    from mmqa_jax.prompting.backends.thinking import read_thinking

    changes: dict[str, Any] = {"model.dtype": spec.dtype, "thinking": spec.thinking}
    changes |= {f"model.mesh.{axis}": size for axis, size in spec.mesh.items()}
    changes |= {f"engine.{key}": value for key, value in spec.engine.items()}
    changes |= {f"server.{key}": value for key, value in spec.server.items()}
    config = load_config(find_config("configs/prompt/default.py"), changes)
    if spans_processes(spec.backend, config):
        raise UserError(
            "config key parts.llm.mesh: spans the processes of this launch, which each answer "
            "questions of their own; leave it at auto, or let it multiply to the devices of one "
            "process."
        )
    backend = open_backend(spec.backend, spec.model, spec.tokenizer or None, config, flag)
    if room := read_thinking(spec.thinking, "config key parts.llm.thinking").room:
        backend = WithRoom(backend, room)
    return Cached(backend, ResponseCache(spec.cache or cache))


def open_knowledge(
    corpus: Corpus, spec: KnowledgeSpec, on_model: OnModel = ignored
) -> KnowledgeBase:
    """The knowledge base; a spec that names no data searches the sources of the row's corpus."""
    from mmqa_jax.data.corpus import open_sources
    from mmqa_jax.retrieval.knowledge import RandomRetriever
    from mmqa_jax.retrieval.modality import one_modality

    home = open_sources(spec.data) if spec.data else corpus
    if not len(home.modality_rows(spec.modality) if spec.modality else home.sources):
        raise UserError(_no_passages(spec))
    subset = one_modality(home, spec.modality) if spec.modality else home
    if spec.retriever == "random":
        retriever: Any = RandomRetriever(subset)
    else:
        dense = None if spec.retriever == "bm25" else _open_dense_knowledge(home, spec)
        if dense is not None:
            on_model("text_model", dense.embedder)
        method = RetrieverSpec(spec.retriever, index=spec.index)
        retriever = retrievers_over(home, method, dense, spec.modality or None)(DEFAULT_WEIGHT)
    return KnowledgeBase(
        subset,
        retriever,
        top_k=spec.top_k,
        max_words=spec.max_words,
        text_of=TEXTS[spec.text],
        section_key=spec.section_key,
    )


def _no_passages(spec: KnowledgeSpec) -> str:
    """Returns the message for a knowledge base that has no sources, or none of the modality."""
    of_modality = f"{spec.modality} sources" if spec.modality else "sources"
    place = f"data={spec.data}: this corpus" if spec.data else "data is empty: the row's own corpus"
    leave_out = f" (parts.knowledge.modality={spec.modality})" if spec.modality else ""
    return (
        f"config key parts.knowledge.{place} has no {of_modality}{leave_out}; name a corpus that "
        "has some."
    )


def _open_dense_knowledge(home: Corpus, spec: KnowledgeSpec) -> Any:
    """Dense retrieval over the texts of all sources, or over an index."""
    from mmqa_jax.retrieval.embeddings import Embeddings
    from mmqa_jax.retrieval.indexes.exact import ExactIndex
    from mmqa_jax.retrieval.late_interaction import dense_retriever

    if spec.index:
        from mmqa_jax.tasks.embedder import open_dense

        return open_dense(home, spec.text_model, spec.index)
    if home.on_disk:
        raise UserError(
            f"config key parts.knowledge.index: {len(home):,} sources are too many to be embedded "
            "here; name the folder of `mmqa embed` and `mmqa index`."
        )
    embedder, pictures = open_text_embedder(spec.text_model, home)
    texts = [embedder.text_of(source) for source in home.sources]
    vectors = cached_vectors(
        cache_dir() / "vectors",
        f"text {embedder.fingerprint}",
        texts,
        lambda rows: embedder.embed_passages([texts[row] for row in rows]),
    )
    embeddings = Embeddings(vectors, embedder.fingerprint, home.fingerprint)
    return dense_retriever(home, embedder, ExactIndex(embeddings), pictures)


@dataclasses.dataclass(frozen=True)
class HeuristicsSpec(Part):
    """A VQA model's candidates and examples: files of `mmqa candidates` or of Prophet's authors."""

    reads: ClassVar = ("candidates", "examples")
    turn: ClassVar = "file"
    answers: ClassVar = True

    candidates: str  # its answers with confidences, of the questions and of the examples
    examples: str = ""  # ids of answer-aware examples; "": shots are chosen as the library does

    def open(self, row: OpenedParts) -> side_files.AnswerHeuristics:
        """The answer heuristics; UserError for a file that is malformed."""
        examples = side_files.load_answer_aware(self.examples) if self.examples else {}
        return side_files.AnswerHeuristics(side_files.load_candidates(self.candidates), examples)


@dataclasses.dataclass(frozen=True)
class FinishedSpec(Part):
    """A finished run of another row: its workdir."""

    reads: ClassVar = ("run",)
    turn: ClassVar = "file"
    answers: ClassVar = True

    run: str

    def open(self, row: OpenedParts) -> Mapping[str, Mapping[str, Any]]:
        """Question id -> its line in the run's trace.jsonl."""
        path = Path(self.run) / "trace.jsonl"
        if not path.is_file():
            raise UserError(
                f"config key parts.finished.run={self.run}: has no trace.jsonl; name the workdir "
                "of a finished run of a prompted row."
            )
        lines = {}
        for number, line in read_jsonl(path):
            if not isinstance(line, dict) or not isinstance(line.get("question_id"), str):
                raise UserError(
                    f'{path}, line {number}: expected an object with a text "question_id"; run '
                    "that row again."
                )
            lines[line["question_id"]] = line
        return lines


@dataclasses.dataclass(frozen=True)
class CaptionsSpec(Part):
    """Side files that describe pictures, see prompting/examples/side_files.py."""

    reads: ClassVar = ("captions", "tags")
    turn: ClassVar = "file"

    captions: str  # file of captions, by the id of a question, a picture (image_id) or a source
    tags: str = ""  # file of tags; "": none

    def open(self, row: OpenedParts) -> side_files.Captions:
        """Captions and tags by name."""
        return side_files.open_captions(self.captions, self.tags, row.corpus.questions())


# The parts of the tables' trained baselines: KAT's and Multimodal-CoT's.


@dataclasses.dataclass(frozen=True)
class FusionReaderSpec(Part):
    """A reader that answers from given passages."""

    reads: ClassVar = ("model", "tokenizer")
    answers: ClassVar = True

    # Workdir of a fusion_in_decoder run; with `config` a published T5, as FiD's or KAT's.
    model: str
    # Config file of task fusion_in_decoder, by which a published model reads; "": a run has its
    # own.
    config: str = ""
    tokenizer: str = ""  # folder of a published model's tokenizer; "": its own

    def open(self, row: OpenedParts) -> Any:
        """The reader over the row's corpus."""

        def load() -> Any:
            from mmqa_jax.core.config import find_config, load_config
            from mmqa_jax.tasks.fusion_in_decoder import load_fusion_reader
            from mmqa_jax.tasks.trained_readers import open_published_reader

            if not self.config:
                return load_fusion_reader(self.model, row.corpus, row.inference)
            config = load_config(find_config(self.config))
            return open_published_reader(self.model, self.tokenizer, config, row.corpus)

        made_of = part.of_folders(self.model, self.tokenizer, text=self.config)
        return row.model("fusion_reader", made_of, load)


@dataclasses.dataclass(frozen=True)
class FactsSpec(Part):
    """KAT's knowledge of questions: its authors' files, see benchmarks/okvqa.py."""

    reads: ClassVar = ("entities", "answers")
    turn: ClassVar = "file"
    materials: ClassVar = (
        Material(
            "KAT's okvqa.zip, entities of Wikidata and answers of GPT-3", "Gui et al., NAACL 2022"
        ),
    )

    entities: str = ""  # explicit knowledge; "": none
    answers: str = ""  # implicit knowledge; "": none

    def open(self, row: OpenedParts) -> Any:
        """The knowledge; UserError for a file that is malformed."""
        from mmqa_jax.benchmarks.okvqa import KATKnowledge

        return KATKnowledge(self.entities, self.answers)


@dataclasses.dataclass(frozen=True)
class MultimodalT5Spec(Part):
    """A stage of Multimodal-CoT."""

    reads: ClassVar = ("model", "vectors", "names")
    answers: ClassVar = True

    model: str  # workdir of a multimodal_cot run, or mm-cot's folder, published or converted
    # vectors, names: of the questions' pictures, see data/pictures/store.py.
    vectors: str
    names: str = ""

    def open(self, row: OpenedParts) -> Any:
        """Opens the model that writes texts about the questions."""
        from mmqa_jax.inference.t5_readers import open_multimodal_writer

        writer = open_multimodal_writer(self.model, PictureVectors(self.vectors, self.names))
        row.on_model(Path(self.model).name)("model", writer)
        return writer


# The parts by their names in a row's section `parts`.
PARTS: Mapping[str, type[Part]] = {
    "retriever": RetrieverSpec,
    "reranker": RerankerSpec,
    "reader": ReaderSpec,
    "fusion_reader": FusionReaderSpec,
    "facts": FactsSpec,
    "rationale_model": MultimodalT5Spec,
    "answer_model": MultimodalT5Spec,
    "llm": LLMSpec,
    "planner": PlannerSpec,
    "library": LibrarySpec,
    "heuristics": HeuristicsSpec,
    "finished": FinishedSpec,
    "knowledge": KnowledgeSpec,
    "captions": CaptionsSpec,
}
LLMS = ("llm", "planner")  # those that are language models
_BY_LLM: Mapping[str, type[Part]] = {"reader": LLMReaderSpec, "reranker": LLMRerankerSpec}


def kinds_of_parts(
    taken: Mapping[str, bool], parts: Mapping[str, Any]
) -> dict[str, tuple[type[Part], bool]]:
    """The dataclass of each of a row's parts, and whether the part is needed.

    `taken` are the parts that the row's setting takes, `parts` is the row's section. Of a row with
    `parts.llm`, a reader or reranker without a trained `model` is its language model.
    """
    kinds = {name: (PARTS[name], needed) for name, needed in taken.items()}
    if "llm" in parts and "llm" not in taken:
        named = [name for name in _BY_LLM if name in taken and is_section(parts.get(name))]
        by_llm = [name for name in named if "model" not in parts[name]]
        kinds |= {name: (_BY_LLM[name], taken[name]) for name in by_llm}
        kinds |= {"llm": (LLMSpec, False)} if by_llm else {}
    return kinds
