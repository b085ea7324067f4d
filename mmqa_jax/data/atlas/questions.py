"""Atlas's questions: on texts, on one flag or two, on emoji; their splits, and which are kept."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from mmqa_jax.data.atlas import factbook
from mmqa_jax.data.atlas.factbook import Country, Snippet
from mmqa_jax.data.atlas.pictures import COLORS, FlagFacts, Picture, color_map, color_shares, decode

SPLITS = ("train", "val", "test")


@dataclasses.dataclass(slots=True)
class Draft:
    """One question before its negatives are mined."""

    question: str  # its text
    answers: list[str]  # reference wordings, the main one first
    keywords: str  # the answer's key words
    category: str  # WebQA category
    template: str  # which template made it
    topic: str  # `flag`, `emoji`, or the fact's field of knowledge
    positives: list[tuple[str, int]]  # gold sources: ("t", snippet row) or ("i", picture row)
    group: tuple[str, ...]  # the countries or pictures it is about; they fix its split
    hops: int = 1  # gold sources that must be chained, 1 or 2
    # Strings in question, answer and sources that entity replacement may exchange; the country's
    # names first.
    entities: list[str] = dataclasses.field(default_factory=list)
    palette_safe: bool = False  # whether `permute_palette` keeps the answer true
    # Further sources that must not be its negatives, as they give the answer too.
    banned: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    split: str = ""  # `train`, `val` or `test`


@dataclasses.dataclass(frozen=True, slots=True)
class Subject:
    """A picture that questions are about: its row in the corpus and its group (see Draft).

    Only flags have `facts`.
    """

    row: int
    picture: Picture
    group: str
    facts: FlagFacts | None = None

    @property
    def name(self) -> str:
        return self.picture.name


def random_stream(seed: int, stage: int, name: str) -> np.random.Generator:
    """Random numbers for one kind of question; a change to one kind leaves the others alone."""
    return np.random.default_rng([seed, stage, *name.encode()])


def wordings(frames: Sequence[str], rng: np.random.Generator, **values: str) -> list[str]:
    """All frames filled in, in an order drawn from `rng`; each begins with a capital."""
    filled = [frame.format(**values) for frame in frames]
    return [filled[i][0].upper() + filled[i][1:] for i in rng.permutation(len(filled))]


def picture_draft(
    subjects: Sequence[Subject],
    rng: np.random.Generator,
    wording: str,
    keywords: str | bool,
    *,
    template: str = "",
    **values: str,
) -> Draft:
    """A question about one or two pictures.

    Args:
      wording: section of picture_questions.toml, which names the values.
      keywords: the answer; True and False are yes and no.
      template: the draft's, if not `wording`.
    """
    section = factbook.load("picture_questions")[wording]
    if isinstance(keywords, bool):
        keywords = "yes" if keywords else "no"
        answers = [f"{keywords.capitalize()}, {text}" for text in section[keywords]]
    else:
        answers = section["answers"]
    names = [subject.name for subject in subjects]
    values |= {"X": names[0], "A": names[0], "B": names[-1], "k": keywords}
    topic = subjects[0].picture.kind
    answers = wordings(answers, rng, **values)
    return Draft(
        question=wordings(section["questions"], rng, **values)[0],
        answers=answers,
        keywords=keywords,
        category=section["category"],
        template=template or wording,
        topic=topic,
        positives=[("i", subject.row) for subject in subjects],
        group=tuple(subject.group for subject in subjects),
        entities=names if topic == "flag" else [],
        palette_safe=topic == "flag",
    )


# --- On texts ------------------------------------------------------------------------------------

# Facts that no second hop asks for: they are other names of the country.
_NAMING = frozenset({"long_form", "local_name", "former", "name_meaning", "capital_meaning"})


def one_hop(
    countries: list[Country], snippets: list[Snippet], rng: np.random.Generator
) -> list[Draft]:
    """One draft for every fact of every snippet."""
    by_code = {c.code: c for c in countries}
    return [
        _draft(by_code[snippet.country], name, answer, [row], rng)
        for row, snippet in enumerate(snippets)
        for name, answer in snippet.facts.items()
    ]


def two_hop(
    countries: list[Country], snippets: list[Snippet], rng: np.random.Generator
) -> list[Draft]:
    """Drafts that describe a country by its capital, anthem, peak, former name or internet code.

    A bridge must be the fact of one country alone and must not name the country, and the two
    snippets must need each other: neither holds the other's answer.
    """
    by_code = {c.code: c for c in countries}
    unique = _unique_bridges(countries, snippets)
    rows: dict[str, list[int]] = collections.defaultdict(list)
    for row, snippet in enumerate(snippets):
        if snippet.facts:
            rows[snippet.country].append(row)
    return [
        _draft(by_code[code], name, answer, [first, second], rng, bridge)
        for code, country_rows in rows.items()
        for first in country_rows
        for bridge in snippets[first].facts.items()
        if bridge in unique
        for second in country_rows
        if first != second and bridge[1] not in snippets[second].text
        for name, answer in snippets[second].facts.items()
        if answer not in snippets[first].text and name not in _NAMING
    ]


def _draft(
    country: Country,
    name: str,
    answer: str,
    rows: list[int],
    rng: np.random.Generator,
    bridge: tuple[str, str] | None = None,
) -> Draft:
    """A question for the fact `name`; `bridge` (fact, its answer) describes the country."""
    fact = factbook.facts()[name]
    subject, names = country.the_name, [answer] if fact.name_like else []
    if bridge is not None:
        first = factbook.facts()[bridge[0]]
        subject = first.bridges[int(rng.integers(len(first.bridges)))].format(b=bridge[1])
        names += [bridge[1]] if first.name_like else []
    question = wordings(fact.questions, rng, X=subject)[0]
    entities = [country.the_name]
    for entity in names:
        if entity[0].isupper() and entity not in entities and entity != country.name:
            entities.append(entity)
    # Full sentences first: the main answer names what it is about.
    answers = wordings(fact.answers[:2], rng, X=country.the_name, a=answer)
    return Draft(
        question=question,
        answers=answers + wordings(fact.answers[2:], rng, X=country.the_name, a=answer),
        keywords=answer,
        category="text",
        template=f"{bridge[0]}>{name}" if bridge else name,
        topic=fact.topic,
        positives=[("t", row) for row in rows],
        group=(country.code,),
        hops=len(rows),
        entities=entities,
    )


def _unique_bridges(countries: list[Country], snippets: list[Snippet]) -> set[tuple[str, str]]:
    """The (fact, answer) pairs that one country alone has and that do not name it."""
    name_of = {c.code: c.name.lower() for c in countries}
    holders: dict[tuple[str, str], set[str]] = collections.defaultdict(set)
    for snippet in snippets:
        for fact, value in snippet.facts.items():
            if factbook.facts()[fact].bridges:
                holders[fact, value].add(snippet.country)
    all_names = sorted(name_of.values(), key=len, reverse=True)
    named = re.compile(r"(?<!\w)(" + "|".join(map(re.escape, all_names)) + r")(?!\w)")
    return {
        (fact, value)
        for (fact, value), codes in holders.items()
        if len(codes) == 1
        and len(value) >= 3
        and not named.search(value.lower())
        and not _suggests(value, name_of[next(iter(codes))])
    }


def _suggests(value: str, country: str) -> bool:
    """Whether `value` holds the start of a word of the country's name (`Russian Empire`)."""
    common = factbook.load("names")["common_words"]
    stems = {w[:4] for w in re.findall(r"\w{4,}", country) if w not in common}
    return any(stem in value.lower() for stem in stems)


