"""All cases, in the order of the table."""

from tests.fuzz_scorers import (
    mathvista_cases,
    mmbench_cases,
    mmmu_cases,
    retrieval_cases,
    scienceqa_cases,
    text_cases,
    vqa_cases,
    webqa_cases,
)
from tests.fuzz_scorers.case import Case

CASES: tuple[Case, ...] = (
    *vqa_cases.CASES,
    *webqa_cases.CASES,
    *scienceqa_cases.CASES,
    *mmbench_cases.CASES,
    *mmmu_cases.CASES,
    *mathvista_cases.CASES,
    *text_cases.CASES,
    *retrieval_cases.CASES,
)
