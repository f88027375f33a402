"""Completions in parts: every field survives, whatever it is."""

import io
from dataclasses import fields, replace

import torch

from lightning_qrl.asynchrony.completions import join, pack, unpack
from lightning_qrl.experience import Completion
from lightning_qrl.rollouts.base import recording_routes, telling
from lightning_qrl.rollouts.embedded import Embedded
from tests.helpers.tiny_models import EOS, PAD, tiny_model

PROMPTS = [[2, 3, 4], [5], [6, 7, 8, 9]]


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def differing(a: Completion, b: Completion):
    """Names of the fields in which they differ."""
    names = [field.name for field in fields(Completion)]
    return [name for name in names if not equal(getattr(a, name), getattr(b, name))]


def sampled(prompts=PROMPTS, samples=2, version=0, limits=None, name="olmoe", seed=0):
    """Completions with every field, by an engine that tells all it knows."""
    engine = Embedded(eos_id=EOS, pad_id=PAD, max_new_tokens=7, top_k=4)
    engine.sync(tiny_model(name), version)
    with telling(engine, 3), recording_routes(engine):
        return engine.generate(prompts, samples=samples, seed=seed, limits=limits)


def test_what_is_packed_comes_back_through_a_checkpoint():
    whole = sampled()
    assert all(getattr(whole[0], field.name) is not None for field in fields(Completion))
    plain = [replace(c, kept_NK=None, head_ids_NK=None, routes_TLK=None) for c in whole]
    for completions in (whole, plain, []):
        file = io.BytesIO()
        torch.save(pack(completions), file)
        file.seek(0)
        again = unpack(torch.load(file, weights_only=True), len(completions))
        assert [differing(a, b) for a, b in zip(again, completions, strict=True)] == [
            [] for _ in completions
        ]


def cut(completion: Completion, tokens: int, prompt: int) -> tuple[Completion, Completion]:
    """The first tokens, and the rest as an engine gives it that goes on with them."""
    ids = (*completion.prompt_ids, *completion.token_ids_N[:tokens].tolist())
    per_token = {f.name for f in fields(Completion) if f.name.endswith(("_N", "_NK"))}
    first = {name: getattr(completion, name)[:tokens] for name in per_token}
    rest = {name: getattr(completion, name)[tokens:] for name in per_token}
    routes = completion.routes_TLK
    begun = replace(completion, **first, truncated=True, routes_TLK=routes[: prompt + tokens - 1])
    recomputed = torch.full_like(routes[: prompt + tokens - 1], 99)  # of a prefix: not to be used
    more = torch.cat([recomputed, routes[prompt + tokens - 1 :]])
    return begun, replace(completion, **rest, prompt_ids=ids, routes_TLK=more)


def test_a_completion_in_two_parts_is_the_whole():
    long = [c for c in sampled() if len(c.token_ids_N) > 3]
    assert long
    for whole in long:
        begun, more = cut(whole, 2, len(whole.prompt_ids))
        assert differing(join(begun, more), whole) == []


def test_kept_ids_of_different_width_are_filled_up():
    (whole,) = [c for c in sampled() if len(c.token_ids_N) > 3][:1]
    begun, more = cut(whole, 2, len(whole.prompt_ids))
    narrow = replace(begun, kept_NK=begun.kept_NK[:, :1])
    joined = join(narrow, more).kept_NK
    assert joined[:2, 1:].eq(-1).all()
    assert torch.equal(joined[2:], whole.kept_NK[2:])


def test_a_limit_of_its_own_for_each_prompt():
    free, limited = sampled(), sampled(limits=[1, 3, 7])
    for n, (a, b) in enumerate(zip(free, limited, strict=True)):
        limit = (1, 3, 7)[n // 2]
        assert len(b.token_ids_N) == min(limit, len(a.token_ids_N))
        assert torch.equal(b.token_ids_N, a.token_ids_N[:limit]), "it draws something else"
        assert b.truncated == (int(b.token_ids_N[-1]) != EOS)
