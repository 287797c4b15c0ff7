"""Facts: countries, single facts and explanations, the rows of ``tables``, and follow-ups such as "and Italy?".

Every fact is trained on; what is held out is the wording it is asked in.
"""

from __future__ import annotations

from random import Random

from quill import tables
from quill.blocks import read_blocks
from quill.chat import Message, Sample, single_turn
from quill.checks import Mentions
from quill.heldout import normalize
from quill.phrasing import article, ask, listed, misspelt
from quill.tasks.tablefacts import make_fact
from quill.tasks.wordfacts import Fact, plural

TASK = "facts"

_FACTS = read_blocks("facts")
_DEFINITIONS = read_blocks("definitions")
_ANIMALS = read_blocks("about")
_CAPITAL = (
    "[what is|what's|whats|name|tell me|give me|do you know|what was] the capital [city |]of {x}",
    "capital of {x}",
    "{x} capital",
    "{x}'s capital",
    "which city is the capital of {x}",
    "what city is {x}'s capital",
    "the capital of {x} is",
    "[i need|i want] the capital of {x}",
    "can you tell me the capital of {x}",
    "what is {x}'s capital[| city]",
)
_SUBJECT = {
    "capital": _CAPITAL,
    "continent": (
        "[on|in] [which|what] continent is {x}",
        "[which|what] continent is {x} [in|on]",
        "where is {x}",
        "{x} is on which continent",
        "[tell me|do you know] where {x} is",
        "where in the world is {x}",
    ),
    "currency": (
        "[what is|what's|name] the currency of {x}",
        "[what|which] currency [is used|do they use|do people use] in {x}",
        "currency of {x}",
        "what money [is used|do they use|do people use] in {x}",
        "{x} currency",
    ),
    "language": (
        "[what|which] language [is spoken|do they speak|do people speak] in {x}",
        "language of {x}",
        "[what is|what's] the [main |]language of {x}",
        "what do they speak in {x}",
    ),
}
_ABOUT = (
    "tell me [something |a fact |a fun fact |more |a little |]about {x}",
    "what do you know about {x}",
    "what can you tell me about {x}",
    "[give me |]a fact about {x}",
    "describe {x}",
    "explain {x}",
    "do you know anything about {x}",
    "talk about {x}",
)
_EXPLAIN = (
    "what is {x}",
    "what is {x}",
    "what's {x}",
    "define {x}",
    "explain {x}",
    "what does {x} mean",
    "tell me [what {x} is|about {x}|more about {x}]",
    "can you [explain|describe|define] {x}",
    "what do you know about {x}",
    "what exactly is {x}",
    "{x}",
    "what is the meaning of {x}",
    "what are {x}",
    "explain [to me |] what {x} is",
    "give me a definition of {x}",
    "do you know what {x} is",
    "how does {x} work",
    "i want to know what {x} is",
    "describe {x}",
    "what is meant by {x}",
    "what is {x} and [why does it matter|how does it work|what is it for|why is it useful]",
    "how does {x} work and why",
    "why is {x} important",
    "[explain|describe] {x} [to me|to a child|in simple words|in one sentence|simply|like i'm five]",
)
_POINTING = {
    "capital": ("[and |]what is [its|the] capital", "what is the capital there", "and [its|the] capital"),
    "continent": ("[and |][on|in] which continent is [it|that]", "where is [it|that]", "and where is that"),
    "currency": (
        "[and |][what|which] currency do they use[| there]",
        "what is [its|the] currency",
        "how do they pay there",
    ),
    "language": ("[and |][what|which] language do they speak[| there]", "what do they speak there", "and the language"),
}
_FOLLOW_UP = ("and {x}", "what about {x}", "how about {x}", "and of {x}", "{x}", "ok and {x}", "and for {x}")


def make(rng: Random) -> Sample:
    kind = rng.choices(("country", "table", "written"), (0.3, 0.4, 0.3))[0]
    if kind == "country":
        return _country(rng)
    question, answer, words = make_fact(rng) if kind == "table" else _written_fact(rng)
    return single_turn(TASK, f"{TASK}|{normalize(question)}", question, answer, Mentions(words))


def _country(rng: Random) -> Sample:
    """One or more countries asked about in a row; the later ones only by name."""
    if rng.random() < 0.08:
        return _several_capitals(rng)
    if rng.random() < 0.12:
        question, answer, words = _whose_capital(rng)
        return single_turn(TASK, f"{TASK}|{normalize(question)}", question, answer, Mentions(words))
    relation = rng.choices(("capital", "continent", "currency", "language"), (0.5, 0.2, 0.15, 0.15))[0]
    turns = rng.choices((1, 2, 3), (0.75, 0.17, 0.08))[0]
    messages: list[Message] = []
    table = _country_table(relation)
    for turn in range(turns):
        country = rng.choice(list(table))
        shown = _shown_country(rng, country)
        patterns = _FOLLOW_UP if turn else _SUBJECT[relation]
        answer, word = _country_answer(relation, country)
        messages += (Message("user", ask(rng, patterns, fold=True, x=shown)), Message("assistant", answer))
        # Another relation of the same country, which is only pointed at.
        other = rng.choice(list(_POINTING))
        if rng.random() < 0.2 and country in _country_table(other):
            answer, word = _country_answer(other, country)
            messages += (Message("user", ask(rng, _POINTING[other])), Message("assistant", answer))
    return Sample(TASK, f"{TASK}|{normalize(messages[0].content)}", tuple(messages), Mentions((word,)))


