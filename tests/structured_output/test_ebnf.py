"""EBNF as Lark: what the grammar says is what the compiler accepts. JSON's own grammar is judged by `json`."""

from __future__ import annotations

import json
import re

import pytest

from quire.engine.structured_output.ebnf import lark_from_ebnf
from tests.structured_output.accepting import accepts

JSON_GRAMMAR = r"""
# as published with XGrammar and llama.cpp
root ::= ws value ws
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (member (ws "," ws member)*)? ws "}"
member ::= string ws ":" ws value
array ::= "[" ws (value (ws "," ws value)*)? ws "]"
string ::= "\"" characters "\""
characters ::= "" | [^"\\\x00-\x1f] characters | "\\" escape characters
escape ::= ["\\/bfnrt] | "u" [0-9A-Fa-f]{4}
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
ws ::= [ \n\t]*
"""
SQL_GRAMMAR = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


@pytest.mark.parametrize(
    "text",
    [
        "{}", "[]", '{"a": [1, -2.5e+3, "x\\n\\u00e9ü", true, null], "b": {"c": {}}}', '""', "0", " [ 1 ,2 ] ",
        "{", "[1,]", "01", "1.", '"\\x"', '"a', "tru", '{"a" 1}', '{"a":1,}', "[1 2]", '"\n"',
    ],
)  # fmt: skip
def test_jsons_grammar_accepts_what_json_reads(text: str) -> None:
    try:
        json.loads(text)
        expected = True
    except ValueError:
        expected = False
    assert accepts(lark_from_ebnf(JSON_GRAMMAR), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("SELECT col_1  from table_2  where col_2 = 1 ", True),
        ("SELECT col_3  from table_2  where col_2 = 1 ", False),
        ("SELECT col_1  from table_2  where col_2 = 1 2 ", False),
    ],
)
def test_the_grammar_of_vllms_guide(text: str, expected: bool) -> None:
    assert accepts(lark_from_ebnf(SQL_GRAMMAR), text) == expected


@pytest.mark.parametrize(
    ("ebnf", "regex"),
    [
        ('"a"{2,3} "b"?', "a{2,3}b?"),
        ('("a" | "ab") "c"', "(a|ab)c"),
        ("[a-c]{2} [^a-c]", "[a-c]{2}[^a-c]"),
        (r"[\-a\]] [a\-]", r"[\-a\]][a\-]"),
        ("[-x] [x-]", "[-x][x-]"),
        (r'"\x41\u0042\"\\\n"', r'AB"\\\n'),
        (r"[\x41-\u0043]+", "[A-C]+"),
        ('"a" ("b" | ) "c"', "ab?c"),
        ('( "x" | "y" )*', "[xy]*"),
        (".", "."),
        ('"a"{2,}', "a{2,}"),
        ('"é" "日本"', "é日本"),
    ],
)
def test_regular_grammars_are_their_regular_expressions(ebnf: str, regex: str) -> None:
    lark = lark_from_ebnf(f"root ::= {ebnf}")
    texts = [
        "", "a", "aa", "aaa", "aaab", "aaaa", "ac", "abc", "abbc", "abd", "aad", "-a", "]-", "x-", "-x", "xx", "xyx",
        "é日本", 'AB"\\\n', "AB", "ABC", "ABD", "\n", "b",
    ]  # fmt: skip
    assert [text for text in texts if accepts(lark, text)] == [text for text in texts if re.fullmatch(regex, text)]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "(" root ")" | "x"', ["x", "(x)", "((x))"], ["(x", "", "()"]),
        ('root ::= sum\nsum ::= sum "+" term | term\nterm ::= [0-9]+ | "(" sum ")"', ["1", "1+(2+30)"], ["1+", "(1"]),
        ('root ::= "a" root "b" | ""', ["", "ab", "aabb"], ["a", "abb"]),
        ('root ::= item ("," item)*\nitem ::= "[" root "]" | [a-z]', ["a", "a,[b,c]"], ["a,", "[]"]),
        ('root-rule ::= "n"\nroot ::= root-rule "x" # comment\n', ["nx"], ["n"]),
    ],
)
def test_recursive_grammars(grammar: str, good: list[str], bad: list[str]) -> None:
    lark = lark_from_ebnf(grammar)
    assert [text for text in good + bad if accepts(lark, text)] == good


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start ::= "a"', "no rule 'root'"),
        ('root ::= "a" b', "uses 'b', which is not defined"),
        ('root ::= ("a"', r"line 1 of the grammar: '\)' is expected"),
        ('root ::= "a"\nroot ::= "b"', "stands twice"),
        ('root ::= "a', "cannot be read"),
        ('root ::= "a"\n\n ! ::= "b"', "line 3"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "nested more than"),
        ('"a" root ::= "b"', "a rule, as in"),
    ],
)
def test_a_malformed_grammar_is_refused(grammar: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lark_from_ebnf(grammar)


def test_many_chained_rules_are_no_problem() -> None:
    rules = [f'r{i} ::= "a" r{i + 1} | "b"' for i in range(2_000)] + ['r2000 ::= "c"', "root ::= r0"]
    assert lark_from_ebnf("\n".join(rules)).count("\n") == 2_002
