"""Two ranks over gloo: the average of their gradients is the gradient of one rank with it all."""

import os
import subprocess
import sys

import pytest
import torch

from lightning_qrl.kl import KLPenalty
from lightning_qrl.plugins import load_plugin, plugin_names

PACKAGE, COEF = "lightning_qrl.losses", 0.1

RANK = """
import sys
import torch
import torch.distributed as dist
from lightning_qrl.experience import split_for_updates
from lightning_qrl.kl import KLPenalty
from lightning_qrl.plugins import load_plugin, plugin_names

data, store, out, rank = *sys.argv[1:4], int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
logprobs, e, package, coef = torch.load(data, weights_only=False)
rows = torch.arange(len(e))[rank::2]
gradients = {}
for name in plugin_names(package):
    loss, logprobs.grad = load_plugin(package, name)(), None
    batches = split_for_updates(e.take(rows), [torch.arange(len(rows))], 2, world_size=2)
    for part, batch in zip(rows.tensor_split(2), batches, strict=True):
        mine = logprobs[part][:, : batch.mask_BS.shape[1]]
        kl_BS = KLPenalty(coef).per_token(mine, batch.reference_BS, batch.mask_BS)
        total = loss(mine, batch)[0] + coef * loss.reduce(kl_BS, batch)
        (total * batch.step.scale / 2).backward()  # 2: accumulation averages over micro-batches
    dist.all_reduce(logprobs.grad)
    gradients[name] = logprobs.grad / 2  # 2: DDP averages over ranks
if rank == 0:
    torch.save(gradients, out)
dist.destroy_process_group()
"""


def gradient(loss, logprobs, e, rows):
    """Of the rows as a whole optimizer step on one rank; 0 elsewhere."""
    logprobs.grad, batch = None, e.take(rows)
    mine = logprobs[rows][:, : batch.mask_BS.shape[1]]
    kl_BS = KLPenalty(COEF).per_token(mine, batch.reference_BS, batch.mask_BS)
    (loss(mine, batch)[0] + COEF * loss.reduce(kl_BS, batch)).backward()
    return logprobs.grad.clone()


@pytest.fixture(scope="module")
def two_ranks(off_policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "rank.py").write_text(RANK)
    torch.save((*off_policy(0), PACKAGE, COEF), folder / "data.pt")
    files = [folder / name for name in ("rank.py", "data.pt", "store", "out.pt")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, *files, str(rank)], env=environment, stderr=-1, text=True)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=120)
            assert rank.returncode == 0, errors
    finally:  # one that waits for another that failed
        for rank in ranks:
            rank.kill()
    return torch.load(folder / "out.pt")


@pytest.mark.parametrize("name", plugin_names(PACKAGE))
def test_two_ranks_with_two_micro_batches_each(name, two_ranks, off_policy):
    logprobs, e = off_policy(0)
    loss, everything = load_plugin(PACKAGE, name)(), torch.arange(len(e))
    want = gradient(loss, logprobs, e, everything)
    assert want.any()
    if name == "bnpo":  # by definition each rank's own token mean
        unequal = want
        want = sum(gradient(loss, logprobs, e, everything[rank::2]) for rank in range(2)) / 2
        assert (want - unequal).abs().max() > 1e-3
    torch.testing.assert_close(two_ranks[name], want, rtol=1e-5, atol=1e-8)
