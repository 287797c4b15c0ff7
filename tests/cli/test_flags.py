"""Flags: every setting is reachable, values are read as people write them, and what is wrong is said in one line."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from quire.cli.flags import parse, parse_config, parse_with_engine
from quire.cli.main import main
from quire.cli.settings_fields import about, settings_of
from quire.errors import ConfigError
from quire.foundation.config import Config
from quire.foundation.config.values import without_none
from quire.models.quantization.parsers import AT_LOAD, PARSERS


def config(*arguments: str) -> Config:
    return parse_config(arguments, "quire serve", "")


def error(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*arguments)
    assert "\n" not in caught.value.message
    assert "──" not in caught.value.message
    assert "Argument helptext" not in caught.value.message
    return caught.value.message


SETTINGS = {setting.name: setting for setting in settings_of(Config)}


WRITTEN: dict[str, tuple[list[str], Any]] = {
    "custom_histogram_buckets": (['{"request_latency": [1]}'], {"request_latency": [1]}),
    "limit_mm_per_prompt": (['{"image": 3}'], {"image": 3}),
    "media_io_kwargs": (['{"video": {"num_frames": 4}}'], {"video": {"num_frames": 4}}),
    "prompt_cache_share": (["0.5"], 0.5),
    "reasoning_effort_map": (['{"xhigh": "high"}'], {"xhigh": "high"}),
}
"""Values of settings that cannot have any value of their type."""


def written(kind: Any) -> tuple[list[str], Any]:
    """A value of the type that is no default, as words of a command line and as the field holds it."""
    kind = without_none(kind)
    if kind is bool:
        return [], True
    if get_origin(kind) is dict:
        return ['{"a": [1]}'], {"a": [1]}
    if get_origin(kind) is tuple:
        return ["x", "y"], ("x", "y")
    if kind == int | Literal["auto"]:
        return ["auto"], "auto"
    if get_args(kind):
        return [str(get_args(kind)[-1])], get_args(kind)[-1]
    return ["3"], kind("3")


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_its_flag(name: str) -> None:
    words, value = WRITTEN.get(name) or written(SETTINGS[name].kind)
    changed = config(f"--{name.replace('_', '-')}", *words)
    part = SETTINGS[name].group
    assert getattr(getattr(changed, part), name) == value
    assert changed == Config().with_values(**{name: value})


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "enable_prefix_caching", "served_model_name"])
def test_flags_may_have_underscores(name: str) -> None:
    words, value = written(SETTINGS[name].kind)
    assert config(f"--{name}", *words) == Config().with_values(**{name: value})


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if without_none(setting.kind) is bool])
def test_every_boolean_has_a_no_form(name: str) -> None:
    assert config(f"--no-{name.replace('_', '-')}") == Config().with_values(**{name: False})


def test_the_model_stands_anywhere() -> None:
    for arguments in (["m"], ["--model", "m"], ["--model=m"], ["m", "--port", "1"], ["--port", "1", "m"]):
        assert config(*arguments).model.model == "m"
    assert "'b' was not expected" in error("a", "b")
    assert "'a' was not expected" in error("a", "--model", "b")


@pytest.mark.parametrize(
    ("text", "value"), [("4k", 4000), ("4K", 4096), ("25.6k", 25600), ("2G", 2**31), ("1m", 10**6), ("12", 12)]
)
def test_human_integers(text: str, value: int) -> None:
    assert config("--max-num-batched-tokens", text).scheduler.max_num_batched_tokens == value


@pytest.mark.parametrize("text", ["4.5", "k", "1.0001k", "1e3", "", "4 k"])
def test_what_is_no_whole_number(text: str) -> None:
    assert "is not a whole number" in error(f"--max-num-batched-tokens={text}")


def test_lists_are_words_or_json() -> None:
    for written_as in (["a", "b"], ['["a", "b"]']):
        assert config("--served-model-name", *written_as).model.served_model_name == ("a", "b")
    assert config('--allowed-origins=["https://a"]').server.allowed_origins == ("https://a",)
    assert config("--allowed-origins").server.allowed_origins == ()
    both = config("--served-model-name", "a", "--port", "1", "--served_model_name=b", "m")
    assert (both.model.served_model_name, both.server.port, both.model.model) == (("a", "b"), 1, "m")
    for wrong in ("[1]", '["a"', "[[]]"):
        assert "--allowed-origins" in error("--allowed-origins", wrong)


def test_dictionaries_are_json() -> None:
    assert config("--override-generation-config", '{"top_k": 5}').model.override_generation_config == {"top_k": 5}
    assert "is not JSON" in error("--override-generation-config", "{")
    assert "is not a JSON object" in error("--override-generation-config", "[]")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prot", "3"], "--prot is not a flag of quire serve. Did you mean --port?"),
        (["--max_nun_seqs=3"], "Did you mean --max-num-seqs?"),
        (["--tensor-paralel-size", "2"], "Did you mean --tensor-parallel-size?"),
        (["--qqqqqq"], "'quire serve --help' lists them"),
        (["-x"], "-x is not a flag of quire serve"),
        (["--port"], "'--port'"),
        (["--port", "x"], "--port: 'x' is not a whole number"),
        (["--dtype", "float8"], "--dtype: 'float8' is not one of auto, bfloat16, float, float16, float32, half."),
        (["--preemption-mode", "x"], "--preemption-mode: 'x' is not one of recompute, swap."),
        (["--config", "/no/such/file"], "--config /no/such/file cannot be read: no such file or directory."),
        (["--shutdown-timeout", "soon"], "soon"),
        (["--config"], "--config needs a file"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], said: str) -> None:
    assert said in error(*arguments)


def test_a_misspelt_flag_ends_the_command_with_2_and_no_traceback() -> None:
    command = [sys.executable, "-m", "quire", "serve", "--max-modl-len", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert done.stderr == ("quire: error: --max-modl-len is not a flag of quire serve. Did you mean --max-model-len?\n")


# --- settings that are open, and a command's own ---------------------------------------------------------------------


@dataclass(frozen=True)
class Switches:
    """For tests."""

    left_open: bool | None = None
    """May be left open."""
    share: float | None = None
    """A number."""


@pytest.mark.parametrize(
    ("arguments", "value"),
    [([], None), (["--left-open"], True), (["--no-left-open"], False), (["--left-open=false"], False)],
)
def test_an_open_boolean_is_a_flag_as_well(arguments: list[str], value: bool | None) -> None:
    assert parse(Switches, arguments, "x", "").left_open is value


def test_own_options_beside_the_engine_s_and_none_of_the_server_s() -> None:
    own, engine = parse_with_engine(Switches, ["--share", "0.5", "--max-num-seqs", "1k"], "x", "")
    assert own.share == 0.5
    assert engine == Config().with_values(max_num_seqs=1000)
    with pytest.raises(ConfigError, match=r"--port is not a flag of x"):
        parse_with_engine(Switches, ["--port", "1"], "x", "")
    with pytest.raises(ConfigError, match=r"'y' is not a number"):
        parse_with_engine(Switches, ["--share", "y"], "x", "")


# --- help -----------------------------------------------------------------------------------------------------------


def shown(capsys: pytest.CaptureFixture[str], flag: str) -> set[str]:
    with pytest.raises(SystemExit) as caught:
        config(flag)
    assert caught.value.code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return set(re.findall(r"^[ │|]+--(?!no-)([a-z][a-z0-9-]+)", plain, re.MULTILINE))


def test_help_shows_all_a_group_or_what_speaks_of_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    everything = {name.replace("_", "-") for name in SETTINGS}
    assert shown(capsys, "--help") == shown(capsys, "--help=all") == everything
    cache = {f.name.replace("_", "-") for f in fields(Config().cache)}
    assert shown(capsys, "--help=cache") == cache
    assert {"ssl-keyfile", "ssl-certfile"} <= shown(capsys, "--help=TLS") < everything
    with pytest.raises(ConfigError, match="Groups: model, load, cache"):
        config("--help=perpetuum")


@pytest.mark.parametrize(
    ("settings", "is_coloured"), [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)]
)
def test_help_on_a_terminal_has_colours_unless_no_color(settings: dict[str, str], is_coloured: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "quire.cli.main", "run-batch", "--help=input"]
    with subprocess.Popen(command, stdout=end, stderr=end, env=environment | {"TERM": "xterm"} | settings):
        os.close(end)
        said = bytearray()
        with contextlib.suppress(OSError):  # Linux ends a terminal that nobody holds with an error
            while piece := os.read(terminal, 65536):
                said += piece
    os.close(terminal)
    assert b"--input-file" in said
    assert (b"\x1b[" in said) is is_coloured


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        (["chat"], "quire chat [--model MODEL] [-h] [OPTIONS]"),
        (["bench", "serve"], "quire bench serve [--model MODEL] [-h] [OPTIONS]"),
        (["run-batch"], "quire run-batch [--model MODEL] [-h] [OPTIONS]"),
        (["plan"], "quire plan [-h] [OPTIONS] MODEL"),
    ],
)
def test_usage_shows_how_a_model_is_given(command: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    assert capsys.readouterr().out.splitlines()[0] == f"usage: {usage}"


@pytest.mark.parametrize("flag", ["--help", "--help=model"])
def test_help_says_no_default_that_says_nothing(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    with pytest.raises(SystemExit):
        config(flag)
    shown = capsys.readouterr().out
    assert shown.startswith("usage: quire serve [MODEL] [-h] [OPTIONS]")
    assert "(default: quill)" in shown
    assert "None)" not in shown
    assert "(default: )" not in shown
    assert "{}')" not in shown


def test_a_misspelt_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (("serv", "Did you mean 'serve'? Commands: serve"), ("xyzzy", "is not a command. Commands: se")):
        with pytest.raises(SystemExit, match="2"):
            main([name])
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "startp"])
    assert "Did you mean 'startup'?" in capsys.readouterr().err


def test_help_of_a_word_keeps_defaults_and_descriptions() -> None:
    found = settings_of(about(Config, "tls"))
    assert found
    for setting in found:
        assert setting.default == SETTINGS[setting.name].default
        assert SETTINGS[setting.name].description


def test_help_lists_every_quantization_that_is_served() -> None:
    described = SETTINGS["quantization"].description
    assert [name for name in (*PARSERS, *AT_LOAD) if name not in described] == []


def test_the_beginning_of_one_flag_alone_is_that_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert config("--max-num-se=3", "--enforce", "--swap-sp", "2") == Config().with_values(
        max_num_seqs=3, enforce_eager=True, swap_space=2.0
    )
    assert "warning: --max-num-se is read as --max-num-seqs" in capsys.readouterr().err
    assert "--max-num is not a flag of quire serve" in error("--max-num", "3")  # several begin so


def test_keys_of_a_json_flag_may_be_given_one_by_one() -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 5}
    by_key = ["--speculative-config.method", "ngram", "m", "--speculative_config.num_speculative_tokens=5"]
    assert config(*by_key) == Config().with_values(model="m", speculative_config=asked)
    assert config("-sc.method", "ngram", "-sc.num_speculative_tokens", "5", "m") == config(*by_key)
    deep = config("--hf-overrides.text_config.layers=2", "--hf-overrides.text_config.name", "a b")
    assert deep.model.hf_overrides == {"text_config": {"layers": 2, "name": "a b"}}
    assert "--hf-overrides.a needs a value" in error("--hf-overrides.a")
    assert "--hf-overrides.a.b: a has a value already" in error("--hf-overrides.a=1", "--hf-overrides.a.b=2")


# --- settings files -------------------------------------------------------------------------------------------------


def test_a_settings_file_is_read_and_flags_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(
        "model: ./here\nmax-num-seqs: 8\nmax_num_batched_tokens: 2k\nserved-model-name: [a, b]\n"
        "skip-tokenizer-init: true\nuse-tqdm-on-load: false\n"
        "override-generation-config:\n  top_k: 3\n  stop: [x]\nhost: null\n"
        "decode-context-parallel-size: 1\nno-enable-prefix-caching: true\nno-disable-log-stats: true\n"
    )
    expected = Config().with_values(
        model="./here", max_num_seqs=8, max_num_batched_tokens=2000, served_model_name=("a", "b"),
        skip_tokenizer_init=True, use_tqdm_on_load=False, enable_prefix_caching=False,
        override_generation_config={"top_k": 3, "stop": ["x"]},
    )  # fmt: skip
    assert config("--config", str(file)) == expected
    assert "--decode-context-parallel-size has no effect" in capsys.readouterr().err
    again = config(f"--config={file}", "--max-num-seqs", "9", "--no-skip-tokenizer-init", "elsewhere")
    assert again == expected.with_values(max_num_seqs=9, skip_tokenizer_init=False, model="elsewhere")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-num-seq: 3", "'max-num-seq' is not a setting of this command. Did you mean 'max-num-seqs'?"),
        ("max-num-seqs: many", "--max-num-seqs: 'many' is not a whole number"),
        ("decode-context-parallel-size: 4", "--decode-context-parallel-size 4 is not supported"),
        ("- a\n- b", "must hold 'name: value' lines"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_wrong_settings_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    message = error("--config", str(file))
    assert said in message
    assert str(file) in message


def test_a_missing_or_empty_settings_file(tmp_path: Path) -> None:
    assert "cannot be read" in error("--config", str(tmp_path / "none.yaml"))
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert config("--config", str(tmp_path / "empty.yaml")) == Config()


# --- words of vLLM's -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [("-tp", "2"), ("-tp=2",), ("--tensor_parallel_size=2",)])
def test_ranks_have_a_short_flag(arguments: tuple[str, ...]) -> None:
    assert config(*arguments, "m").parallel.tensor_parallel_size == 2
    assert config(*arguments, "-pp", "3", "m").parallel.ranks == 6
    assert config(*arguments, "-ep", "m").parallel.enable_expert_parallel
    assert not config(*arguments, "--no-enable-expert-parallel", "m").parallel.enable_expert_parallel


@pytest.mark.parametrize("backend", ["mp", "uni", "ray"])
def test_who_starts_ranks_is_one_of_vllm_s_words(backend: str) -> None:
    assert config("--distributed-executor-backend", backend, "m").parallel.distributed_executor_backend == backend
    assert "one of mp, uni, ray" in error("--distributed-executor-backend", "external_launcher", "m")


@pytest.mark.parametrize(("word", "value"), [("auto", "auto"), ("-1", -1), ("4k", 4_000)])
def test_the_longest_sequence_is_a_number_or_auto(word: str, value: int | str) -> None:
    assert config("--max-model-len", word).model.max_model_len == value
    assert config(f"--max-model-len={word}").model.max_model_len == value
    assert "'long' is neither a whole number nor auto" in error("--max-model-len", "long")


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_what_a_command_lacks_is_said_without_the_names_of_its_code(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command])
    assert capsys.readouterr().err.startswith(f"quire: error: Name a model: quire {command} MODEL.")


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["--api-key", "secret", "org/model"], "quire serve org/model --api-key KEY."),
        (["--api-key", "secret", "quill", "--port", "1"], "quire serve quill --api-key KEY --port 1."),
        (["--api-key=secret", "org/model"], "quire serve org/model --api-key KEY."),
        (["--api_key", "secret", "tests"], "quire serve tests --api_key KEY."),
        (["--served-model-name", "a", "b", "org/m:Q4_K_M"], "quire serve org/m:Q4_K_M --served-model-name a b."),
        (["--lora-modules", "a=org/x", "org/base"], "quire serve org/base --lora-modules a=org/x."),
        (["--allowed-origins", "org/model"], "quire serve org/model --allowed-origins."),
    ],
)
def test_a_model_among_the_values_of_a_flag_is_not_taken_for_one_of_them(
    arguments: list[str], right: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    said = error(*arguments)
    assert f"Put it first: {right}" in said
    assert "secret" not in said
    assert "--model quill" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", "one", "two"],
        ["--api-key", "a/b"],
        ["--api-key", "one", 300 * "x"],  # longer than a file's name may be
        ["--served-model-name", "org/name"],
        ["--served-model-name", "name", "other"],
        ["--allowed-origins", "https://a.example", "https://b.example/x"],
        ["--api-key", "k", "a/b", "--model", "quill"],
        ["--model=quill", "--served-model-name", "a", "org/b"],
        ["org/model", "--served-model-name", "a", "org/b"],
    ],
)
def test_values_that_may_look_like_models_are_values(arguments: list[str]) -> None:
    changed = config(*arguments)
    assert changed.model.model == ("org/model" if "org/model" in arguments else "quill")
