"""The layout of a batch, by hand, and cutting it into micro-batches."""

import pytest
import torch

from lightning_qrl.experience import Completion, make_experience, split_for_updates

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
    assert (e.step_tokens, e.loss_scale, len(e)) == (4, 1.0, 2)


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
    assert e.step_tokens == 1


def test_rows_without_a_token_can_be_taken(ragged):
    e = ragged(0)
    dead = e.take(torch.tensor([4]))
    assert not e.mask_BS[4].any()
    assert dead.step_tokens == 0
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
        assert sum(int(p.mask_BS.sum()) for p in parts) == e.step_tokens
        for part in parts:
            assert part.step_tokens == e.step_tokens
            assert part.loss_scale == micro_batches
    tokens = [b.input_ids_BT[:, 1:][b.mask_BS].tolist() for b in batches[:micro_batches]]
    rows = [e.input_ids_BT[i, 1:][e.mask_BS[i]].tolist() for i in updates[0]]
    assert sum(tokens, []) == sum(rows, [])


def test_moving_keeps_what_is_no_tensor():
    moved = by_hand().to("cpu")
    assert torch.equal(moved.mask_BS, by_hand().mask_BS)
    assert by_hand().to("meta").input_ids_BT.is_meta
    assert moved.step_tokens == 4
