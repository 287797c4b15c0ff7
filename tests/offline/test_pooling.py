"""`LLM.embed`, `encode`, `classify`, `score` and `reward` on tiny checkpoints, against transformers' hidden states."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from quire import LLM, LoRARequest, PoolingParams, SamplingParams
from quire.errors import CheckpointError, ConfigError, ContextLengthError, RequestError
from quire.foundation.messages.from_engine import Deltas, End
from quire.models.pooler_flags import GivenPooling
from quire.offline.local_engine import LocalEngine
from quire.text.text_pairs import PairLimits
from tests.adapters import Reference, make_adapter
from tests.checkpoints import (
    IM_END,
    IM_END_ID,
    IM_START,
    IM_START_ID,
    VOCAB_SIZE,
    edit_config,
    make_tiny,
    write_tokenizer,
)

Array = npt.NDArray[np.float32]
QWEN = {"head_dim": 16, "num_hidden_layers": 2}
EVERY_MODE = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


def tiny(directory: Path, architecture: str, **config: Any) -> Path:
    """A tiny checkpoint with a tokenizer."""
    write_tokenizer(make_tiny(directory, architecture, **QWEN, **config))
    return directory


def texts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [1, longest, *(rng.randint(2, longest) for _ in range(count - 2))]
    return [rng.choices(range(3, VOCAB_SIZE), k=length) for length in lengths]


def sentence_files(
    directory: Path, pooling: dict[str, Any], *modules: tuple[str, dict[str, Any]], old: bool = False
) -> None:
    """Write the files of sentence-transformers, as versions before 5.4 or later ones do, with random weights."""
    from safetensors.torch import save_file

    package = "sentence_transformers.models" if old else "sentence_transformers.base.modules.some"
    listed = [("Transformer", ""), ("Pooling", "1_Pooling")]
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    generator = torch.Generator().manual_seed(0)
    for number, (name, keys) in enumerate(modules, 2):
        folder = f"{number}_{name}"
        (directory / folder).mkdir()
        listed.append((name, folder))
        if name != "Normalize":
            (directory / folder / "config.json").write_text(json.dumps(keys))
        if name == "Dense":
            shapes = {
                "linear.weight": (keys["out_features"], keys["in_features"]),
                "linear.bias": (keys["out_features"],),
            }
            weights = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
            save_file(weights, directory / folder / "model.safetensors")
    written = [
        {"idx": number, "name": str(number), "path": folder, "type": f"{package}.{name}"}
        for number, (name, folder) in enumerate(listed)
    ]
    (directory / "modules.json").write_text(json.dumps(written))


def hidden_states(directory: Path, batch: list[list[int]]) -> list[torch.Tensor]:
    """[length, hidden] fp32 of each text, of the last norm, by transformers' bare model."""
    import transformers

    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([text])).last_hidden_state[0] for text in batch]


def pooled(states: torch.Tensor, mode: str, skip: int = 0) -> torch.Tensor:
    """sentence-transformers' definition of each mode."""
    own, positions = states[skip:], torch.arange(skip + 1, len(states) + 1).float()[:, None]
    return {
        "cls": own[0],
        "max": own.amax(0),
        "mean": own.mean(0),
        "mean_sqrt_len_tokens": own.sum(0) / len(own) ** 0.5,
        "weightedmean": (own * positions).sum(0) / positions.sum(),
        "lasttoken": states[-1],
    }[mode]


def assert_alike(found: Any, expected: torch.Tensor) -> None:
    """Two vectors point in the same direction, and are as long."""
    found, wanted = np.asarray(found, dtype="f8"), expected.double().numpy()
    assert found.shape == wanted.shape
    cosine = (found * wanted).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert np.all(cosine >= 0.999999), cosine
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """A copy of one bare Qwen3."""
    import shutil

    made = tiny(tmp_path_factory.mktemp("qwen") / "model", "Qwen3Model")
    return lambda: Path(shutil.copytree(made, tmp_path_factory.mktemp("copy") / "model"))


