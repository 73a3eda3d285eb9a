"""Programs that ``mp-optim fit`` prints run as printed and use the predicted memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch.profiler import ProfilerActivity, profile

import mp_optim
from mp_optim.apps.cli.command import main
from mp_optim.apps.fit import command as fit
from mp_optim.apps.fit.chunked_loss import can_chunk, chunk_loss
from mp_optim.apps.fit.fit import Candidate, Estimate
from mp_optim.apps.fit.recipes import Recipe, python_lines
from mp_optim.factory.memory_plan import Memory, MemoryPlan
from support.llama import LLAMA


def words_of(main_params: Any) -> list[dict[str, Any]]:
    options = fit.Options("", "", "", disk="1TB", main_params=main_params)
    tried = [dict(each.words) for each in fit.candidates(options)]
    return [words for words in tried if words.get("offload") not in (0.5, 0.75)]


WORDS = [*words_of("exact"), words_of("remainder8")[-2]]
RECIPE = Recipe("here", "AutoModelForCausalLM")
EXPERTS = {**LLAMA, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
EXPERTS |= {"num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**EXPERTS, "architectures": ["MixtralForCausalLM"], "num_local_experts": 4},
    "qwen3_moe": {
        **{**EXPERTS, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4},
        **{"head_dim": 16, "mlp_only_layers": [0]},
    },
    "deepseek_v3": {
        **{**EXPERTS, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 4},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16},
        **{"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    },
}


def estimate_of(words: dict[str, Any], path: Path) -> Estimate:
    if "optimizer_state_path" in words:
        words = {**words, "optimizer_state_path": str(path)}
    candidate = Candidate(words, fit.config_of("adam", words))
    return Estimate(candidate, True, "model", MemoryPlan(Memory()), {"step": {}})


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    main(["fit", "--json", *map(str, arguments)])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    return said


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_model(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**settings)
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained("here")
    words = Tokenizer(models.WordLevel({str(n): n for n in range(256)}, "0"))
    tokens = {"pad_token": "0", "eos_token": "1"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained("here")


def run(lines: str, **names: Any) -> dict[str, Any]:
    exec(lines, names)
    return names


def learns(names: dict[str, Any]) -> bool:
    """True if two training steps change the weights of the program's model."""
    model, optimizer = names["model"], names["optimizer"]
    before = model.lm_head.weight.detach().clone()
    tokens = torch.arange(64, dtype=torch.long, device="cpu").view(1, 64)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return not torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("words", WORDS, ids=str)
def test_python_recipe_trains_with_each_setting(words, folder):
    save_model(LLAMA)
    names = run(python_lines(estimate_of(words, folder), RECIPE))
    assert learns(names) and isinstance(names["optimizer"], mp_optim.AdamW)


@pytest.mark.parametrize("kind", MIXTURES)
def test_python_recipe_trains_mixture_of_experts_models(kind, folder, capsys):
    save_model({**MIXTURES[kind], "model_type": kind})
    said = answer(capsys, *("--model", "here", "--gpu", "1.01GiB", "--ram", "8GB", "--seq", 128))
    names = run(said["recipes"]["Python"])
    assert said["fits"] and learns(names)
    params = sum(param.nbytes for param in names["model"].parameters())
    assert said["moments"]["step"]["parameters"] == params


def peak_of(call: Callable[[], Any]) -> int:
    # mkldnn allocates a different amount of memory on each CPU model, so it is off.
    memory = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with torch.backends.mkldnn.flags(enabled=False), memory as profiler:
        call()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


