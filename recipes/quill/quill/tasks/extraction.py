"""JSON extraction: asked-for fields of a short text as one JSON object; a field the text does not give is null."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from quill.chat import Json, Sample, dump_json, single_turn
from quill.checks import JsonEquals, JsonKeys
from quill.invention import any_city, any_full_name, any_name, any_word
from quill.phrasing import a_or_an, article, ask, listed
from quill.words import COLOURS, DAYS, FOODS, HOBBIES, JOBS, MONTHS, PLACES, THINGS

TASK = "extraction"

Record = tuple[dict[str, Json], str]  # all fields, and a text that gives them

_FORMS = (
    (
        "[extract|return|get|make|create|give me] [JSON|a JSON object|a JSON] with [the "
        "|][keys|fields|key|field|] {fields} [from|for|out of][:| this text:| the text:|] {text}"
    ),
    "[extract|get] [the |]{fields} as JSON: {text}",
    '[extract|get|find] [the |]{fields} [from the text |]as JSON[:|.] "{text}"',
    "[what are|find] [the |]{fields} in [this text|this sentence|the following], [answer in|use|as] JSON: {text}",
    (
        "[extract|get|find|pull out] {fields} from [this text|the text|this sentence|this|the following "
        "text] as JSON: {text}"
    ),
    "[extract|return|give me] {fields} [as JSON|as a JSON object|in JSON|in JSON format] from [this|the text]: {text}",
    "{text} [extract|return|write|give me] {fields} as JSON",
    "[turn|convert] this [text|] into JSON with the [keys|fields] {fields}: {text}",
    "JSON with {fields}: {text}",
    "extract {fields} as JSON.\n\n{text}",
    "from this text extract {fields}. answer [only in|with] JSON: {text}",
    "extract [the |]{fields}: {text}",
    "get {fields} from: {text}",
    "text: {text}\nfields: {fields}\nanswer in JSON",
    "{text}\n\nextract {fields} as JSON",
)
_KEYS = (
    "name",
    "age",
    "city",
    "color",
    "size",
    "price",
    "id",
    "title",
    "country",
    "count",
    "weight",
    "year",
    "score",
    "level",
    "job",
    "animal",
)
_SYSTEMS = (
    None,
    None,
    None,
    "You extract data. Answer with JSON only.",
    "Answer in JSON.",
    "You are a helpful assistant that replies with JSON.",
    "Reply with one JSON object and nothing else.",
)


def make(rng: Random) -> Sample:
    luck = rng.random()
    if luck < 0.12:
        return _pairs(rng)
    if luck < 0.16:
        return _example(rng)
    record, text = rng.choice(_KINDS)(rng)
    names = list(record)
    chosen = rng.sample(names, rng.randint(min(2, len(names)), len(names)))
    if rng.random() < 0.6:
        chosen.sort(key=names.index)
    if rng.random() < 0.12:
        absent = rng.choice([f for f in ("country", "email", "height", "weight", "brand", "owner") if f not in names])
        chosen.insert(rng.randint(0, len(chosen)), absent)
    shown = rng.choice((listed, ", ".join))(chosen)
    question = ask(rng, _FORMS, end="", fields=shown, text=text, wrap=False)
    answer = dump_json({name: record.get(name) for name in chosen})
    return single_turn(TASK, f"{TASK}|{question}", question, answer, JsonEquals(answer), rng.choice(_SYSTEMS))


def _pairs(rng: Random) -> Sample:
    """Keys and values told one after the other."""
    keys = rng.sample((*_KEYS, any_word(rng), any_word(rng)), rng.randint(1, 4))
    record: dict[str, Json] = {
        key: rng.randint(0, 999) if rng.random() < 0.4 else rng.choice((any_word, any_name))(rng) for key in keys
    }
    link, mark = rng.choice(((" is ", ", "), (" = ", ", "), (": ", ", "), (": ", "\n"), (" is ", " and ")))
    text = mark.join(f"{key}{link}{value}" for key, value in record.items())
    patterns = (
        "[convert|turn|write|put|change] [this |][to|into|as|in] json: {t}",
        "[write|make] [a json object|json] [with|from|for] {t}",
        "{t} as json",
        "json: {t}",
        "make json[:| of this:] {t}",
    )
    answer = dump_json(record)
    question = ask(rng, patterns, end="", t=text, wrap=False)
    return single_turn(TASK, f"{TASK}|{question}", question, answer, JsonEquals(answer), rng.choice(_SYSTEMS))


def _example(rng: Random) -> Sample:
    """An object with made-up values; only its keys are asked for."""
    record = rng.choice(_KINDS)(rng)[0]
    keys = rng.sample(list(record), rng.randint(1, min(3, len(record))))
    patterns = (
        "[give me|write|make|create|show me] [a|an example|an example of a|some] json[| object] with [the keys |]{k}",
        "[give me|write|make] a json object with [a |]{a}",
        "json [example|object] with {k}",
        "example json with {k}",
    )
    with_articles = listed([keys[0], *(a_or_an(key) for key in keys[1:])])
    question = ask(rng, patterns, end=".", k=listed(keys), a=with_articles)
    answer = dump_json({key: record[key] for key in keys})
    return single_turn(TASK, f"{TASK}|{question}", question, answer, JsonKeys(frozenset(keys)))


def _person(rng: Random) -> Record:
    name, age, city, job, hobby = (
        any_full_name(rng),
        rng.randint(5, 95),
        any_city(rng),
        rng.choice(JOBS),
        rng.choice(HOBBIES),
    )
    text = rng.choice(
        (
            f"{name} is {age} years old, lives in {city}, works as {article(job)} {job} and enjoys {hobby}.",
            f"My friend {name} from {city} is {article(job)} {job}. {name} is {age} and likes {hobby}.",
            f"{name}, {age}, {job}, from {city}. Hobby: {hobby}.",
            f"{name}, a {age} year old {job}, lives in {city} and likes {hobby}.",
            f"A {age}-year-old {job} from {city}, {name}, won a prize for {hobby}.",
            f"Hi, I am {name}. I am {age} years old, I live in {city} and I am {article(job)} {job}. I love {hobby}.",
            f"In {city} there is {article(job)} {job} called {name} who is {age} and enjoys {hobby}.",
        )
    )
    return {"name": name, "age": age, "city": city, "job": job, "hobby": hobby}, text


def _order(rng: Random) -> Record:
    name, item, quantity, price = any_full_name(rng), rng.choice(THINGS), rng.randint(1, 60), rng.randint(1, 400)
    colour = rng.choice(COLOURS)
    currency = rng.choice(("dollars", "euros", "pounds"))
    text = rng.choice(
        (
            f"{name} ordered {quantity} pieces of the {colour} {item} for {price} {currency}.",
            f"Order by {name}: {quantity} x {colour} {item}, {price} {currency}.",
            f"Please send {quantity} of the {colour} {item} to {name}. The price is {price} {currency}.",
            f"For {price} {currency} {name} bought the {colour} {item}, {quantity} of them.",
        )
    )
    return {
        "customer": name,
        "item": item,
        "quantity": quantity,
        "price": price,
        "currency": currency,
        "color": colour,
    }, text


def _event(rng: Random) -> Record:
    kind = rng.choice(
        ("concert", "meeting", "party", "lecture", "race", "dinner", "workshop", "wedding", "picnic", "game")
    )
    day, place, city = rng.choice(DAYS), rng.choice(PLACES), any_city(rng)
    time, guests = f"{rng.randint(8, 21):02d}:{rng.choice(('00', '15', '30', '45'))}", rng.randint(2, 300)
    text = rng.choice(
        (
            f"The {kind} is on {day} at {time} in the {place} in {city}, with {guests} guests.",
            f"On {day} at {time} there is a {kind} at the {place} in {city}. {guests} guests will come.",
            f"{city}, {day}, {time}: {kind} in the {place} for {guests} guests.",
            f"We expect {guests} guests at the {kind}. It starts at {time} on {day}, at the {place} in {city}.",
        )
    )
    return {"event": kind, "day": day, "time": time, "place": place, "city": city, "guests": guests}, text


def _contact(rng: Random) -> Record:
    name, city = any_full_name(rng), any_city(rng)
    account = name.split()[0].lower() + rng.choice(("", str(rng.randint(1, 99))))
    host = rng.choice(("example", "mail.example", "post.example", any_word(rng)))
    email = f"{account}@{host}.{rng.choice(('com', 'com', 'org', 'net'))}"
    phone = (
        "".join(rng.choice("0123456789") for _ in range(3)) + "-" + "".join(rng.choice("0123456789") for _ in range(4))
    )
    text = rng.choice(
        (
            f"You can reach {name} in {city} at {email} or by phone at {phone}.",
            f"Contact: {name}, {city}, phone {phone}, email {email}.",
            f"Contact {name} from {city} at {email}, phone {phone}.",
            f"Call {phone} or write to {email} and ask for {name} from {city}.",
            f"{name} has moved to {city}. The new phone number is {phone} and the address is {email}.",
        )
    )
    return {"name": name, "email": email, "phone": phone, "city": city}, text


def _journey(rng: Random) -> Record:
    name, vehicle = any_full_name(rng), rng.choice(("train", "bus", "plane", "ship", "car", "ferry"))
    start, goal = any_city(rng), any_city(rng)
    date, price = f"{rng.choice(MONTHS)} {rng.randint(1, 28)}", rng.randint(5, 900)
    text = rng.choice(
        (
            f"{name} takes the {vehicle} from {start} to {goal} on {date}. The ticket costs {price}.",
            f"Ticket for {name}: {vehicle}, {start} to {goal}, {date}, price {price}.",
            f"On {date} {name} travels to {goal} from {start} by {vehicle} for {price}.",
        )
    )
    return {"passenger": name, "vehicle": vehicle, "from": start, "to": goal, "date": date, "price": price}, text


def _recipe(rng: Random) -> Record:
    dish, minutes, people = rng.choice(FOODS), rng.randint(5, 120), rng.randint(1, 12)
    one, two = rng.sample([food for food in FOODS if food != dish], 2)
    text = rng.choice(
        (
            f"The {dish} recipe needs {one} and {two}, takes {minutes} minutes and serves {people} people.",
            f"To make {dish} for {people} people you need {one} and {two}. It takes {minutes} minutes.",
            f"In {minutes} minutes you cook {dish} from {one} and {two}, enough for {people}.",
        )
    )
    return {"dish": dish, "ingredients": [one, two], "minutes": minutes, "servings": people}, text


_KINDS: tuple[Callable[[Random], Record], ...] = (_person, _person, _order, _event, _contact, _journey, _recipe)
