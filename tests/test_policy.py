"""Policies: what is refused and how, the tokenizer, and folders that plain transformers loads."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_qrl.errors import UserError
from lightning_qrl.policy import Policy

PRINTABLE = "".join(map(chr, range(32, 127)))


def refused(name, **options):
    with pytest.raises(UserError) as error:
        Policy(str(name), **options).build()
    message = str(error.value)
    assert "\n" not in message
    assert str(name) in message
    return message


def test_a_folder_without_weights(tmp_path, save_policy):
    save_policy(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "has no weights" in refused(tmp_path)
    assert Policy(str(tmp_path), init="random").build() is not None


def test_a_folder_without_a_configuration(tmp_path):
    assert "no config.json" in refused(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    assert "no such folder" in refused(tmp_path / "nowhere")
    assert "no such folder" in refused("./nowhere")


def test_a_gguf_file_that_is_not_there(tmp_path):
    assert "no such file" in refused(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("model.safetensors", "not tensors"),
        ("config.json", "{"),
        ("config.json", "{}"),
        ("config.json", '{"model_type": "quantum_llama"}'),
    ],
)
def test_a_damaged_folder(file, text, tmp_path, save_policy):
    save_policy(tmp_path)
    (tmp_path / file).write_text(text)
    assert "cannot be loaded" in refused(tmp_path)


@pytest.mark.parametrize(
    ("slip", "meant"), [("embedde", "embedded"), ("embeded-moe", "embedded-moe")]
)
def test_nearly_the_name_of_a_shipped_policy_is_refused_at_once(slip, meant, tmp_path, monkeypatch):
    with pytest.raises(UserError) as error:
        Policy(slip)  # which asks no hub
    assert str(error.value) == f"policy {slip}: there is no such policy; did you mean {meant}?"
    for elsewhere in (f"someone/{slip}", "gpt2", "distilgpt2"):
        assert Policy(elsewhere).name == elsewhere
    monkeypatch.chdir(tmp_path)
    (tmp_path / slip).mkdir()
    with pytest.raises(UserError, match=r"no config\.json"):  # a folder of that name is meant
        Policy(slip)


@pytest.mark.parametrize("name", ["nobody/nothing-0b", "not a name", "a/b/c"])
def test_a_hub_name_that_is_unknown_offline(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "cannot be loaded" in refused(name)


def test_the_embedded_tokenizer_has_one_token_a_character():
    policy = Policy("embedded", init="random")
    ids = policy.encode(PRINTABLE)
    assert len(ids) == len(set(ids)) == len(PRINTABLE)
    assert [policy.decode(torch.tensor([i])) for i in ids] == list(PRINTABLE)
    assert policy.decode(torch.tensor(ids)) == PRINTABLE
    assert len({policy.eos_id, policy.pad_id, *ids}) == len(ids) + 2


def test_only_the_closing_end_token_is_left_out_of_the_text(tiny_policy):
    nine, five = tiny_policy.encode("95")
    eos, pad = tiny_policy.eos_id, tiny_policy.pad_id
    assert tiny_policy.decode(torch.tensor([nine, five, eos])) == "95"
    assert tiny_policy.decode(torch.tensor([nine, five])) == "95"
    assert tiny_policy.decode(torch.tensor([eos])) == ""
    assert tiny_policy.decode(torch.tensor([nine, pad, five, eos])) != "95"


def test_a_tokenizer_without_an_end_token(tmp_path, save_policy):
    save_policy(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k != "eos_token"}
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="no end-of-sequence token"):
        _ = Policy(str(tmp_path)).eos_id


@pytest.mark.parametrize("name", ["embedded", "tiny"])
def test_the_skeleton_has_the_names_and_shapes_of_the_model(name, tiny_policy):
    policy = tiny_policy if name == "tiny" else Policy("embedded", init="random")
    skeleton, model = policy.skeleton(), policy.build()
    assert all(p.is_meta for p in skeleton.parameters())
    shapes = [[(n, p.shape) for n, p in m.named_parameters()] for m in (skeleton, model)]
    assert shapes[0] == shapes[1]
    assert [n for n, _ in skeleton.named_modules()] == [n for n, _ in model.named_modules()]


def test_the_model_is_fp32_and_in_training_mode_whatever_the_file_holds(tmp_path, tiny_policy):
    Policy(tiny_policy.name, save_dtype="bfloat16").save(tiny_policy.build(), tmp_path)
    model = Policy(str(tmp_path)).build()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.training


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("save_dtype", ["float32", "bfloat16", "float16"])
def test_a_saved_policy_loads_in_plain_transformers(save_dtype, tied, tmp_path, save_policy):
    save_policy(tmp_path / "in", tie_word_embeddings=tied)
    policy = Policy(str(tmp_path / "in"), save_dtype=save_dtype)
    model = policy.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    policy.save(model, tmp_path / "out")
    dtype = getattr(torch, save_dtype)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {dtype}
    assert ("lm_head.weight" in stored) != tied
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name].to(dtype)), name
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert auto.dtype == dtype
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("12+3=")["input_ids"] == policy.encode("12+3=")


def test_nothing_is_loaded_before_it_is_asked_for(tmp_path):
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "model.safetensors").write_text("")
    assert Policy(str(tmp_path)).name == str(tmp_path)
