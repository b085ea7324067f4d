"""Key words of a text, by RAKE (Rose et al., 2010, "Automatic keyword extraction").

A candidate is a run of words between stop words and punctuation. A word scores its degree (the
words of the candidates that it stands in) over its frequency, and a candidate the sum over its
words, so that "powdery slope" is before "slope".
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import regex

from mmqa_jax.data.text_analysis import folded

_WORD_OR_END = regex.compile(r"\w+(?:['’-]\w+)*|[^\w\s]")
# Words that name nothing: English function words, words of questions, and verbs without content.
_NAMELESS = """
a an the this that these those some any each every all both no not none such other another
i me my we us our you your he him his she her it its they them their one ones someone something
who whom whose what which when where why how there here
about above across after against along among around as at away back before behind below beneath
beside besides between beyond by down during for from in inside into near next of off on onto
out outside over past per since through to toward towards under until up upon via with within
without
and but if nor or so than then though while because whether
am is are was were be been being do does did doing done have has had having can could may might
must shall should will would
get gets getting go goes going make makes making made take takes taking put puts putting use
uses used using call calls called come comes coming name names named show shows shown
kind kinds sort sorts type types many much more most few less lot lots very too also just only
yes like image picture photo
"""
_STOP = frozenset(_NAMELESS.split())


def key_words_of(texts: Sequence[str], count: int) -> list[str]:
    """The `count` best candidates of several texts, in lower case and in the texts' order.

    Of equal ones the first. Fewer where the texts have fewer; none in texts of stop words alone.
    """
    candidates = [run for text in texts for run in _runs(folded(text))]
    frequency = collections.Counter(word for run in candidates for word in run)
    degree: collections.Counter[str] = collections.Counter()
    for run in candidates:
        for word in run:
            degree[word] += len(run)
    unique = list(dict.fromkeys(candidates))
    scores = {run: sum(degree[word] / frequency[word] for word in run) for run in unique}
    best = set(sorted(unique, key=lambda run: -scores[run])[:count])
    return [" ".join(run) for run in unique if run in best]


def _runs(text: str) -> list[tuple[str, ...]]:
    """The longest runs of words without a stop word or a mark between them."""
    runs: list[tuple[str, ...]] = []
    run: list[str] = []
    for word in [*_WORD_OR_END.findall(text), "."]:
        if word in _STOP or not word[0].isalnum():
            if run:
                runs.append(tuple(run))
            run = []
        else:
            run.append(word)
    return runs