WIDE = {**LLAMA, "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 1024}


@pytest.mark.parametrize(
    ("checkpointing", "loss"),
    [
        ("off", "model"),
        pytest.param("off", "chunked", marks=pytest.mark.slow),
        pytest.param("on", "model", marks=pytest.mark.slow),
        pytest.param("on", "chunked", marks=pytest.mark.slow),
    ],
)
def test_recipe_uses_the_memory_that_fit_predicts(checkpointing, loss, folder, capsys):
    """Compare peak memory within 1 %, for the Python recipe and once for the Trainer recipe."""
    save_model(WIDE)
    ways = ("--checkpointing", checkpointing, "--loss", loss)
    machine = ("--gpu", "4GB", "--ram", "8GB", "--seq", 1024, "--batch", 1)
    said = answer(capsys, "--model", "here", *machine, *ways)
    kinds = ("gradients", "activations", "logits and loss")
    expected = sum(said["moments"]["backward"].get(kind, 0) for kind in kinds)
    names = run(said["recipes"]["Python"])
    model, tokens = names["model"], torch.arange(1024, device="cpu").view(1, 1024)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    step()  # The first step allocates tensors that later steps reuse.
    model.zero_grad()
    assert peak_of(step) == pytest.approx(expected, rel=0.01)
    if ways != ("--checkpointing", "on", "--loss", "chunked"):
        return

    rows = [{"input_ids": list(range(1024)), "labels": list(range(1024))}] * 2
    lines = said["recipes"]["Hugging Face Trainer"]
    trainer = run(on_host(lines), data=datasets.Dataset.from_list(rows))["trainer"]
    train, peaks = trainer.training_step, []

    def training_step(*args: Any) -> Any:
        losses: list[Any] = []
        peaks.append(peak_of(lambda: losses.append(train(*args))))
        return losses[0]

    trainer.training_step = training_step
    trainer.train()
    assert peaks[-1] == pytest.approx(expected, rel=0.01)


def on_host(lines: str) -> str:
    return lines.replace("output_dir=", "report_to=[], use_cpu=True, output_dir=")


def test_printed_recipes_of_fit_train_without_a_change(folder, capsys):
    save_model(LLAMA)
    machine = ("--gpu", "0.95MiB", "--reserve", "0GB", "--ram", "8GB", "--seq", 128)
    said = answer(capsys, "--model", "here", *machine, "--checkpointing", "on")
    assert said["settings"]["offload"] == 0.75
    printed = said["recipes"]
    tokens = [{"input_ids": list(range(64)), "labels": list(range(64))}] * 2
    assert learns(run(printed["Python"]))
    lines = printed["Hugging Face Trainer"]
    program = run(on_host(lines), data=datasets.Dataset.from_list(tokens))
    assert program["trainer"].train().training_loss > 0
    assert isinstance(program["trainer"].optimizer.optimizer, mp_optim.AdamW)
    assert lines.endswith("\nlog_own_norm(trainer)")


def test_chunk_loss_equals_loss_and_gradients_of_the_model():
    """Compare loss and gradients in training, logits in evaluation, and logits after restore()."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**WIDE)
    plain, chunked = (transformers.LlamaForCausalLM(config).train() for _ in range(2))
    chunked.load_state_dict(plain.state_dict())
    restore = chunk_loss(chunked, rows=50)
    tokens = torch.randint(0, 1024, (2, 130), device="cpu")
    labels = tokens.clone()
    labels[0, :20] = -100
    for more in ({}, {"num_items_in_batch": torch.tensor(77, device="cpu")}):
        losses = [model(input_ids=tokens, labels=labels, **more).loss for model in (plain, chunked)]
        grads = [
            torch.autograd.grad(loss, [*model.parameters()])
            for loss, model in zip(losses, (plain, chunked), strict=True)
        ]
        torch.testing.assert_close(losses[1], losses[0])
        torch.testing.assert_close(grads[1], grads[0])
    for model in (plain.eval(), chunked.eval()):
        found = model(input_ids=tokens, labels=labels)
        torch.testing.assert_close(found.logits, plain(input_ids=tokens).logits, rtol=0, atol=0)
    restore()
    assert chunked.train()(input_ids=tokens).logits.shape[-1] == 1024


def test_chunk_loss_refuses_models_that_scale_their_logits():
    config = transformers.Gemma2Config(num_hidden_layers=1, hidden_size=32, vocab_size=64)
    with torch.device("meta"):
        model = transformers.Gemma2ForCausalLM(config)
    assert not can_chunk(model)
    with pytest.raises(ValueError, match="leave out the call of chunk_loss"):
        chunk_loss(model)
