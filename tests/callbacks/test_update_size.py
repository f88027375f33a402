"""Update size: the numbers by hand, for every weight, and that measuring changes nothing."""

import lightning as L
import pytest
import torch

from callbacks.forward_quantization import ForwardQuantization
from callbacks.update_size import UpdateSize, update_sizes

PREFIX = "train/update_size/"


class Weights(L.Callback):
    """Keeps the weights at the start and after every step."""

    def __init__(self):
        self.kept = []

    def on_train_start(self, trainer, pl_module):
        parameters = pl_module.model.named_parameters()
        self.kept.append({name: p.detach().double() for name, p in parameters})

    def on_train_batch_end(self, trainer, pl_module, *args):
        if trainer.global_step == len(self.kept):
            self.on_train_start(trainer, pl_module)


def records(recorder):
    return [(step, m) for step, m in recorder.records if any(PREFIX in name for name in m)]


def relative(old, new, names):
    change = torch.cat([(new[n] - old[n]).flatten() for n in names])
    return float((change.square().mean() / torch.cat([old[n].flatten() for n in names])
                  .square().mean()).sqrt())  # fmt: skip


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_numbers_by_hand(train, recorder, micro_batches):
    weights = Weights()
    quantizes = ForwardQuantization("nvfp4", where="mlp", outer_scale="row")
    module = train(3, quantizes, UpdateSize(), weights, micro_batches=micro_batches)
    assert [step for step, _ in records(recorder)] == [1, 2, 3]
    quantized = {f"{row.layer}.weight" for row in module.plan.table() if row.quantized}
    for step, metrics in records(recorder):
        old, new = weights.kept[step - 1 : step + 1]
        groups = {
            "all": old.keys(),
            "quantized": quantized,
            "not_quantized": old.keys() - quantized,
        }
        expected = {PREFIX + name: relative(old, new, names) for name, names in groups.items()}
        same = sum(int((old[n].bfloat16() == new[n].bfloat16()).sum()) for n in old)
        expected[f"{PREFIX}bf16_unchanged"] = same / sum(p.numel() for p in old.values())
        assert metrics == pytest.approx(expected, rel=1e-4)
        assert 0.1 < metrics[f"{PREFIX}bf16_unchanged"] < 1
        assert 1e-5 < metrics[f"{PREFIX}quantized"] < 0.1


def test_a_change_below_half_a_bf16_step_is_seen_in_fp32_alone(train):
    module = train(1)
    weight = next(module.model.parameters())
    torch.nn.init.ones_(weight)
    before = {name: p.detach().clone() for name, p in module.model.named_parameters()}
    with torch.no_grad():
        weight.view(-1)[0] += 2**-8  # halfway to BF16's next number: the tie rounds back to 1
        weight.view(-1)[1] += 2**-8 + 2**-16
    unchanged = update_sizes(module, before)["bf16_unchanged"]
    elements = sum(p.numel() for p in module.model.parameters())
    assert round((1 - unchanged) * elements) == 1


def test_nothing_quantized_has_no_group_and_n_steps_are_skipped(train, recorder):
    train(5, UpdateSize(2))
    found = records(recorder)
    assert [step for step, _ in found] == [2, 4]
    names = {f"{PREFIX}{name}" for name in ("all", "not_quantized", "bf16_unchanged")}
    for _, metrics in found:
        assert metrics.keys() == names
        assert metrics[f"{PREFIX}all"] == metrics[f"{PREFIX}not_quantized"] > 0


def test_measuring_changes_nothing_and_keeps_nothing(train):
    callback = UpdateSize()
    often, never = train(2, callback).state_dict(), train(2).state_dict()
    assert all(torch.equal(tensor, never[name]) for name, tensor in often.items())
    assert callback._before == {}


def test_bad_arguments():
    with pytest.raises(ValueError, match="must be at least 1"):
        UpdateSize(0)