# --- On one flag ---------------------------------------------------------------------------------

# Colors of yes/no questions; the others are in hardly any flag.
QUESTION_COLORS = ("red", "white", "blue", "green", "yellow", "black", "orange", "brown")


def color_questions(flag: Subject, rng: np.random.Generator) -> list[Draft]:
    """Main color, stripes, corners, center, and the list of all colors."""
    facts, drafts = flag.facts, []
    ask = functools.partial(picture_draft, [flag], rng)
    if facts.main:
        drafts.append(ask("main_color", facts.main))
    for place, color in stripe_places(facts).items():
        drafts.append(ask("stripe", color, template=f"{place}_stripe", p=place))
    for place, color in facts.corners.items():
        drafts.append(ask("corner_color", color, p=place))
    if facts.center:
        drafts.append(ask("center_color", facts.center))
    if facts.clear and 2 <= len(facts.present) <= 4:
        *others, last = facts.present
        listing = f"{', '.join(others)} and {last}"
        drafts.append(ask("color_list", " ".join(facts.present), list=listing))
    return drafts


def stripe_places(facts: FlagFacts) -> dict[str, str]:
    """Position -> color of the stripes that can be named: `top`, `left`, `center`, ..."""
    if not facts.stripes or (facts.direction == "vertically" and not facts.whole):
        return {}
    first, last = ("top", "bottom") if facts.direction == "horizontally" else ("left", "right")
    places = {first: facts.stripes[0], last: facts.stripes[-1]}
    if len(facts.stripes) == 3:
        places["center"] = facts.stripes[1]
    return places


