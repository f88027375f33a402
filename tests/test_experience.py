"""The layout of a batch, by hand, and cutting it into micro-batches."""

from dataclasses import replace

import pytest
import torch

from lightning_qrl.experience import (
    Completion,
    Step,
    count_step,
    make_experience,
    split_for_updates,
)

EOS = 1


def completion(prompt, tokens, version=0, truncated=False):
    ids = torch.tensor(tokens)
    return Completion(
        tuple(prompt), ids, -ids.float() / 10, torch.full_like(ids, version), truncated
    )


def by_hand(pad_id=EOS):
    completions = [completion([5, 6], [7, 8, EOS], 3), completion([9], [EOS], 4, truncated=True)]
    return make_experience(completions, torch.tensor([1.0, 0.0]), torch.tensor([2.0, -2.0]), pad_id)


def test_every_field_by_hand():
    e = by_hand()
    assert e.input_ids_BT.tolist() == [[5, 6, 7, 8, EOS], [9, EOS, EOS, EOS, EOS]]
    # entry s belongs to token s + 1; the end-of-sequence token is trained, padding equal to it not
    assert e.mask_BS.tolist() == [[False, True, True, True], [True, False, False, False]]
    want = torch.tensor([[0.0, -0.7, -0.8, -0.1], [-0.1, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(e.logprobs_BS, want, rtol=0, atol=1e-7)
    assert e.versions_BS.tolist() == [[0, 3, 3, 3], [4, 0, 0, 0]]
    assert e.truncated_B.tolist() == [False, True]
    assert e.rewards_B.tolist() == [1.0, 0.0]
    assert e.advantages_B.tolist() == [2.0, -2.0]
    assert e.prompt_length_B.tolist() == [2, 1]
    assert e.reference_BS is e.kept_BSK is None
    assert (len(e), e.max_new_tokens) == (2, 3)  # without a limit, the longest completion's length
    assert e.step == Step(tokens=4, completions=2, rank_tokens=4)
    assert e.step.scale == 1.0


def test_a_step_undoes_the_averages_over_micro_batches_and_ranks():
    assert Step(10, 5, 4, micro_batches=3, ranks=2).scale == 6.0


def test_the_length_limit_can_be_longer_than_any_completion():
    e = make_experience([completion([5], [7])], torch.zeros(1), torch.zeros(1), 0, max_new_tokens=9)
    assert e.max_new_tokens == 9


def test_kept_tokens_stand_beside_the_prediction_they_were_left_for():
    narrow = replace(completion([5, 6], [7]), kept_NK=torch.tensor([[7, 8]], dtype=torch.int32))
    wide = replace(completion([9], [EOS, 2]), kept_NK=torch.tensor([[EOS, 2, 3], [2, -1, -1]]))
    e = make_experience([narrow, wide], torch.zeros(2), torch.zeros(2), EOS)
    nothing = [-1, -1, -1]
    assert e.kept_BSK.tolist() == [[nothing, [7, 8, -1]], [[EOS, 2, 3], [2, -1, -1]]]
    assert torch.equal(e.take(torch.tensor([1])).kept_BSK, e.kept_BSK[1:])
    assert e.kept_BSK.dtype == torch.int64


def test_the_mask_comes_from_lengths_not_from_token_values():
    for pad_id in (0, EOS, 7):
        e = by_hand(pad_id)
        assert torch.equal(e.mask_BS, by_hand().mask_BS)
        assert e.input_ids_BT[1, 2:].tolist() == [pad_id] * 3


def test_taking_rows_cuts_common_padding_and_counts_their_tokens():
    e = by_hand().take(torch.tensor([1]))
    assert e.input_ids_BT.tolist() == [[9, EOS]]
    assert e.mask_BS.tolist() == [[True]]
    assert e.logprobs_BS.shape == e.versions_BS.shape == (1, 1)
    assert e.step == Step(tokens=1, completions=1, rank_tokens=1)


def test_taking_rows_takes_every_field_of_them():
    whole = by_hand()
    reference_BS, kept_BSK = torch.rand(2, 4), torch.randint(9, (2, 4, 3))
    e = replace(whole, reference_BS=reference_BS, kept_BSK=kept_BSK).take(torch.tensor([1, 0]))
    assert torch.equal(e.reference_BS, reference_BS[[1, 0]])
    assert torch.equal(e.kept_BSK, kept_BSK[[1, 0]])
    for name in ("prompt_length_B", "rewards_B", "advantages_B", "truncated_B", "input_ids_BT"):
        assert torch.equal(getattr(e, name), getattr(whole, name)[[1, 0]])
    short = e.take(torch.tensor([0]))
    assert short.reference_BS.shape == (1, 1)
    assert short.kept_BSK.shape == (1, 1, 3)


def test_completions_that_do_not_count_leave_mask_and_counts():
    e = by_hand()
    kept = e.where(~e.truncated_B)
    assert kept.mask_BS.tolist() == [[False, True, True, True], [False] * 4]
    assert kept.step == Step(tokens=3, completions=1, rank_tokens=3)
    assert torch.equal(kept.input_ids_BT, e.input_ids_BT)
    assert len(kept) == 2


def test_no_row_can_be_taken(ragged):
    none = ragged(0).take(torch.tensor([], dtype=torch.int64))
    assert len(none) == 0
    assert none.mask_BS.shape == (0, 1)
    assert none.step == Step(0, 0, 0)


def test_a_step_counts_completions_with_a_token(ragged):
    e = ragged(0)
    some = [row for row in e.mask_BS.tolist() if any(row)]
    tokens = sum(map(sum, some))
    assert count_step(e.mask_BS) == Step(tokens, len(some), tokens)
    assert len(some) < len(e)


def test_rows_without_a_token_can_be_taken(ragged):
    e = ragged(0)
    dead = e.take(torch.tensor([4]))
    assert not e.mask_BS[4].any()
    assert dead.step == Step(0, 0, 0)
    assert dead.mask_BS.shape == (1, 1)


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_a_split_keeps_every_completion_and_the_count_of_its_step(micro_batches, ragged):
    e = ragged(1)
    updates = [torch.tensor([7, 0, 3, 4, 1, 2, 5, 6]), torch.arange(8)]
    batches = split_for_updates(e, updates, micro_batches)
    assert len(batches) == 2 * micro_batches
    for number, index in enumerate(updates):
        parts = batches[number * micro_batches : (number + 1) * micro_batches]
        assert torch.equal(torch.cat([p.rewards_B for p in parts]), e.rewards_B[index])
        assert sum(int(p.mask_BS.sum()) for p in parts) == e.step.tokens
        for part in parts:
            assert part.step == replace(e.step, micro_batches=micro_batches)
    tokens = [b.input_ids_BT[:, 1:][b.mask_BS].tolist() for b in batches[:micro_batches]]
    rows = [e.input_ids_BT[i, 1:][e.mask_BS[i]].tolist() for i in updates[0]]
    assert sum(tokens, []) == sum(rows, [])


def test_moving_keeps_what_is_no_tensor():
    moved = by_hand().to("cpu")
    assert torch.equal(moved.mask_BS, by_hand().mask_BS)
    assert by_hand().to("meta").input_ids_BT.is_meta
    assert moved.step == by_hand().step
