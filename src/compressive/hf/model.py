"""The language model behind Hugging Face's interface: `forward` with labels or a cache, `generate`, save and load."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import cached_file, can_return_tuple

from compressive.data.tokenizer import VOCABULARY
from compressive.hf.cache import CompressiveCache
from compressive.hf.config import CompressiveConfig
from compressive.model.language_model import IGNORED, CompressiveLM
from compressive.runs.run import CORPUS, ORIGIN, RELEASE
from compressive.runs.weights import weight_files


@dataclass
class CompressiveCausalLMOutput(CausalLMOutputWithPast):  # type: ignore[misc]  # transformers is not analysed
    """What `CompressiveForCausalLM` returns: `loss`, `logits`, `past_key_values`, and the compression loss alone."""

    compression_loss: Tensor | None = None


class CompressiveForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]  # transformers is not analysed
    """A Compressive Transformer for `AutoModelForCausalLM`; `lm` is our own model, of the same weights.

    Weights have the names that they have in our own files, so that both sides read exports, checkpoints of Trainer and
    what `save_pretrained` wrote.
    """

    config_class = CompressiveConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = True
    _is_stateful = True  # no assisted generation: it would need to take tokens back

    lm: CompressiveLM

    def __init__(self, config: CompressiveConfig) -> None:
        super().__init__(config)
        lm = CompressiveLM(config.model_config)
        self.embedding, self.trunk = lm.embedding, lm.trunk
        object.__setattr__(self, "lm", lm)  # not as a submodule, which would name all weights twice
        self.files: dict[str, bytes] = {}
        """What else a release holds, by name; written again by `save_pretrained`."""
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Load an export or what `save_pretrained` wrote, see `PreTrainedModel.from_pretrained`."""
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        model: Self = loaded[0] if isinstance(loaded, tuple) else loaded
        names = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")
        options = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        options |= dict.fromkeys(
            ("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors"), False
        )
        for name in (VOCABULARY, RELEASE, CORPUS, ORIGIN):
            if (file := cached_file(pretrained_model_name_or_path, name, **options)) is not None:
                model.files[name] = Path(file).read_bytes()
        return loaded

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """Write a folder that `from_pretrained` and `compressive.load` read, see `PreTrainedModel.save_pretrained`.

        The tokeniser is in it if the model was loaded from an export, whose release.json is then the new one's
        `origin`: the weights may have been trained since, for how many steps is not known here.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {"corpus": self.config.data["corpus"], "step": 0, "checkpoint": "last"}
        if RELEASE in self.files:
            about["origin"] = json.loads(self.files[RELEASE])
        for name, content in (self.files | {RELEASE: json.dumps(about, indent=1).encode()}).items():
            (folder / name).write_bytes(content)
        super().save_pretrained(save_directory, *args, **kwargs)
        for weights in weight_files(folder):
            if weights.is_file():  # safetensors lets nobody else read it, whatever the umask
                weights.chmod((folder / RELEASE).stat().st_mode)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: CompressiveCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> CompressiveCausalLMOutput:
        """Read tokens (B, n) of any length, after what the cache has read or from empty memory, window by window.

        Args:
            input_ids: tokens (B, n). Padding, left or right, is never read.
            attention_mask: (B, n) or, with a cache, (B, everything read so far + n): 0 at padding. Tokens of
                `pad_token_id` are padding in any case.
            past_key_values: what was read before; it is read on in place. No gradient flows through a cache.
            labels: (B, n), shifted here, -100 where nothing is to be learnt. `loss` is then the mean of -log p and, in
                training mode, the compression loss. In training mode no logits are built.
            use_cache: return a cache, a new one if none is given. Without one, memory ends with this call.
            logits_to_keep: logits of only the last so many tokens; 0 for all.
            num_items_in_batch: labels in all batches of a gradient accumulation, by which losses are divided.
            others: what other models take; refused unless None or False. `position_ids` that count on are ignored.

        Raises:
            TypeError: a cache of another kind, or arguments that are not supported.
            ValueError: labels together with a cache, shapes that do not fit, or tokens that the model does not have.
            RuntimeError: under `torch.nn.DataParallel`.

        """
        if getattr(self, "_is_replica", False):
            raise RuntimeError(
                "several GPUs in one process (torch.nn.DataParallel): expected one process per GPU, as torchrun starts "
                "them; or make one GPU visible with CUDA_VISIBLE_DEVICES=0"
            )
        real = self._real(input_ids, attention_mask)
        _refuse(others, real)
        tokens = input_ids.masked_fill(~real, 0)
        self.lm.check_range("input_ids", tokens)
        if past_key_values is not None or use_cache:
            if labels is not None:
                raise ValueError("labels with a cache: expected one of both; use_cache=False learns from a text")
            cache = CompressiveCache(self.lm) if past_key_values is None else _checked(past_key_values)
            return CompressiveCausalLMOutput(
                logits=cache.read(tokens, real, logits_to_keep or tokens.shape[1]), past_key_values=cache
            )
        hidden, compression_loss, order = self._read(tokens, real)
        loss: Tensor | None = None
        if labels is not None:
            targets = labels.masked_fill(~real, IGNORED).gather(1, order)[:, 1:]
            ignored = targets == IGNORED
            nll = self.embedding.nll(hidden[:, :-1], targets.masked_fill(ignored, 0)).masked_fill(ignored, 0)
            count = ignored.numel() - ignored.sum()
            items = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
            loss = nll.sum() / items
            if self.training:
                loss = loss + compression_loss * count / items
        logits = None
        if loss is None or not self.training:
            hidden = hidden.gather(1, order.argsort(dim=1)[..., None].expand_as(hidden))
            logits = self.embedding.logits(hidden[:, -logits_to_keep:])
        return CompressiveCausalLMOutput(loss=loss, logits=logits, compression_loss=compression_loss)

    def _read(self, tokens: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read tokens (B, n) from empty memory, padding moved to the end of each row.

        Returns the trunk's output (B, n, D) in that order, the compression loss, and the order (B, n): column numbers.
        Rows are what they would be alone: what follows padding in a row is never used. The compression loss is the mean
        over rows and windows without padding.
        """
        order = (~real).long().argsort(dim=1, stable=True)
        tokens, real = tokens.gather(1, order), real.gather(1, order)
        padded = not bool(real.all())
        memory, window = self.lm.initial_memory(len(tokens)), self.lm.config.window
        device = tokens.device.type
        if torch.is_autocast_enabled(device):  # as all products with it are
            dtype = torch.get_autocast_dtype(device)
            memory = memory.map(lambda x: x.to(dtype) if x.ndim == 3 else x)
        parts, losses, weights = [], [], []
        for begin in range(0, tokens.shape[1], window):
            x, there = self.embedding(tokens[:, begin : begin + window]), real[:, begin : begin + window]
            if not padded:
                out = self.trunk(x, memory)
                hidden, memory = out.hidden, out.memory
                losses.append(out.compression_loss)
                weights.append(len(x))
            else:
                whole = there.all(dim=1)
                hidden = torch.zeros_like(x)
                for rows in (whole, there.any(dim=1) & ~whole):
                    index = rows.nonzero().squeeze(1)
                    if len(index) == 0:
                        continue
                    out = self.trunk(x[index], memory.select(index))
                    hidden = hidden.index_copy(0, index, out.hidden.to(hidden.dtype))
                    memory = memory.put(index, out.memory)
                    losses.append(out.compression_loss)
                    weights.append(len(index) if rows is whole else 0)
            parts.append(hidden)
        share = torch.tensor(weights, device=tokens.device) / max(sum(weights), 1)
        return torch.cat(parts, dim=1), (torch.stack(losses) * share).sum(), order

    def _real(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Where tokens are no padding, (B, n), bool."""
        if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.shape[1] == 0:
            shape = tuple(getattr(input_ids, "shape", ()))
            raise ValueError(f"input_ids of shape {shape}: expected a tensor (batch, time), time >= 1")
        real: Tensor = input_ids != self.config.pad_token_id
        if attention_mask is None:
            return real
        rows, n = input_ids.shape
        if attention_mask.ndim != 2 or attention_mask.shape[0] != rows or attention_mask.shape[1] < n:
            raise ValueError(
                f"attention_mask of shape {tuple(attention_mask.shape)}: expected ({rows}, {n}), or more columns for "
                "what a cache has read"
            )
        return real.logical_and(attention_mask[:, -n:].to(real.device))

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Put our own cache in place of theirs."""
        if (kind := generation_config.cache_implementation) is not None:
            raise ValueError(
                f"cache_implementation={kind!r}: expected none, as a Compressive Transformer has a cache of its own, "
                "constant in size"
            )
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask[:, -1].all()):
            raise ValueError("padding after a prompt: expected it before, as tokenizer.padding_side = 'left' puts it")
        if model_kwargs.get("past_key_values") is not None:
            _checked(model_kwargs["past_key_values"])
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = CompressiveCache(self.lm)

    def get_input_embeddings(self) -> Any:
        """Return the embedding, which also scores tokens."""
        return self.embedding

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError: the vocabulary is that of the tokeniser which the model was trained with."""
        raise NotImplementedError("the vocabulary of a Compressive Transformer cannot be resized")

    def _init_weights(self, module: nn.Module) -> None:
        """Leave weights as our own modules have initialised them."""


def _refuse(others: dict[str, Any], real: Tensor) -> None:
    """Raise TypeError for arguments that ask for what this model does not do; `real` (B, n) is False at padding."""
    asked = {name for name, value in others.items() if value is not None and value is not False}
    if "position_ids" in asked:
        positions, both = others["position_ids"].to(real.device), real[:, 1:] & real[:, :-1]
        fits = positions.shape in (real.shape, real[:1].shape)
        if fits and bool((positions.diff() == 1).expand_as(both)[both].all()):
            asked.remove("position_ids")
    if asked:
        raise TypeError(
            f"{', '.join(sorted(asked))}: expected none, as a Compressive Transformer here returns logits, losses and "
            "a cache, and counts positions itself, on from token to token; compressive analyze shows attention"
        )


def _checked(cache: Any) -> CompressiveCache:
    if not isinstance(cache, CompressiveCache):
        raise TypeError(
            f"past_key_values of type {type(cache).__name__}: expected a CompressiveCache, which generate and forward "
            "with use_cache=True return"
        )
    return cache