def choose_questions(flag: Subject, rng: np.random.Generator) -> list[Draft]:
    """Is the top stripe red or green? Does the flag show more red or more white?"""
    facts, drafts = flag.facts, []
    ask = functools.partial(picture_draft, [flag], rng)
    places = {f"{p} stripe": c for p, c in stripe_places(facts).items()}
    places |= {f"{p} corner": c for p, c in facts.corners.items()}
    for place, color in places.items():
        others = [c for c in QUESTION_COLORS[:6] if c != color]
        near = [c for c in facts.present if c in others]
        other = near[int(rng.integers(len(near)))] if near and rng.random() < 0.7 else None
        other = other or others[int(rng.integers(len(others)))]
        first, two = (color, other) if rng.random() < 0.5 else (other, color)
        drafts.append(ask("place_choice", color, p=place, one=first, two=two))
    shares = facts.shares
    pairs = [
        (a, b) for a in facts.present for b in facts.present
        if shares[a] >= 1.5 * shares[b] and shares[a] - shares[b] >= 0.06
    ]  # fmt: skip
    for index in rng.permutation(len(pairs))[:2]:
        more, less = pairs[index]
        first, two = (more, less) if rng.random() < 0.5 else (less, more)
        drafts.append(ask("more_of", more, one=first, two=two))
    return drafts


def number_questions(flag: Subject, rng: np.random.Generator) -> list[Draft]:
    """How many different colors, how many stripes."""
    facts, drafts = flag.facts, []
    if facts.clear and facts.one_shade:
        drafts.append(picture_draft([flag], rng, "color_count", str(len(facts.present))))
    if facts.whole and facts.one_shade:
        drafts.append(picture_draft([flag], rng, "stripe_count", str(len(facts.stripes))))
    return drafts


def other_questions(flag: Subject, rng: np.random.Generator) -> list[Draft]:
    """Asks which way stripes run and which half holds most of a color."""
    facts, drafts = flag.facts, []
    if facts.whole and facts.direction:
        drafts.append(picture_draft([flag], rng, "stripe_direction", facts.direction))
    for (color, _), half in facts.halves.items():
        drafts.append(picture_draft([flag], rng, "half_of_color", half, c=color))
    return drafts


def yes_no_questions(flag: Subject, rng: np.random.Generator) -> list[Draft]:
    """Whether a color is there, covers most, fills a corner; only where there is no doubt."""
    facts, drafts = flag.facts, []
    ask = functools.partial(picture_draft, [flag], rng)
    for color in QUESTION_COLORS:
        if color in facts.present or facts.absent(color):
            drafts.append(ask("any", color in facts.present, template=f"any_{color}", c=color))
    others = [c for c in facts.present if c != facts.main]
    if facts.main and others:
        for color in (facts.main, others[int(rng.integers(len(others)))]):
            drafts.append(ask("is_main", color == facts.main, c=color))
    for place, color in facts.corners.items():
        wrong = [c for c in QUESTION_COLORS[:6] if c != color]
        near = [c for c in wrong if c in facts.present] or wrong
        options = near if rng.random() < 0.7 else wrong
        claimed = color if rng.random() < 0.5 else options[int(rng.integers(len(options)))]
        drafts.append(ask("is_corner", claimed == color, p=place, c=claimed))
    return drafts


# Category -> the function that drafts its questions about one flag.
FLAG_QUESTIONS = {
    "color": color_questions,
    "choose": choose_questions,
    "number": number_questions,
    "Others": other_questions,
    "YesNo": yes_no_questions,
}


# --- On two flags, and on emoji ------------------------------------------------------------------


