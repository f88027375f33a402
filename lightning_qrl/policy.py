"""A policy: a causal language model and its tokenizer, found by name.

    embedded          the policy that ships with the package (see `recipes/warmup.yaml`)
    a folder          what `save_pretrained` writes
    a .gguf file      dequantized on loading (needs the package `gguf`)
    anything else     a name on the Hugging Face hub, unless it is nearly that of a shipped policy

Parameters are FP32 master weights whatever the file holds; what a layer computes in is the plan's
business.
"""

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lightning_qrl.errors import UserError, described, first_line

ASSETS = Path(__file__).parent / "assets"
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin")
TOLD = (OSError, ImportError, ValueError)  # in which transformers explains itself
SaveDtype = Literal["float32", "bfloat16", "float16"]


class Policy:
    """Names a policy; nothing is loaded before it is asked for.

    Args:
        name: see the module's text.
        init: ``"pretrained"`` loads the weights, ``"random"`` takes the architecture alone.
        save_dtype: dtype that `save` stores weights in.

    Raises:
        UserError: a folder without a configuration, or without weights that `init` needs; a name
            that is nearly that of a shipped policy.
    """

    def __init__(
        self,
        name: str = "embedded",
        init: Literal["pretrained", "random"] = "pretrained",
        save_dtype: SaveDtype = "float32",
    ) -> None:
        self.name = name
        self.init = init
        self.save_dtype = save_dtype
        self._source = _locate(name)
        if "gguf_file" not in self._source:
            _check_folder(Path(self._source["pretrained_model_name_or_path"]), init)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer; it must know an end-of-sequence token."""
        tokenizer = cast(PreTrainedTokenizerBase, self._load(AutoTokenizer))
        if tokenizer.eos_token_id is None:
            raise UserError(f"policy {self.name}: its tokenizer has no end-of-sequence token")
        return tokenizer

    @property
    def eos_id(self) -> int:
        """Token id that ends a completion."""
        return cast(int, self.tokenizer.eos_token_id)

    @property
    def pad_id(self) -> int:
        """Token id that fills padding; the end-of-sequence token where there is no other."""
        pad = self.tokenizer.pad_token_id
        return self.eos_id if pad is None else cast(int, pad)

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """Token ids of a text; of a prompt, which begins a sequence, or of what continues one."""
        return cast(list[int], self.tokenizer(text, add_special_tokens=begins)["input_ids"])

    def decode(self, token_ids: torch.Tensor) -> str:
        """Text of a completion without the end-of-sequence token that closes it.

        Any other special token shows in the text, so that no task takes it for a right answer.
        """
        ids = token_ids.tolist()
        return cast(str, self.tokenizer.decode(ids[:-1] if ids[-1:] == [self.eos_id] else ids))

    def build(self) -> PreTrainedModel:
        """The model, in FP32, in training mode."""
        if self.init == "random":
            config = self._config()
            with self._loading():
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        else:
            model = self._load(AutoModelForCausalLM, dtype=torch.float32)
        return cast(PreTrainedModel, model.train())

    def skeleton(self) -> PreTrainedModel:
        """The model's architecture on the meta device: no weights are read or made."""
        config = self._config()
        with self._loading():
            return _skeleton(config, torch.float32)

    def save(self, model: PreTrainedModel, folder: Path) -> None:
        """Write weights, configuration and tokenizer: a folder that transformers and vLLM load."""
        dtype = getattr(torch, self.save_dtype)
        state = {
            name: t.detach().cpu().to(dtype if t.is_floating_point() else t.dtype)
            for name, t in model.state_dict().items()
        }
        plain = _skeleton(model.config, dtype)  # it writes its dtype, and a tied weight once
        plain.load_state_dict(state, assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def _config(self) -> Any:
        return self._load(AutoConfig)

    def _load(self, auto: Any, **kwargs: Any) -> Any:
        with self._loading():
            # A policy's folder may hold code; it never runs, and nobody is asked whether it may.
            return auto.from_pretrained(**self._source, trust_remote_code=False, **kwargs)

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """What transformers raises for a folder that is no policy, of many kinds, is one line."""
        try:
            yield
        except Exception as error:
            reason = first_line(error) if isinstance(error, TOLD) else described(error)
            reason = reason.partition(" This file can still")[0]  # no advice to run what is in it
            raise UserError(f"policy {self.name} cannot be loaded: {reason}") from error


def _skeleton(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    with torch.device("meta"):
        return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype))


def _locate(name: str) -> dict[str, str]:
    """Arguments of `from_pretrained` for a policy's name."""
    if os.path.isfile(ASSETS / name / "config.json"):  # unlike Path.is_file, it takes any name
        return {"pretrained_model_name_or_path": str(ASSETS / name)}
    path = Path(os.path.expanduser(name))
    if path.suffix == ".gguf":
        if not os.path.isfile(path):
            raise UserError(f"policy {name}: there is no such file")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if name.startswith((".", "/", "~")) and not os.path.isdir(path):
        raise UserError(f"policy {name}: there is no such folder")
    if "/" not in name and not os.path.isdir(path):  # so that a slip does not wait for the hub
        shipped = sorted(file.parent.name for file in ASSETS.glob("*/config.json"))
        for near in difflib.get_close_matches(name, shipped, n=1):
            raise UserError(f"policy {name}: there is no such policy; did you mean {near}?")
    return {"pretrained_model_name_or_path": str(path)}


def _check_folder(folder: Path, init: str) -> None:
    if not os.path.isdir(folder):
        return  # a name on the hub
    if not (folder / "config.json").is_file():
        raise UserError(f"policy folder {folder} has no config.json; is it a policy?")
    if init == "pretrained" and not any(any(folder.glob(p)) for p in WEIGHT_FILES):
        raise UserError(
            f"policy folder {folder} has no weights (*.safetensors); "
            "add them or set policy.init=random"
        )


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 (hex) of a model's weights: their names, dtypes, shapes and bytes, in name order."""
    digest = sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy())
    return digest.hexdigest()


def has_dropout(model: nn.Module) -> bool:
    """Whether any layer of a model drops activations or attention weights in training."""
    rates = (m.p if isinstance(m, nn.Dropout) else _attention_dropout(m) for m in model.modules())
    return any(rate > 0 for rate in rates)


def _attention_dropout(module: nn.Module) -> float:
    rate = getattr(module, "attention_dropout", 0.0)
    return rate if isinstance(rate, float) else 0.0