def test_every_mode_side_by_side_in_chunks(qwen: Callable[[], Path]) -> None:
    directory = qwen()
    sentence_files(directory, {"embedding_dimension": 48, "pooling_mode": EVERY_MODE, "include_prompt": True})
    batch = texts(12, 120)
    with LLM(str(directory), dtype="float32", max_model_len=160, max_num_batched_tokens=32) as llm:
        found = llm.embed(batch, use_tqdm=False)
    for text, output, states in zip(batch, found, hidden_states(directory, batch), strict=True):
        expected = torch.cat([pooled(states, mode) for mode in EVERY_MODE])
        assert_alike(output.outputs.embedding, expected)
        assert output.prompt_token_ids == text


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_texts_beside_generation_survive_preemption(mode: str, tmp_path: Path) -> None:
    directory = tiny(tmp_path / "model", "Qwen3ForCausalLM")
    settings: dict[str, Any] = {
        "runner": "generate", "pooler_config": {"pooling_type": "MEAN"}, "num_gpu_blocks_override": 12,
        "max_num_batched_tokens": 24, "max_model_len": 160, "dtype": "float32", "preemption_mode": mode,
        "scheduling_policy": "priority",
    }  # fmt: skip
    local = LocalEngine("LLM", str(directory), settings)
    batch, ends, preempted = [texts(2, 100 + 3 * number)[1] for number in range(4)], dict[int, End](), 0
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    pools = [local.input_processor.pooled(text, PoolingParams(), priority=2)[0] for text in batch]
    for text, add in zip(batch, pools, strict=True):
        local.client.send(add)
        local.client.receive(0.0)
        local.client.send(local.input_processor.adds(text, sampling, priority=1)[0])
    while len(ends) < 2 * len(batch):
        message = local.client.receive(None)
        if isinstance(message, Deltas):
            ends |= {end.id: end for end in message.ends}
    local.close()
    for add, states in zip(pools, hidden_states(directory, batch), strict=True):
        end = ends[add.id]
        preempted += end.preemptions
        mean = torch.nn.functional.normalize(pooled(states, "mean"), dim=0)
        assert_alike(np.frombuffer(end.vector, dtype="<f4"), mean)
    assert preempted


def test_old_files_dense_normalize_prompts_and_dimensions(qwen: Callable[[], Path]) -> None:
    directory = qwen()
    old = {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    dense = {
        "in_features": 48,
        "out_features": 24,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    sentence_files(directory, old | {"include_prompt": False}, ("Dense", dense), ("Normalize", {}), old=True)
    (directory / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "one two "}}))
    edit_config(directory, {"is_matryoshka": True})
    from safetensors.torch import load_file

    weights = load_file(directory / "2_Dense" / "model.safetensors")
    with LLM(str(directory), dtype="float32", max_model_len=160) as llm:
        tokenizer = llm.get_tokenizer()
        plain, named = llm.embed(["three four"], use_tqdm=False), llm.embed(["three four"], prompt_name="query")
        short, raw = (
            llm.embed(["three four"], pooling_params=PoolingParams(**keys))[0].outputs.embedding
            for keys in ({"dimensions": 8}, {"use_activation": False})
        )
        with pytest.raises(RequestError, match="no prompt of this model; it has query"):
            llm.embed("x", prompt_name="document")
        with pytest.raises(ContextLengthError):
            llm.embed([[5] * 161])
        assert len(llm.embed([[5] * 161], truncate_prompt_tokens=-1)[0].prompt_token_ids) == 160
        with pytest.raises(RequestError, match="makes vectors or labels"):
            llm.generate("x")
    skip = len(tokenizer.encode("one two "))
    for found, text, left_out in ((plain, "three four", 0), (named, "one two three four", skip)):
        tokens = tokenizer.encode(text)
        (states,) = hidden_states(directory, [tokens])
        assert found[0].prompt_token_ids == tokens
        mean = pooled(states, "mean", left_out)
        expected = torch.tanh(weights["linear.weight"] @ mean + weights["linear.bias"])
        assert_alike(found[0].outputs.embedding, torch.nn.functional.normalize(expected, dim=0))
        if not left_out:
            assert_alike(raw, expected)
            assert_alike(short, torch.nn.functional.normalize(expected[:8], dim=0))