def pair_questions(flags: list[Subject], rng: np.random.Generator, rounds: int) -> list[Draft]:
    """Drafts about pairs of flags of one split, `rounds` random partners for each flag."""
    drafts: list[Draft] = []
    for _ in range(rounds):
        for first, partner in zip(flags, rng.permutation(len(flags)), strict=True):
            two = flags[partner]
            if first.picture.digest != two.picture.digest:
                drafts.extend(_about(first, two, rng))
    return drafts


def _about(first: Subject, two: Subject, rng: np.random.Generator) -> list[Draft]:
    a, b, drafts = first.facts, two.facts, []
    ask = functools.partial(picture_draft, [first, two], rng)
    color = QUESTION_COLORS[int(rng.integers(6))]
    holders = [flag for flag in (first, two) if color in flag.facts.present]
    if holders and all(color in f.present or f.absent(color) for f in (a, b)):
        drafts.append(ask("both_contain", len(holders) == 2, c=color))
        if len(holders) == 1:
            holder = holders[0]
            drafts.append(ask("which_contains", holder.picture.title, c=color, W=holder.name))
    shared = [c for c in COLORS if c in a.shares and c in b.shares]
    if shared:
        color = shared[int(rng.integers(len(shared)))]
        more, less = (first, two) if a.shares[color] > b.shares[color] else (two, first)
        big, small = more.facts.shares[color], less.facts.shares[color]
        if big >= 1.6 * small and big - small >= 0.12:
            drafts.append(ask("which_more", more.picture.title, c=color, W=more.name))
    if a.main and b.main:
        drafts.append(ask("same_main", a.main == b.main))
    if a.clear and b.clear:
        common = [c for c in a.present if c in b.present]
        drafts.append(ask("common_count", str(len(common))))
        if len(common) == 1:
            drafts.append(ask("common_color", common[0]))
    return drafts


def emoji_questions(emoji: list[Subject], rng: np.random.Generator) -> list[Draft]:
    """Main-color drafts, then yes/no drafts in pairs of yes and no, of emoji with clear colors.

    White and black are background and outline of every emoji; no question is about them.
    """
    drafts: list[Draft] = []
    yes: dict[str, list[Subject]] = {}
    no: dict[str, list[Subject]] = collections.defaultdict(list)
    for subject in emoji:
        words = subject.name.split()
        if len(words) > 5:
            continue
        shares = color_shares(color_map(decode(subject.picture.png)))
        body = {c: s for c, s in shares.items() if c not in ("white", "black") and s >= 0.004}
        if not body or sum(body.values()) < 0.06:
            continue
        main = max(body, key=lambda c: body[c])
        rest = sum(body.values()) - body[main]
        named = not set(COLORS).isdisjoint(words)
        if body[main] >= 2 * rest and not named:
            drafts.append(picture_draft([subject], rng, "emoji_color", main))
        for color in ("red", "blue", "green", "yellow", "orange", "brown", "gray"):
            if shares.get(color, 0.0) >= 0.03:
                yes.setdefault(color, []).append(subject)
            elif color not in shares and not named:
                no[color].append(subject)
    for color, with_color in yes.items():
        # zip drops what the shorter list has no partner for.
        partners = rng.permutation(len(no[color]))[: len(with_color)]
        for subject, partner in zip(with_color, partners, strict=False):
            for asked, is_there in ((subject, True), (no[color][partner], False)):
                template = f"emoji_any_{color}"
                drafts.append(
                    picture_draft([asked], rng, "emoji_any", is_there, template=template, c=color)
                )
    return drafts


# --- Splits, and which questions are kept --------------------------------------------------------

# Questions of the full benchmark per split, and their shares.
TOTALS = {"train": 8600, "val": 620, "test": 1540}
TEXT_SHARE, TWO_HOP_SHARE = 0.45, 0.28  # of all questions; of the text questions
# Of the picture questions; color takes what the others leave, 30 % or more.
PICTURE_SHARES = {"Others": 0.08, "number": 0.09, "choose": 0.25, "YesNo": 0.28}
TEST_SHARE, VAL_SHARE = 0.2, 0.085  # of the countries
# One template per color: these take only every sixth turn.
_RARE, _RARE_TURN = "emoji_any", 6
# Countries with fewer snippets (uninhabited islands) stay in the train split.
_FEW_SNIPPETS = 25


