"""Words of every script: forms of the same letters, scripts without spaces, stems, questions."""

import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmqa_jax.data.corpus import Corpus
from mmqa_jax.data.schema import Question, Source
from mmqa_jax.data.text_analysis import Analyzer, Vocabulary, split_words
from mmqa_jax.retrieval.bm25.in_memory import BM25, BM25Retriever
from tests.refusals import refuses

FORMS = ("NFC", "NFD", "NFKC", "NFKD")


@given(st.text(st.characters(max_codepoint=127)))
def test_words_of_ascii_are_those_of_the_pattern(text):
    assert split_words(text) == re.findall(r"\w+", text.lower())


@settings(max_examples=300)
@given(st.text(), st.sampled_from(FORMS))
def test_words_do_not_depend_on_the_form(text, form):
    """Of any text, written as one of Unicode's four normalization forms."""
    assert split_words(unicodedata.normalize(form, text)) == split_words(text)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("Clean the ﬁlter", "clean the filter"),
        ("fil\u00adter zero\u200bwidth", "filter zerowidth"),
        ("ＡＢＣ１２３ ｱﾊﾟｰﾄ", "abc123 アパート"),
        ("STRASSE İSTANBUL ΣΊΣΥΦΟΣ", "straße istanbul σίσυφος"),
        (unicodedata.normalize("NFD", "Café Müller hà"), "café müller hà"),
    ],
)
def test_forms_of_the_same_words(text, same):
    assert split_words(text) == split_words(same)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("हिन्दी विकिपीडिया", ["हिन्दी", "विकिपीडिया"]),  # marks belong to their words
        ("தமிழ் மொழி", ["தமிழ்", "மொழி"]),
        (
            "富士山の3776メートル",
            ["富", "士", "山", "富士", "士山", "の", "3776", "メー", "ート", "トル"],
        ),
        ("เมือง", ["เมื", "มือ", "อง"]),  # letters with their vowels and tones
        ("필터는", ["필터", "터는"]),
        ("abc中文def", ["abc", "中", "文", "中文", "def"]),
    ],
)
def test_words_of_scripts(text, words):
    assert split_words(text) == words


# Sentences of Wikipedia's first lines about these places, and words of questions about one.
@pytest.mark.parametrize(
    ("first", "second", "question"),
    [
        ("富士山の高さは3776メートルです。", "琵琶湖は日本一大きい湖です。", "琵琶湖とは？"),
        ("上海是中国最大的城市。", "北京是中国的首都。", "中国的首都是哪里？"),
        ("เชียงใหม่อยู่ทางเหนือ", "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย", "เมืองหลวง"),
        ("ຫຼວງພະບາງຢູ່ທາງເໜືອ", "ວຽງຈັນເປັນນະຄອນຫຼວງຂອງລາວ", "ວຽງຈັນຢູ່ໃສ"),
        ("សៀមរាបនៅភាគខាងជើង", "ភ្នំពេញជារាជធានីរបស់កម្ពុជា", "រាជធានីគឺអ្វី"),
        ("မန္တလေးသည်မြောက်ပိုင်းတွင်ရှိသည်", "ရန်ကုန်သည်အကြီးဆုံးမြို့ဖြစ်သည်", "အကြီးဆုံးမြို့"),
        ("부산은 항구 도시이다.", "서울은 한국의 수도이다.", "수도가 어디인가?"),
        ("दलाल लाल है", "दिल्ली भारत की राजधानी है", "दिल्ली"),
    ],
)
def test_bm25_finds_what_is_asked_in_any_script(first, second, question):
    rows, scores = BM25([first, second]).search([question], 1)
    assert (rows.item(), scores.item() > 0) == (1, True)


def test_a_word_that_asks_is_no_evidence():
    texts = ["Checklist of the WHO for clean hands.", "La Gioconda, by Leonardo"]
    corpus = Corpus([Source(f"s{n}", "text", text) for n, text in enumerate(texts)])
    asked = [Question("q", "", "Who painted the Mona Lisa?"), Question("r", "", "The WHO?")]
    found = BM25Retriever(corpus, BM25(texts, asks=True)).search(asked, 2)
    assert [ranking.sources for ranking in found] == [(), ("s0",)]  # unless nothing else is asked
    assert BM25Retriever(corpus).search(asked, 2)[0].sources == ("s0",)  # as published rows do


def test_stems_and_stop_words_of_a_language():
    german = Analyzer("german", stemming=True)
    assert german.words("Die Filter der Pumpe") == ["filt", "pump"]
    assert german.question_words("Welche Pumpen sind das?") == ["pump"]
    texts = ["Die Pumpen werden gereinigt.", "Das Ventil ist zu."]
    asked = ["Wie wird die Pumpe gereinigt?"]
    assert BM25(texts, analyzer=german).search(asked, 2)[0].tolist() == [[0, -1]]
    vocabulary = Vocabulary(german)
    numbers, rows = vocabulary.numbered(["Pumpe, die Pumpen", "Filter"])
    assert [vocabulary.names[n] for n in numbers] == ["pump", "pump", "filt"]
    assert rows.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"language": "klingon"}, "no stop words of it; name one of .*german"),
        ({"language": "chinese", "stemming": True}, "no stemmer of it; name one of .*german"),
    ],
)
def test_languages_that_are_not_known(options, message):
    refuses(message, Analyzer, **options)