def test_one_engine_embeds_and_generates_with_a_prefix_cache(tmp_path: Path) -> None:
    directory = tiny(tmp_path / "model", "Qwen3ForCausalLM")
    text = texts(2, 100)[1]
    config = {"pooling_type": "LAST"}
    with LLM(
        str(directory), dtype="float32", runner="generate", pooler_config=config, max_num_batched_tokens=48
    ) as llm:
        alone = llm.generate([text], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
        embedded = llm.embed([text, text[:70]], use_tqdm=False)
        each = llm.encode([text], pooling_task="token_embed", use_tqdm=False)
        again = llm.generate([text], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert alone[0].outputs[0].token_ids == again[0].outputs[0].token_ids
    assert [output.num_cached_tokens for output in embedded] == [96, 64]
    assert each[0].num_cached_tokens == 0
    whole, part = hidden_states(directory, [text, text[:70]])
    for output, states in zip(embedded, (whole, part), strict=True):
        assert_alike(output.outputs.embedding, torch.nn.functional.normalize(states[-1], dim=0))
    assert_alike(each[0].outputs.data.numpy(), torch.nn.functional.normalize(whole, dim=1))


def test_modules_of_transformers_are_pooled_too(tmp_path: Path) -> None:
    directory, batch = tiny(tmp_path / "model", "Qwen3ForCausalLM"), texts(3, 60)
    settings: dict[str, Any] = {"model_impl": "transformers", "runner": "pooling", "max_num_batched_tokens": 32}
    with LLM(str(directory), dtype="float32", pooler_config={"pooling_type": "MEAN"}, **settings) as llm:
        found = llm.embed(batch, use_tqdm=False)
    for output, states in zip(found, hidden_states(directory, batch), strict=True):
        assert_alike(output.outputs.embedding, torch.nn.functional.normalize(pooled(states, "mean"), dim=0))


def test_texts_have_adapters(tmp_path: Path) -> None:
    directory, (text, *_) = tiny(tmp_path / "model", "Qwen3ForCausalLM"), texts(2, 60)[1:]
    adapter = make_adapter(tmp_path / "adapter", directory)
    reference = Reference(directory, {"a": adapter})._model
    settings: dict[str, Any] = {"runner": "pooling", "enable_lora": True, "max_num_batched_tokens": 32}
    with LLM(str(directory), dtype="float32", pooler_config={"pooling_type": "MEAN"}, **settings) as llm:
        asked = [LoRARequest("a", 1, str(adapter)), None]
        adapted, base = llm.embed([text, text], lora_request=asked, use_tqdm=False)
    with torch.no_grad():
        states = reference(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
    assert_alike(adapted.outputs.embedding, torch.nn.functional.normalize(pooled(states, "mean"), dim=0))
    (states,) = hidden_states(directory, [text])
    assert_alike(base.outputs.embedding, torch.nn.functional.normalize(pooled(states, "mean"), dim=0))


def test_classifiers_have_adapters_of_their_encoders(tmp_path: Path) -> None:
    """Whose names begin as in files with a head. Those of the head are refused, whose rows are texts and not the step's
    tokens, and those of another model."""
    import transformers
    from peft import LoraConfig, get_peft_model

    directory, batch = bert(tmp_path / "model", "BertForSequenceClassification", num_labels=3), texts(3, 40)

    def adapted_at(modules: str | list[str], name: str) -> Any:
        base = transformers.BertForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
        found = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=modules))
        for number, (named, parameter) in enumerate(found.named_parameters()):
            if "lora_" in named:
                torch.nn.init.normal_(parameter, 0.0, 0.1, generator=torch.Generator().manual_seed(number))
        found.save_pretrained(str(tmp_path / name))
        return found.eval()

    adapted, _ = adapted_at(r".*\.(query|value|(output|intermediate)\.dense)", "layers"), adapted_at(["dense"], "head")
    other = make_adapter(tmp_path / "other", tiny(tmp_path / "decoder", "Qwen3ForCausalLM"))
    with LLM(str(directory), dtype="float32", enable_lora=True) as llm:
        asked = [LoRARequest("a", 1, str(tmp_path / "layers"))] * 3
        found = llm.classify(batch, pooling_params=PoolingParams(use_activation=False), lora_request=asked)
        for path, why in (
            (tmp_path / "head", "pooler.dense.* adapters of the head"),
            (other, "down_proj.* may change dense"),
        ):
            with pytest.raises(RequestError, match=why):
                llm.classify(batch[0], lora_request=LoRARequest(path.name, 2, str(path)))
    with torch.no_grad():
        for output, row in zip(found, batch, strict=True):
            assert_alike(output.outputs.probs, adapted(torch.tensor([row])).logits[0])


def test_a_reranker_is_made_of_a_causal_model(tmp_path: Path) -> None:
    import transformers

    directory = tiny(tmp_path / "model", "Qwen3ForCausalLM")
    tokens = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    no, yes = sorted(tokens, key=tokens.__getitem__)[40:42]
    edit_config(directory, {"classifier_from_token": [no, yes]})
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with LLM(str(directory), dtype="float32") as llm:
        tokenizer = llm.get_tokenizer()
        template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
        found = llm.score("one two", ["three", "four five"], chat_template=template, use_tqdm=False)
        raw = llm.classify([[7, 8, 9]], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
        with pytest.raises(RequestError, match="does not do the task embed"):
            llm.embed("x")
    whole = [tokenizer.encode(f"[query] one two [document] {text} ") for text in ("three", "four five")]
    for tokens, output in zip([*whole, [7, 8, 9]], [*found, *raw], strict=True):
        assert output.prompt_token_ids == tokens
        with torch.no_grad():
            logits = reference(torch.tensor([tokens])).logits[0, -1].double()
        margin = float(logits[41] - logits[40])
        if hasattr(output.outputs, "score"):
            assert output.outputs.score == pytest.approx(1 / (1 + np.exp(-margin)), abs=1e-5)
        else:
            assert output.outputs.probs == pytest.approx([margin], abs=1e-4)


def test_labels_and_rewards(tmp_path: Path) -> None:
    import transformers

    directory = tiny(tmp_path / "labels", "Qwen3ForSequenceClassification", num_labels=3)
    reference = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    batch = texts(4, 60)
    with LLM(str(directory), dtype="float32", max_num_batched_tokens=32) as llm:
        found = llm.classify(batch, use_tqdm=False)
        values = llm.reward(batch[:2], use_tqdm=False)
        some = PoolingParams(task="token_classify", step_tag_id=batch[1][5], returned_token_ids=[2, 0])
        tagged = llm.encode(batch[1], some, use_tqdm=False)[0].outputs.data
    for text, output in zip(batch, found, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([text])).logits[0]
        assert output.outputs.probs == pytest.approx(torch.softmax(logits, 0).tolist(), abs=1e-5)
        assert output.outputs.num_classes == 3
    (states,) = hidden_states(directory, batch[1:2])
    each = states @ reference.score.weight.detach().T
    assert_alike(values[1].outputs.data.numpy(), each)
    chosen = torch.softmax(each, 1)[[token == batch[1][5] for token in batch[1]]]
    torch.testing.assert_close(tagged, chosen[:, [2, 0]], atol=1e-5, rtol=1e-4)


def test_similarity_of_embeddings_is_a_score(qwen: Callable[[], Path]) -> None:
    directory = qwen()
    sentence_files(directory, {"embedding_dimension": 48, "pooling_mode": "mean", "include_prompt": True})
    with LLM(str(directory), dtype="float32") as llm:
        found = llm.score("one two", ["one two", "seven"], use_tqdm=False)
        one, other = (each.outputs.embedding for each in llm.embed(["one two", "seven"], use_tqdm=False))
        with pytest.raises(RequestError, match="data_1 has 2 texts and data_2 3"):
            llm.score(["a", "b"], ["a", "b", "c"])
    cosine = np.dot(one, other) / np.linalg.norm(one) / np.linalg.norm(other)
    assert [each.outputs.score for each in found] == pytest.approx([1.0, cosine], abs=1e-5)


BERT = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 80, "type_vocab_size": 2,
    "max_position_embeddings": 128,
}  # fmt: skip


def bert(directory: Path, architecture: str, **config: Any) -> Path:
    """A tiny encoder, whose tokenizer puts pairs together as BERT's does."""
    from tokenizers import Tokenizer, processors

    write_tokenizer(make_tiny(directory, architecture, **BERT, **config))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{IM_START} $A {IM_END}",
        pair=f"{IM_START} $A {IM_END} $B:1 {IM_END}:1",
        special_tokens=[(IM_START, IM_START_ID), (IM_END, IM_END_ID)],
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_an_encoder_embeds_whole_texts_of_mixed_lengths(tmp_path: Path) -> None:
    directory, modes = bert(tmp_path / "model", "BertModel"), ["mean", "cls", "max"]
    sentence_files(directory, {"pooling_mode": modes, "include_prompt": True})
    batch = texts(12, 100)
    with LLM(str(directory), dtype="float32", max_num_batched_tokens=128) as llm:
        found = llm.embed(batch, use_tqdm=False)
        again = llm.embed(batch[-1:], use_tqdm=False)
        with pytest.raises(ContextLengthError, match="128"):
            llm.embed([[5] * 129])
    for output, states in zip(found, hidden_states(directory, batch), strict=True):
        assert_alike(output.outputs.embedding, torch.cat([pooled(states, mode) for mode in modes]))
    assert again[0].num_cached_tokens == 0  # its tokens see those behind them


def test_a_cross_encoder_reads_pairs_with_token_types(tmp_path: Path) -> None:
    import transformers

    directory = bert(tmp_path / "model", "BertForSequenceClassification", num_labels=1)
    kind = transformers.AutoModelForSequenceClassification
    reference = kind.from_pretrained(directory, dtype=torch.float32).eval()
    documents = ["three four five", "six", "seven eight nine ten " * 9]
    with LLM(str(directory), dtype="float32", max_num_batched_tokens=128) as llm:
        found = llm.score("one two", documents, truncate_prompt_tokens=24, use_tqdm=False)
        pairs = llm.get_tokenizer().encode_pairs([("one two", text) for text in documents], PairLimits(24))
    for output, (ids, types) in zip(found, pairs, strict=True):
        assert output.prompt_token_ids == ids
        assert set(types) == {0, 1}
        with torch.no_grad():
            logits = reference(torch.tensor([ids]), token_type_ids=torch.tensor([types])).logits
        assert output.outputs.score == pytest.approx(float(torch.sigmoid(logits[0, 0])), abs=1e-5)


def templated(directory: Path) -> None:
    """What sentence-transformers 6 saves of a model whose tokenizer has a chat template."""
    sentence_files(directory, {"pooling_mode": "mean"})
    modality = {"method": "forward", "method_output_name": "last_hidden_state"}
    config = {"modality_config": {"text": modality, "message": modality | {"format": "flat"}}}
    (directory / "sentence_bert_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("edit", "settings", "said"),
    [
        (lambda d: None, {}, "do not say how its texts are pooled"),
        (lambda d: sentence_files(d, {"pooling_mode": "mean", "bias": 1}), {}, "the key 'bias' is not supported"),
        (lambda d: sentence_files(d, {"pooling_mode": "attention"}), {}, "'pooling_mode' is 'attention'"),
        (
            lambda d: sentence_files(d, {"pooling_mode": "mean"}, ("WordWeights", {})),
            {},
            "WordWeights is not supported",
        ),
        (templated, {}, "'message' puts every text into the chat template"),
        (lambda d: None, {"pooler_config": {"pooling_typ": "MEAN"}}, "has no key 'pooling_typ'"),
        (lambda d: None, {"pooler_config": {"pooling_type": "STEP"}}, "belong together"),
        (
            lambda d: None,
            {
                "pooler_config": {"pooling_type": "MEAN"},
                "speculative_config": {"method": "ngram", "num_speculative_tokens": 2},
            },
            "there are none to draft",
        ),
        (lambda d: None, {"pooler_config": {"pooling_type": "MEAN"}, "runner": "generate"}, "generates no text"),
    ],
)
def test_what_is_unknown_is_refused_by_name(
    edit: Callable[[Path], None], settings: dict[str, Any], said: str, qwen: Callable[[], Path]
) -> None:
    directory = qwen()
    edit(directory)
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        LLM(str(directory), **settings)
    assert said in caught.value.message


@pytest.mark.long("many cards")
@pytest.mark.parametrize(
    ("architecture", "flag"),
    [("Qwen3ForCausalLM", "tensor_parallel_size"), ("Qwen3ForSequenceClassification", "pipeline_parallel_size")],
)
def test_ranks_pool_like_one(architecture: str, flag: str, tmp_path: Path) -> None:
    directory, batch, found = tiny(tmp_path / "model", architecture), texts(4, 60), []
    settings: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 32}
    if architecture == "Qwen3ForCausalLM":
        settings |= {"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}}
    for ranks in (1, 2):
        with LLM(str(directory), **settings, **{flag: ranks}) as llm:
            tasks = llm.encode(batch, use_tqdm=False), llm.encode(batch, pooling_task=llm._info.tasks[-1])
            found.append([output.outputs.data for outputs in tasks for output in outputs])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, atol=1e-5, rtol=1e-4)