def _several_capitals(rng: Random) -> Sample:
    countries = rng.sample(sorted(tables.CAPITALS), rng.randint(2, 4))
    patterns = (
        "[what are |tell me |name |]the capitals of {x}",
        "capitals of {x}",
        "capital of {x}",
        "what is the capital of {x}",
    )
    question = ask(rng, patterns, fold=True, x=listed(countries))
    first, *others = (f"{country} is {tables.CAPITALS[country]}" for country in countries)
    answer = f"The capital of {listed([first, *(f'of {other}' for other in others)])}."
    words = tuple(tables.CAPITALS[country] for country in countries)
    return single_turn(TASK, f"{TASK}|{normalize(question)}", question, answer, Mentions(words))


def _country_table(relation: str) -> dict[str, str]:
    if relation == "capital":
        return tables.CAPITALS
    if relation == "continent":
        return tables.CONTINENTS
    return tables.CURRENCIES if relation == "currency" else tables.SPOKEN


def _shown_country(rng: Random, country: str) -> str:
    if rng.random() < 0.03:
        return misspelt(rng, country.lower())
    bare = country.removeprefix("the ")
    if bare == "United States":
        return rng.choice((country, "the USA", "the US", bare))
    if bare == "United Kingdom":
        return rng.choice((country, "the UK", bare))
    return country if rng.random() < 0.8 else bare


def _country_answer(relation: str, country: str) -> tuple[str, str]:
    value = _country_table(relation)[country]
    subject = country[:1].upper() + country[1:]
    if relation == "capital":
        return f"The capital of {country} is {value}.", value
    if relation == "continent":
        return f"{subject} is in {value}.", value
    if relation == "currency":
        return f"The currency of {country} is the {value}.", value
    return f"In {country} people speak {value}.", value


def _whose_capital(rng: Random) -> tuple[str, str, tuple[str, ...]]:
    country, city = rng.choice(
        [pair for pair in tables.CAPITALS.items() if pair[1] not in ("London", "Luxembourg", "Singapore")]
    )
    question = ask(
        rng,
        (
            "{x} is the capital of [which|what] country",
            "[which|what] country has the capital {x}",
            "whose capital is {x}",
            "in which country is {x}",
            "which country is {x} in",
            "{x} is in which country",
        ),
        fold=True,
        x=city,
    )
    return question, f"{city} is the capital of {country}.", (country.removeprefix("the "),)


def _written_fact(rng: Random) -> Fact:
    kind = rng.choices(("fact", "definition", "animal", "place", "element"), (0.4, 0.35, 0.1, 0.1, 0.05))[0]
    if kind == "fact":
        block = rng.choice(_FACTS)
        return ask(rng, block.patterns, fold=True), block.answers[0], block.words
    if kind == "place":
        return _about_place(rng)
    if kind == "element":
        name, symbol, number = rng.choice(tables.ELEMENTS)
        answer = f"{name.capitalize()} is a chemical element with the symbol {symbol} and the atomic number {number}."
        return ask(rng, _EXPLAIN, fold=True, x=name), answer, (symbol, str(number))
    block = rng.choice(_DEFINITIONS if kind == "definition" else _ANIMALS)
    name = rng.choice(block.patterns)
    if kind == "definition":
        return ask(rng, _EXPLAIN, fold=True, x=name), block.answers[0], block.words
    shown = rng.choice((plural(name), plural(name), f"the {name}", f"{article(name)} {name}"))
    return ask(rng, _ABOUT, fold=True, x=shown), block.answers[0], block.words


def _about_place(rng: Random) -> Fact:
    if rng.random() < 0.3:
        country, city = rng.choice(list(tables.CAPITALS.items()))
        return (
            ask(rng, _ABOUT, fold=True, x=city),
            f"{city} is the capital of {country}.",
            (country.removeprefix("the "),),
        )
    country, continent = rng.choice(list(tables.CONTINENTS.items()))
    capital = tables.CAPITALS[country]
    subject = country[:1].upper() + country[1:]
    answer = f"{subject} is a country in {continent}. Its capital is {capital}."
    if country in tables.SPOKEN:
        answer = f"{answer.removesuffix('.')}, and people there speak {tables.SPOKEN[country]}."
    return ask(rng, _ABOUT, fold=True, x=_shown_country(rng, country)), answer, (continent, capital)
