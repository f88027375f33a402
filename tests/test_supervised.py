"""The warm start: its loss, its demonstrations, and when they become noisy."""

import pytest
import torch

from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.supervised import Demonstrations, SupervisedModule, imbalance
from lightning_qrl.tasks.arithmetic import Arithmetic

PROMPTS = Arithmetic(2).prompts("train")


def make(policy, lr=1e-2, eps=1e-8, **options):
    engine = Embedded(eos_id=policy.eos_id, pad_id=policy.pad_id)
    module = SupervisedModule(
        policy=policy,
        task=Arithmetic(2),
        engine=engine,
        optimizer=AdamWSettings(lr=lr, eps=eps),
    )
    data = Demonstrations(policy, PROMPTS, **{"max_steps": 20, "batch_size": 12, **options})
    return module, data


def demonstrated(policy, batch):
    """(prompt, answer, ends with the end token) of each row."""
    rows = []
    for row in range(len(batch)):
        where = batch.mask_BS[row].nonzero()[:, 0]
        ids = batch.input_ids_BT[row]
        prompt = policy.decode(ids[: where[0] + 1])
        rows.append((prompt, policy.decode(ids[where + 1]), int(ids[where[-1] + 1]) == 1))
    return rows


def test_right_answers_then_noisy_ones(tiny_policy):
    _, data = make(tiny_policy, blunt_steps=5, noise=0.5, batch_size=200)
    answers = {p.text: p.answer for p in PROMPTS}
    wrong = []
    for step in (0, 14, 15, 19):
        rows = demonstrated(tiny_policy, data.batch(step))
        assert all(ended for *_, ended in rows)
        assert all(len(answer) == len(answers[prompt]) for prompt, answer, _ in rows)
        wrong.append(sum(answer != answers[prompt] for prompt, answer, _ in rows) / len(rows))
    assert wrong[:2] == [0, 0]
    assert all(0.4 < share < 0.95 for share in wrong[2:])


def test_the_noise_is_its_share_of_the_characters(tiny_policy):
    _, data = make(tiny_policy, blunt_steps=20, noise=0.4, batch_size=1000)
    answers = {p.text: p.answer for p in PROMPTS}
    pairs = [
        (a, b)
        for prompt, answer, _ in demonstrated(tiny_policy, data.batch(0))
        for a, b in zip(answer, answers[prompt], strict=True)
    ]
    changed = sum(a != b for a, b in pairs) / len(pairs)
    assert changed == pytest.approx(0.4 * 10 / 11, abs=0.04)  # one of 11 draws is the same again


def test_a_batch_follows_from_its_step_and_the_seed(tiny_policy):
    ids = [make(tiny_policy, seed=seed)[1].batch(step).input_ids_BT
           for seed, step in ((0, 3), (0, 3), (0, 4), (1, 3))]  # fmt: skip
    assert torch.equal(ids[0], ids[1])
    assert ids[0].tolist() != ids[2].tolist()
    assert ids[0].tolist() != ids[3].tolist()


def test_the_loss_is_the_mean_cross_entropy_of_answer_and_end(tiny_policy, fit, recorder):
    module, data = make(tiny_policy)
    fit(module, data, 1, logger=recorder)
    batch, exact, nll = data.batch(0), tiny_policy.build().double(), []
    for row in range(len(batch)):
        logits = exact(input_ids=batch.input_ids_BT[row : row + 1, :-1]).logits[0].detach()
        picked = logits.log_softmax(-1).gather(-1, batch.input_ids_BT[row, 1:, None])[:, 0]
        nll += (-picked[batch.mask_BS[row]]).tolist()
    assert recorder.steps[0]["train/loss"] == pytest.approx(sum(nll) / len(nll), rel=1e-5)
    assert {"train/grad_norm", "train/learning_rate"} <= recorder.steps[0].keys()


def test_accumulation_changes_no_step(tiny_policy, fit):
    before = torch.cat([p.detach().flatten() for p in tiny_policy.build().parameters()])
    deltas = []
    for parts in (1, 2, 4):
        module, data = make(tiny_policy, lr=1.0, eps=1.0)
        fit(module, data, 2, accumulate_grad_batches=parts)
        after = torch.cat([p.detach().flatten() for p in module.model.parameters()])
        deltas.append((after - before).double())
    for delta in deltas[1:]:
        assert (delta - deltas[0]).norm() / deltas[0].norm() < 1e-4


def test_it_learns(tiny_policy, fit, recorder):
    module, data = make(tiny_policy, batch_size=64)
    fit(module, data, 20, logger=recorder)
    losses = [step["train/loss"] for step in recorder.steps]
    assert len(losses) == 20
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch_size": 0}, "batch_size must be 1 to"),
        ({"noise": 1.1}, "noise must be 0 to 1"),
        ({"blunt_steps": -1}, "blunt_steps must be at least 0"),
    ],
)
def test_arguments_out_of_range(wrong, says, tiny_policy):
    with pytest.raises(ValueError, match=says):
        make(tiny_policy, **wrong)


def test_a_batch_that_does_not_divide(tiny_policy, fit):
    module, data = make(tiny_policy)
    with pytest.raises(ValueError, match="batch_size=12 does not divide into .*=5"):
        fit(module, data, 1, accumulate_grad_batches=5)


def test_prompts_without_an_answer(tiny_policy, parity):
    blank = [type(PROMPTS[0])("1+1=")]
    with pytest.raises(ValueError, match="prompts without an answer"):
        Demonstrations(tiny_policy, blank, max_steps=1)


def test_imbalance_of_even_and_of_collapsed_routing():
    even_NE = torch.eye(6).repeat(4, 1)  # every expert first as often; the second choice is rolled
    even_NE = even_NE + 0.5 * even_NE.roll(1, dims=1)
    assert imbalance(even_NE, chosen=2).item() == pytest.approx(1)
    collapsed_NE = torch.tensor([50.0, 50.0, 0.0, 0.0, 0.0, 0.0]).repeat(24, 1)
    assert imbalance(collapsed_NE, chosen=2).item() == pytest.approx(6 / 2)


def test_imbalance_is_its_equation_and_pushes_the_busiest_expert_down():
    torch.manual_seed(0)
    logits_NE = (torch.randn(50, 5) + torch.tensor([2.0, 0, 0, 0, 0])).requires_grad_()
    value = imbalance(logits_NE, chosen=2)
    p = [[float(x) for x in row.double().softmax(0)] for row in logits_NE.detach()]
    chosen = [sorted(range(5), key=lambda e: -row[e])[:2] for row in p]
    f = [sum(e in pair for pair in chosen) / 100 for e in range(5)]
    wanted = 5 * sum(f[e] * sum(row[e] for row in p) / 50 for e in range(5))
    assert value.item() == pytest.approx(wanted, rel=1e-5)
    value.backward()
    assert max(range(5), key=lambda e: logits_NE.grad[:, e].sum()) == 0