def test_values_are_scaled_before_their_activation(tmp_path: Path) -> None:
    """By --pooler-config's mean and deviation (Platt's scaling), in the pooling that it names; and a text may be cut by
    the tokenizer's options."""
    directory, (text, *_) = bert(tmp_path, "BertForSequenceClassification", num_labels=3), texts(1, 40)
    plain = PoolingParams(use_activation=False, requires_token_ids=True)
    with LLM(str(directory), dtype="float32") as llm:
        (expected,) = llm.classify(text, pooling_params=plain, use_tqdm=False)
    scaled = {"logit_mean": 0.5, "logit_sigma": 2.0, "seq_pooling_type": "CLS"}
    with LLM(str(directory), dtype="float32", pooler_config=scaled) as llm:
        (values,), (shares,) = llm.classify(text, pooling_params=plain), llm.classify(text)
        whole, cut = (
            llm.classify("one two three four", tokenization_kwargs=options)[0].prompt_token_ids
            for options in ({}, {"truncation": True, "max_length": 5})
        )
        with pytest.raises(RequestError, match="tokenization_kwargs with 'padding'"):
            llm.classify("one", tokenization_kwargs={"padding": True})
    by_hand = (torch.tensor(expected.outputs.probs) - 0.5) / 2
    assert values.outputs.probs == pytest.approx(by_hand.tolist(), abs=1e-5)
    assert shares.outputs.probs == pytest.approx(torch.softmax(by_hand, 0).tolist(), abs=1e-5)
    assert len(cut) == 5 < len(whole)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"enable_chunked_processing": True}, "enable_chunked_processing is not supported"),
        ({"max_embed_len": 9}, "max_embed_len is not supported"),
        ({"logit_sigma": 0}, "logit_sigma must not be 0"),
        ({"logit_mean": "1"}, "logit_mean must be a number"),
        ({"seq_pooling_type": "ALL"}, "seq_pooling_type is 'ALL'"),
        ({"tok_pooling_type": "MEAN"}, "tok_pooling_type is 'MEAN'"),
        ({"step_tag_id": 3}, "belong together"),
        ({"task": "embedding"}, "task must be one of"),
        ({"returned_token_ids": [-1]}, "must be a list of whole numbers"),
    ],
)
def test_wrong_pooler_configs_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        GivenPooling.of(keys)


def test_pooler_configs_name_pooling_of_texts_and_of_tokens() -> None:
    given = GivenPooling.of({"seq_pooling_type": "LAST", "tok_pooling_type": "STEP", "step_tag_id": 7})
    assert (given.modes, given.tokens, given.step_tag_id) == (("last",), "STEP", 7)
    assert GivenPooling.of({"tok_pooling_type": "ALL", "enable_chunked_processing": False}).tokens == "ALL"


@pytest.mark.parametrize("field", ["late_interaction_params", "extra_kwargs"])
def test_parameters_that_are_not_served_are_refused_by_name(field: str) -> None:
    with pytest.raises(RequestError, match=field) as error:
        PoolingParams(**{field: {"mode": "cache_query"}})
    assert error.value.param == field
    assert PoolingParams(**{field: None}).task is None
