"""`mmqa --print-completion`: bash completes verbs and flags."""

import subprocess

from cli_runs import mmqa

from mmqa_jax.cli import VERBS, make_parser


def test_bash_completes_every_verb_and_every_flag():
    script = mmqa("--print-completion", "bash").out
    completions = "COMP_WORDS=(mmqa {0}); COMP_CWORD={1}; _shtab_mmqa; echo ${{COMPREPLY[*]}}"
    lines = [completions.format("''", 1)]
    lines += [completions.format(f"{verb} --", 2) for verb in VERBS]
    ended = subprocess.run(
        ["bash", "-c", "\n".join([script, *lines])], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    verbs, *flags = ended.stdout.splitlines()
    assert verbs.split() == list(VERBS)
    parsers = make_parser()._subparsers._group_actions[0].choices
    for verb, offered in zip(VERBS, flags, strict=True):
        known = {flag for flag in parsers[verb]._option_string_actions if flag.startswith("--")}
        assert set(offered.split()) == known, verb