def split_groups(
    flags: list[Subject],
    emoji: list[Subject],
    countries: list[Country],
    snippet_counts: dict[str, int],
    rng: np.random.Generator,
) -> dict[str, str]:
    """Group (country code or picture key) -> split.

    Countries whose flags are pixel-identical (Romania and Chad) share a split; flags without
    a country follow an identical country's flag, or train.
    """
    by_digest = collections.defaultdict(list)
    for flag in flags:
        by_digest[flag.picture.digest].append(flag.group)
    known = {country.code for country in countries}
    groups = [members for members in by_digest.values() if known & set(members)]
    split: dict[str, str] = {}
    wanted = {"test": round(TEST_SHARE * len(countries)), "val": round(VAL_SHARE * len(countries))}
    for index in rng.permutation(len(groups)):
        members = groups[index]
        size = len(known & set(members))
        name = "train"
        if all(snippet_counts.get(m, 0) >= _FEW_SNIPPETS for m in members if m in known):
            name = next((s for s in ("test", "val") if wanted[s] >= size), "train")
        if name != "train":
            wanted[name] -= size
        split.update(dict.fromkeys(members, name))
    for flag in flags:
        split.setdefault(flag.group, "train")
    names = rng.choice(["train", "val", "test"], size=len(emoji), p=[0.72, 0.06, 0.22])
    split.update({e.group: str(name) for e, name in zip(emoji, names, strict=True)})
    return split


def select(drafts: Iterable[Draft], split: dict[str, str], scale: float, seed: int) -> list[Draft]:
    """The benchmark's questions: TOTALS x `scale`, templates in turn, no question twice.

    Yes/no questions join in pairs of one template, one yes and one no, so that the template
    does not reveal the answer. A category with too few questions leaves its share to color.
    """
    pools: dict[tuple[str, str], dict[str, list[Draft]]] = {}
    for draft in drafts:
        homes = {split[g] for g in draft.group}
        if len(homes) == 1:
            draft.split = homes.pop()
            kind = "two_hop" if draft.hops == 2 else draft.category
            pools.setdefault((draft.split, kind), {}).setdefault(draft.template, []).append(draft)
    chosen: list[Draft] = []
    seen: set[str] = set()
    for name in SPLITS:
        total = round(TOTALS[name] * scale)
        text = round(TEXT_SHARE * total)
        two_hop = round(TWO_HOP_SHARE * text)
        quotas = {"two_hop": two_hop, "text": text - two_hop}
        quotas |= {kind: round(share * (total - text)) for kind, share in PICTURE_SHARES.items()}
        end = len(chosen) + total
        for kind in (*quotas, "color"):
            count = quotas.get(kind, end - len(chosen))
            rng = random_stream(seed, 1, f"{name} {kind}")
            chosen += _take(pools.get((name, kind), {}), count, seen, rng, pairs=kind == "YesNo")
    return chosen


def _take(
    of_template: dict[str, list[Draft]],
    count: int,
    seen: set[str],
    rng: np.random.Generator,
    *,
    pairs: bool,
) -> list[Draft]:
    """`count` drafts, one (or one yes/no pair) of each template in turn."""
    queues = []
    for template in sorted(of_template):
        options = of_template[template]
        drafts = [options[i] for i in rng.permutation(len(options))]
        if pairs:
            yes, no = ([d for d in drafts if d.keywords == word] for word in ("yes", "no"))
            queues.append(list(zip(yes, no, strict=False)))
        else:
            queues.append([(draft,) for draft in drafts])
    queues = [queues[i] for i in rng.permutation(len(queues))]
    taken: list[Draft] = []
    turn = 0
    while queues and len(taken) < count:
        turn += 1
        only_rare = all(map(_is_rare, queues))
        for queue in queues:
            if _is_rare(queue) and turn % _RARE_TURN and not only_rare:
                continue
            while queue and len(taken) < count:
                unit = queue.pop()
                if seen.isdisjoint(draft.question for draft in unit):
                    seen.update(draft.question for draft in unit)
                    taken.extend(unit)
                    break
        queues = [queue for queue in queues if queue]
    return taken


def _is_rare(queue: list[tuple[Draft, ...]]) -> bool:
    return bool(queue) and queue[0][0].template.startswith(_RARE)
