"""The generator: the same seed gives the same world, references are right, and nothing held out is trained on."""

import re
from random import Random

import pytest
from quill.chat import Message, Sample
from quill.checks import JsonKeys
from quill.corpus import conversation
from quill.examination import examination, grade, prompt_text
from quill.heldout import ALWAYS_TRAINED, BUCKETS, normalize, split_of
from quill.phrasing import ask, expand
from quill.tasks import EXAMINED, TASKS, draw

TRAINING_CONVERSATIONS = 12_000


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """The whole examination."""
    return examination(1000)


def test_a_seed_gives_the_same_conversations() -> None:
    first, again, other = ([conversation(rng) for rng in [Random(seed)] for _ in range(50)] for seed in ("a", "a", "b"))
    assert first == again
    assert first != other


def test_the_examination_is_the_same_every_time() -> None:
    assert [s.messages for s in examination(60)] == [s.messages for s in examination(60)]


def test_the_examination_asks_every_task_about_as_often(samples: list[Sample]) -> None:
    counts = {task: sum(sample.task == task for sample in samples) for task in {s.task for s in samples}}
    assert len(counts) == len(EXAMINED)
    assert min(counts.values()) >= 71
    assert len({prompt_text(sample) for sample in samples}) == 1000


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("recall", "functions")])
def test_references_are_right_and_other_answers_wrong(name: str) -> None:
    rng = Random(name)
    samples = [draw(TASKS[name].make, rng, "train") for _ in range(300)]
    assert all(sample.check(sample.answer) for sample in samples)
    assert not any(sample.check("") for sample in samples)
    other = "xylophone"
    assert not any(sample.check(other) for sample in samples if other not in sample.question[-1].content)


def test_references_of_functions_and_recall_are_right() -> None:
    for name, count in (("functions", 12), ("recall", 5)):
        rng = Random(name)
        for _ in range(count):
            sample = draw(TASKS[name].make, rng, "train")
            assert sample.check(sample.answer), sample.answer


@pytest.mark.parametrize("name", ["arithmetic", "counting", "sorting", "reversing", "extraction", "tools", "memory"])
def test_a_slightly_wrong_answer_is_wrong(name: str) -> None:
    rng = Random(name)
    changed = 0
    for _ in range(200):
        sample = draw(TASKS[name].make, rng, "train")
        number = re.search(r"(\d+)[^\d:]{0,16}$", sample.answer)
        if number is None or isinstance(sample.check, JsonKeys):
            continue
        if sample.messages[-2].content.startswith("<tool_response>"):
            continue
        if name in ("arithmetic", "memory") and re.search(r"(?i)yes|no,|even|odd|prime|called", sample.answer):
            continue
        wrong = sample.answer[: number.start()] + str(int(number[1]) + 1) + sample.answer[number.end(1) :]
        changed += 1
        assert not sample.check(wrong), (sample.messages[-2].content, sample.answer, wrong)
    assert changed >= 5


def test_training_and_examination_are_disjoint(samples: list[Sample]) -> None:
    whole = {prompt_text(sample) for sample in samples}
    # What the user says in a question of one turn must not turn up anywhere in a training conversation.
    single = {normalize(s.question[0].content) for s in samples if len(s.question) == 1}
    rng = Random("disjoint")
    for _ in range(TRAINING_CONVERSATIONS):
        messages = conversation(rng)
        said = [m for m in messages if m.role != "system"]
        assert not single & {normalize(m.content) for m in said if m.role == "user"}
        assert not whole & {_prompt(messages[:i]) for i, m in enumerate(messages) if m.role == "assistant"}
        assert not whole & {_prompt(said[:i]) for i, m in enumerate(said) if m.role == "assistant"}


def _prompt(messages: tuple[Message, ...] | list[Message]) -> str:
    return normalize("\n".join(f"{m.role} {m.content}" for m in messages))


def test_keys_split_evenly_and_first_questions_are_always_trained() -> None:
    held_out = sum(split_of(f"facts|question {i}") == "held_out" for i in range(10_000))
    assert abs(held_out / 10_000 - 1 / BUCKETS) < 0.01
    assert all(split_of(f"smalltalk|{question}") == "train" for question in ALWAYS_TRAINED)


def test_case_and_closing_punctuation_do_not_make_a_new_question() -> None:
    assert normalize("What is  7 + 8?") == normalize("what is 7 + 8")
    assert normalize("7 + 8") != normalize("7 - 8")


def test_a_pattern_stands_for_all_its_choices() -> None:
    rng = Random(0)
    seen = {expand(rng, "[what is|what's] the [big|small] [city|town [hall|square]]") for _ in range(400)}
    assert len(seen) == 2 * 2 * 3


def test_typing_styles_leave_slots_alone() -> None:
    rng = Random(0)
    texts = [ask(rng, "say {word} to me", end=".", word="McFly") for _ in range(300)]
    assert all("McFly" in text for text in texts)
    assert any(text.startswith("SAY") for text in texts)
    assert any(text.startswith("say") for text in texts)


def test_a_report_counts_by_task() -> None:
    samples = examination(28)
    answers = [sample.answer for sample in samples]
    answers[3] = ""
    report = grade(samples, answers)
    assert report.wrong == (3,)
    assert report.overall.right == 27
    assert next(s for s in report.scores if s.task == samples[3].task).percent == 50.0
    assert "overall" in report.table()
