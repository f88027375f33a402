"""A policy small enough to train in milliseconds, a task it can be mixed at, and a tiny Trainer."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before torch: compiling kernels takes seconds each, and changes no number. Whatever tests that
# turns it on (tests/formats/test_compiling.py).
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers, and what they start, share the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_qrl.data import RolloutData
from lightning_qrl.experience import Completion, Experience, count_step, make_experience
from lightning_qrl.grpo import GRPOModule
from lightning_qrl.optimizer import AdamWSettings
from lightning_qrl.policy import Policy
from lightning_qrl.rollouts.embedded import Embedded
from lightning_qrl.tasks.base import Prompt

SPECIAL = ["<pad>", "<eos>", "<unk>"]


def save_tiny_policy(folder: Path, model: models.Model, **config: Any) -> None:
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    if isinstance(model, models.WordLevel):
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "initializer_range": 0.3,
    }
    ids = {"pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        qwen3 = Qwen3Config(vocab_size=tokenizer.get_vocab_size(), **{**sizes, **ids, **config})
        Qwen3ForCausalLM(qwen3).save_pretrained(folder)


def characters(text: str) -> models.WordLevel:
    vocab = {token: i for i, token in enumerate([*SPECIAL, *text])}
    return models.WordLevel(vocab=vocab, unk_token="<unk>")


@pytest.fixture(scope="session")
def save_policy() -> Callable[..., None]:
    """Writes a policy of two layers and 17 characters; keyword arguments change its config."""

    def save(folder: Path, model: models.Model | None = None, **config: Any) -> None:
        save_tiny_policy(folder, model or characters("0123456789+-*="), **config)

    return save


@pytest.fixture(scope="session")
def tiny_policy(save_policy: Callable[..., None], tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("policy")
    save_policy(folder)
    return Policy(str(folder))


@pytest.fixture(scope="session")
def moe_policy(tiny_policy, tmp_path_factory: pytest.TempPathFactory):
    """The same with the two layers of a mixture: two of eight experts, and a shared one."""
    folder = tmp_path_factory.mktemp("moe")
    shutil.copytree(tiny_policy.name, folder, dirs_exist_ok=True)
    config = Qwen2MoeConfig(
        vocab_size=17, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.3, num_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=24, shared_expert_intermediate_size=24, norm_topk_prob=True,
        pad_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen2MoeForCausalLM(config).save_pretrained(folder)
    return Policy(str(folder))


class Parity:
    """Rewards an odd sum of the completion's characters: mixed groups from any policy."""

    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"{7**i}+{i}=", "1") for i in range(7)]

    def reward(self, prompt: Prompt, completion: str) -> float:
        return float(sum(map(ord, completion)) % 2)

    def solved(self, reward: float) -> bool:
        return reward == 1.0


@pytest.fixture
def parity() -> Parity:
    return Parity()


class Recorder(DummyLogger):
    """Keeps every record of metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.records.append((step, metrics))

    @property
    def steps(self) -> list[dict[str, float]]:
        """The training metrics of each optimizer step."""
        return [metrics for _, metrics in self.records if "train/loss" in metrics]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def fit() -> Callable[..., L.Trainer]:
    """Runs a tiny CPU Trainer with the settings that `qrl fit` fixes."""

    def run(
        module: L.LightningModule,
        data: L.LightningDataModule,
        steps: int,
        ckpt_path: Path | None = None,
        **settings: Any,
    ) -> L.Trainer:
        defaults = {"logger": False, "enable_checkpointing": False}
        trainer = L.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            reload_dataloaders_every_n_epochs=1,
            log_every_n_steps=1,
            **{**defaults, **settings},
        )
        trainer.fit(module, data, ckpt_path=ckpt_path)
        return trainer

    return run


@pytest.fixture
def train(tiny_policy, parity, fit, recorder) -> Callable[..., GRPOModule]:
    """Trains on six groups of four; what is logged goes to `recorder`."""

    def run(
        steps: int,
        *callbacks: L.Callback,
        minibatches: int = 1,
        micro_batches: int = 1,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> GRPOModule:
        engine = Embedded(eos_id=tiny_policy.eos_id, pad_id=tiny_policy.pad_id, max_new_tokens=6)
        given = {"optimizer": AdamWSettings(lr=1e-3), "group_size": 4, **(options or {})}
        module = GRPOModule(policy=tiny_policy, task=parity, engine=engine, **given)
        data = RolloutData(
            parity.prompts("train"),
            group_size=4,
            prompts_per_rollout=6,
            minibatches=minibatches,
            micro_batches=micro_batches,
        )
        saves = any(isinstance(c, L.pytorch.callbacks.ModelCheckpoint) for c in callbacks)
        trainer = {"logger": recorder, "enable_checkpointing": saves, **settings}
        L.seed_everything(0, verbose=False)
        fit(module, data, steps, callbacks=list(callbacks),
            accumulate_grad_batches=micro_batches, **trainer)  # fmt: skip
        return module

    return run


@pytest.fixture(scope="session")
def ragged() -> Callable[..., Experience]:
    """A random batch of ragged completions: holes in the mask, one row without any token."""

    def make(seed: int, rows: int = 8, vocab: int = 17) -> Experience:
        g = torch.Generator().manual_seed(seed)

        def below(n: int) -> int:
            return int(torch.randint(n, (), generator=g))

        completions = []
        for row in range(rows):
            length = 1 + below(6)
            completions.append(
                Completion(
                    prompt_ids=tuple(below(vocab) for _ in range(1 + below(4))),
                    token_ids_N=torch.randint(vocab, (length,), generator=g),
                    logprobs_N=-3 * torch.rand(length, generator=g),
                    versions_N=torch.full((length,), row % 3),
                    truncated=bool(below(2)),
                )
            )
        advantages_B = torch.randn(rows, generator=g)
        rewards_B = torch.rand(rows, generator=g)
        experience = make_experience(completions, rewards_B, advantages_B, pad_id=0)
        holes_BS = torch.rand(experience.mask_BS.shape, generator=g) < 0.2
        mask_BS = experience.mask_BS & ~holes_BS
        mask_BS[rows // 2] = False
        return replace(experience, mask_BS=mask_BS, step=count_step(mask_BS))

    return make
