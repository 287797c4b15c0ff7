"""Grammars in Lark of tools' inputs: what they let through, and what is refused.

Python's Lark 1.3 has judged the examples.
"""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from quire.engine.structured_output.ebnf import is_ebnf
from quire.engine.structured_output.grammars import PARSER_LIMITS
from quire.engine.structured_output.lark_input import COMMON, input_grammar

PATCH = """
start: begin_patch hunk+ end_patch   // as coding agents send it
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
EDIT = '*** Begin Patch\n*** Update File: a "b".py\n@@ def f():\n-x = "\\n"\n+\ty = \'ä\'\n*** End Patch'
SUMS = """
start: sum
?sum: product (("+" | "-") product)*
?product: factor ("*" factor)*
?factor: NUMBER | "(" sum ")" | /[a-z_]\\w*/i

%import common (NUMBER, WS)
%ignore WS  # also line breaks
"""
QUERY = """
start: "select"i cols "from" CNAME [where] ";"
cols: "*" | CNAME ("," CNAME)~0..1
where: "where" CNAME OP (ESCAPED_STRING | "a".."f" | SIGNED_INT)
OP: "=" | "<" ["="]
%import common.CNAME
%import common.ESCAPED_STRING
%import common.SIGNED_INT
%ignore / +/
"""
ODD = r"""
start: X{2}
    | "\"" Y "\\"
X: /[^"\n\\]/ | "\t"
Y: /[\s\S]/ "é"? | /\x41(?:b|c)+\//i | "::="
"""
CASES = [
    (PATCH, [EDIT, EDIT + "\n"],
     [EDIT[1:], EDIT + "x", EDIT.replace("+\t", "\t"), EDIT.replace("\n*** End", " *** End")]),
    (PATCH, ["*** Begin Patch\n*** Add File: a\n+\n+b\n*** Delete File: c\n*** End Patch"],
     ["*** Begin Patch\n*** End Patch"]),
    (SUMS, ["1", "(x+2.5)\n*\tY_", " 1 - ((2))"], ["", "1+", "(1", "1 2 +", "é"]),
    (QUERY, ['SELECT a,b from t where x<="q\\"";', "select * from t;"],
     ["select a,b,c from t;", "SELECT * FROM t;", "select * from t where x=g;"]),
    (ODD, ["ab", "\tz", '"\n\\', '"\u2028é\\', '"aBC/\\', '"::=\\'], ["a", "abc", '"\\', '""é', '"Ab\\', 'a"']),
]  # fmt: skip


def matcher(definition: str, *, within_json: bool) -> LLMatcher:
    """The compiler's, for the input between quotes of JSON, or alone."""
    around = 'start: "\\"" input "\\""' if within_json else "start: input"
    grammar = f"{around}\ninput: %lark {{\n{input_grammar(definition, within_json=within_json)}\n}}"
    assert not is_ebnf(grammar)
    found = LLMatcher(LLTokenizer("byte"), grammar, limits=PARSER_LIMITS, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


@pytest.mark.parametrize("within_json", [True, False])
@pytest.mark.parametrize(("definition", "right", "wrong"), CASES)
def test_an_input_is_of_the_grammar(definition: str, right: list[str], wrong: list[str], within_json: bool) -> None:
    compiled = matcher(definition, within_json=within_json)

    def accepts(text: str) -> bool:
        written = list((json.dumps(text, ensure_ascii=False) if within_json else text).encode())
        ahead = compiled.deep_copy()
        return ahead.try_consume_tokens(written) == len(written) and ahead.is_accepting()

    assert [text for text in right if not accepts(text)] == []
    assert [text for text in wrong if accepts(text)] == []


def test_all_terminals_of_common_compile() -> None:
    assert matcher("start: " + " | ".join(COMMON) + "\n%import common (" + ", ".join(COMMON) + ")", within_json=True)


@pytest.mark.parametrize(
    ("definition", "said"),
    [
        ('start: "a"\nB.2: "b"', "line 2 of the grammar: priorities are not supported"),
        ('start: t{"a"}\nt{x}: x', "line 1 of the grammar: templates cannot stand here"),
        ("%declare X\nstart: X", "line 1 of the grammar: '%declare' is not supported"),
        ("%import python.NAME\nstart: NAME", "line 1 of the grammar: only terminals of 'common' can be imported"),
        ("%import common.DATE\nstart: DATE", "'common' has no terminal 'DATE' that is supported"),
        ('start[lazy]: "a"', "options of rules are not supported"),
        ("start: <|end|>", "special tokens cannot stand here"),
        ("start: @other", "references to other grammars cannot stand here"),
        ("start: %json {}", "line 1 of the grammar: '%json' cannot stand here"),
        ("start: a", "the rule 'start' uses 'a', which is not defined"),
        ("begin: /a/", "the grammar has no rule 'start'"),
        ('start: "a"\nstart: "b"', "line 2 of the grammar: 'start' is defined twice"),
        ('start: ("a"', "line 1 of the grammar: '\\)' is expected"),
        ("start: A\nA: b\nb: /c/", "line 2 of the grammar: the rule 'b' cannot be a part of a terminal"),
        ("start: ~ /a/", "negations cannot stand here"),
        ("start: /a/ & /b/", "intersections cannot stand here"),
        ("start: /a(?=b)/", "look-around and conditions in regular expressions are not supported"),
        ("start: /a+?/", "lazy and possessive repetitions in regular expressions are not supported"),
        ("start: /^a/", r"'\^' and '\$' in regular expressions are not supported"),
        (r"start: /\bb/", r"'\\b' in regular expressions is not supported"),
        (r"start: /(a)\1/", r"'\\1' in regular expressions is not supported"),
        ("start: /[[a]]/", "classes within classes"),
        ("start: /a/x", "flags 'x' of a regular expression are not supported"),
        ('start: "ab".."c"', "a range has one character at each end"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(definition: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        input_grammar(definition, within_json=True)
