"""Recorded and replayed routes against float64 formulas; scoring with them, each row alone."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import EOS, PAD, SIZES, tiny_model
from torch import nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from lightning_qrl.experience import make_experience
from lightning_qrl.rollouts.base import recording_routes
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.routing import LIVE, Routers, symbols
from lightning_qrl.scoring import Scorer

E, K, L = 6, 2, 2
COMMON = {**SIZES, "num_experts_per_tok": K, "moe_intermediate_size": 24, "head_dim": 16}
DEEPSEEK = {
    "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "n_routed_experts": E,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def softmax(s, i):
    p = s.exp() / s.exp().sum()
    return p[i]


def renormalized(s, i):
    return s[i].exp() / sum(s[j].exp() for j in i)


def sigmoid(s, i, scale=2.5):
    p = 1 / (1 + (-s).exp())
    return scale * p[i] / sum(p[j] for j in i)


def made(model, config, **own):
    return lambda: model(config(**{**COMMON, **own}))


MODELS = {  # how to make it, and the shares of experts i at logits s
    "qwen2_moe": (lambda: tiny_model("qwen2_moe", num_experts=E), softmax),
    "qwen2_moe normalized": (
        lambda: tiny_model("qwen2_moe", num_experts=E, norm_topk_prob=True), renormalized,
    ),
    "olmoe": (lambda: tiny_model("olmoe", num_experts=E), softmax),
    "qwen3_moe": (
        made(Qwen3MoeForCausalLM, Qwen3MoeConfig, num_experts=E, norm_topk_prob=True),
        renormalized,
    ),
    "mixtral": (made(MixtralForCausalLM, MixtralConfig, num_local_experts=E), renormalized),
    "gpt_oss": (made(GptOssForCausalLM, GptOssConfig, num_local_experts=E), renormalized),
    "deepseek_v3": (made(DeepseekV3ForCausalLM, DeepseekV3Config, **DEEPSEEK), sigmoid),
}  # fmt: skip
every_architecture = pytest.mark.parametrize("name", MODELS)
IDS_1T = torch.tensor([[2, 5, 7, 3, 9, 4, 4, 10]])


def build(name):
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    for buffer in model.buffers():  # what only helps to choose
        if buffer.shape == (E,):
            buffer.normal_()
    return model


def watched(model):
    """What the modules of experts receive: a list of (chosen experts, shares), layer by layer."""
    seen = []
    for module in model.modules():
        if "experts" in module._modules:
            module.experts.register_forward_pre_hook(lambda _, args: seen.append(args[1:]))
    return seen


def random_routes(tokens):
    g = torch.Generator().manual_seed(5)
    scores = torch.rand(tokens, L, E, generator=g)
    return scores.argsort(dim=-1)[..., :K]


@every_architecture
def test_experts_receive_the_recorded_choice_with_shares_of_the_models_own_logits(name):
    model = build(name)
    routers, seen, logits = Routers(model), watched(model), []
    for router in routers._gates:
        router.register_forward_hook(lambda _, __, out: logits.append(out[0].detach().double()))
    routes_NLK = random_routes(IDS_1T.numel())
    with routers.replayed(routes_NLK):
        model(input_ids=IDS_1T, use_cache=False)
    assert len(seen) == len(logits) == L
    for layer, (chosen_NK, share_NK) in enumerate(seen):
        assert torch.equal(chosen_NK, routes_NLK[:, layer])
        for n, chosen_K in enumerate(chosen_NK):
            want_K = MODELS[name][1](logits[layer][n], chosen_K)
            torch.testing.assert_close(share_NK[n].double(), want_K, rtol=1e-5, atol=1e-7)


@every_architecture
def test_a_models_own_choice_replayed_changes_no_bit_of_values_and_gradients(name):
    model = build(name)
    routers, results = Routers(model), []
    with routers.recorded() as record:
        model(input_ids=IDS_1T, use_cache=False)
    routes_NLK = record.take()
    assert routes_NLK.dtype == torch.int16
    for routes in (None, routes_NLK.long(), torch.full((len(routes_NLK), L, K), LIVE)):
        model.zero_grad()
        if routes is None:
            logits = model(input_ids=IDS_1T, use_cache=False).logits
        else:
            with routers.replayed(routes):
                logits = model(input_ids=IDS_1T, use_cache=False).logits
        logits.square().sum().backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        results.append([logits.detach(), *(g.clone() for g in grads)])
    close = [torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(*results[:2], strict=True)]
    assert all(close)
    if name != "gpt_oss":  # its softmax is of the chosen logits alone: other roundings
        assert all(torch.equal(a, b) for a, b in zip(*results[:2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*results[1:], strict=True))


def test_agreement_counts_sets_of_recorded_tokens_that_were_replayed_with_gradient():
    model = build("mixtral")
    routers = Routers(model)
    with routers.recorded() as record:
        model(input_ids=IDS_1T, use_cache=False)
    routes_NLK = record.take().long()
    routes_NLK[0] = LIVE
    routes_NLK[1] = routes_NLK[1].flip(-1)  # the same set
    last_NK = routes_NLK[:, -1]
    last_NK[2] = torch.tensor([e for e in range(E) if e not in last_NK[2].tolist()][:K])
    with routers.replayed(routes_NLK), torch.no_grad():
        model(input_ids=IDS_1T, use_cache=False)
    assert routers.agreement().weight == 0
    with routers.replayed(routes_NLK):
        model(input_ids=IDS_1T, use_cache=False)
    tokens = IDS_1T.numel() - 1
    assert routers.agreement().value() == (L * tokens - 1) / (L * tokens)
    assert routers.agreement().weight == 0  # taken


def test_models_without_known_routers_are_refused():
    with pytest.raises(ValueError, match="dense"):
        Routers(tiny_model("qwen3"))
    with torch.device("meta"):
        phimoe = PhimoeForCausalLM(PhimoeConfig(**COMMON))
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.router, a PhimoeTopKRouter, weighs"):
        Routers(phimoe)


def test_routes_are_read_off_the_meta_device_too():
    with torch.device("meta"):
        skeleton = MODELS["deepseek_v3"][0]()
    assert len(Routers(skeleton)._gates) == L


# Rollouts


PROMPTS = [[5, 4, 3, 2, 6, 5, 4], [3], [2, 6, 6], [4, 5, 2, 3]]


def sampled(model, prompts=PROMPTS, samples=1):
    engine = Embedded(eos_id=EOS, pad_id=PAD, max_new_tokens=6)
    engine.sync(model, 0)
    with recording_routes(engine):
        told = engine.generate(prompts, samples=samples, seed=1)
    assert engine.generate(prompts[:1], samples=1, seed=1)[0].routes_TLK is None
    return told


def test_recorded_is_what_the_experts_received_while_sampling():
    model = build("qwen2_moe")
    seen = watched(model)
    with torch.no_grad():
        completions = sampled(model)
    widest, number = max(map(len, PROMPTS)), len(PROMPTS)
    steps = max(len(c.token_ids_N) for c in completions)
    layers = [torch.stack([s[0] for s in seen[L * t : L * (t + 1)]], 1) for t in range(steps)]
    want = [[*rows[-len(p) :]] for rows, p in zip(
        layers[0].view(number, widest, L, K), PROMPTS, strict=True
    )]  # fmt: skip
    for t in range(1, steps):  # one row for each completion that goes on, in order
        going = [n for n, c in enumerate(completions) if len(c.token_ids_N) > t]
        for n, route_LK in zip(going, layers[t], strict=True):
            want[n].append(route_LK)
    for c, routes in zip(completions, want, strict=True):
        assert c.routes_TLK.dtype == torch.int16
        assert torch.equal(c.routes_TLK.long(), torch.stack(routes))


def test_completions_of_a_group_carry_the_routes_of_their_own_tokens():
    model = build("qwen2_moe")
    for c in sampled(model, samples=5):
        ids_1T = torch.tensor([[*c.prompt_ids, *c.token_ids_N.tolist()]])[:, :-1]
        with Routers(model).recorded() as record, torch.no_grad():
            model(input_ids=ids_1T, use_cache=False)
        assert torch.equal(c.routes_TLK, record.take())


# Scoring


@pytest.mark.parametrize("vocabulary", [5, 2**20])
@pytest.mark.parametrize("shape", [(3, 7, 2, 2), (4, 9, 30, 3)], ids=["few", "many"])
def test_symbols_number_the_distinct_pairs_of_id_and_routes_in_order(vocabulary, shape):
    g = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(vocabulary, (shape[0], shape[1] + 1), generator=g)
    routes_BSLK = torch.randint(LIVE, 3, shape, generator=g).to(torch.int16)
    ids_BT[1:], routes_BSLK[1:] = ids_BT[0], routes_BSLK[0]
    ids_BT[-1, 2:] += 1
    routes_BSLK[1, 3, -1, -1] = 7
    symbols_BT, ids_Y, routes_YLK = symbols(ids_BT, routes_BSLK)
    routes_BTM = F.pad(routes_BSLK.flatten(2), (0, 0, 0, 1), value=LIVE)
    rows_NM = torch.cat([ids_BT[..., None], routes_BTM], dim=-1).flatten(0, 1)
    rows_NM = torch.cat([torch.full_like(rows_NM[:1], LIVE), rows_NM])
    want_YM, want_N = torch.unique(rows_NM, dim=0, return_inverse=True)
    assert torch.equal(symbols_BT.flatten(), want_N[1:])
    assert torch.equal(ids_Y, want_YM[:, 0].clamp_min(0))
    assert torch.equal(routes_YLK.flatten(1), want_YM[:, 1:])
    assert want_N[0] == 0


def exact(model, e):
    """Float64 log-probabilities, each row alone, with routers of our own that obey the routes."""
    model, now = copy.deepcopy(model).double(), {}
    blocks = [m for m in model.modules() if "experts" in m._modules]
    for layer, block in enumerate(blocks):
        router = block.gate

        def forward(x, router=router, layer=layer):
            s_NE = x.reshape(-1, x.shape[-1]) @ router.weight.T
            chosen_NK = now["routes"][:, layer].long()
            kept_NE = torch.zeros_like(s_NE).scatter(1, chosen_NK, 1.0)
            p_NE = s_NE.exp() * kept_NE / (s_NE.exp() * kept_NE).sum(-1, keepdim=True)
            return s_NE, torch.stack([p_NE[n, c] for n, c in enumerate(chosen_NK)]), chosen_NK

        router.forward = forward
    rows = []
    for b, mask_S in enumerate(e.mask_BS):
        end = int(mask_S.nonzero().max()) + 1
        now["routes"] = e.routes_BSLK[b, :end]
        logits_SV = model(input_ids=e.input_ids_BT[b : b + 1, :end], use_cache=False).logits[0]
        chosen = logits_SV.log_softmax(-1).gather(-1, e.input_ids_BT[b, 1 : end + 1, None])[:, 0]
        rows.append(torch.cat([chosen, chosen.new_zeros(len(mask_S) - end)]) * mask_S)
    return model, torch.stack(rows)


def batch(model):
    """Ragged groups with routes that no router took; twins in ids but not in routes, or in both."""
    completions = sampled(model, samples=2)
    completions += [completions[0], replace(completions[1]), completions[-1]]
    routed = []
    for n, c in enumerate(completions):
        g = torch.Generator().manual_seed(n % (len(completions) - 1))  # the last: as the first
        scores = torch.rand(len(c.routes_TLK), L, 4, generator=g)
        routed.append(replace(c, routes_TLK=scores.argsort(dim=-1)[..., :K].to(torch.int16)))
    routed[-1] = replace(routed[0])
    zeros = torch.zeros(len(routed))
    return make_experience(routed, zeros, zeros, PAD)


@pytest.mark.parametrize("shared_prefix", [True, False], ids=["shared", "rows"])
def test_values_and_gradients_are_those_of_each_row_alone_in_float64(shared_prefix):
    model = tiny_model("qwen2_moe", norm_topk_prob=True)
    e = batch(model)
    oracle, want_BS = exact(model, e)
    weights_BS = torch.randn(want_BS.shape, generator=torch.Generator().manual_seed(3))
    (want_BS * weights_BS).sum().backward()
    model.zero_grad()
    scores = Scorer(model, shared_prefix=shared_prefix, replay=True)(e, 1.0)
    (scores.logprobs * weights_BS).sum().backward()
    torch.testing.assert_close(scores.logprobs.double(), want_BS, rtol=0, atol=2e-5)
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        error = (p.grad - q.grad).norm() / q.grad.norm().clamp_min(1e-3)
        assert error < 2e-4, f"{name}: {error:.1e}"
    live = Scorer(model, shared_prefix=shared_prefix)(e, 1.0).logprobs
    assert (live - want_BS).abs().max() > 0.1, "replay makes no difference in this test"


def test_no_gradient_reaches_the_logits_of_experts_that_were_not_recorded():
    model = tiny_model("qwen2_moe", norm_topk_prob=True)
    e = batch(model)
    routes = torch.where(e.routes_BSLK == LIVE, LIVE, e.routes_BSLK % 2)
    routes[..., 1] = torch.where(routes[..., 0] == LIVE, LIVE, 1 - routes[..., 0])
    scores = Scorer(model, shared_prefix=True, replay=True)(replace(e, routes_BSLK=routes), 1.0)
    scores.logprobs.sum().backward()
    for module in model.modules():
        if isinstance(getattr(module, "gate", None), nn.Module) and hasattr(module, "experts"):
            grad_EH = module.gate.weight.grad.abs()
            assert grad_EH[:2].max() > 0.01
            assert grad_EH[2:].max() < 1e-6  # the softmax's rounding


def test_the_whole_rollout_in_parts_replays_too():
    model = tiny_model("qwen2_moe", norm_topk_prob=True)
    e = batch(model)
    parts = Scorer(model, shared_prefix=True, replay=True).in_parts(e, 1.0, torch.device("cpu"))
    torch.testing.assert_close(parts.double(), exact(model, e)[1].detach(), rtol=0, atol=2e-5)
