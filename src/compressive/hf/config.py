"""The configuration of a run as Hugging Face's libraries hold it: one config.json that both sides read."""

import dataclasses
import json
from typing import Any

from transformers import PreTrainedConfig

from compressive.config import ModelConfig, RunConfig
from compressive.config.model import transformer


class CompressiveConfig(PreTrainedConfig):  # type: ignore[misc]  # transformers is not analysed
    """A `RunConfig` as three tables of JSON values: `model`, `data` and `train`, as in our own config.json.

    Args:
        model: the model, as a `ModelConfig` or as its fields; missing fields have their defaults.
        data: the corpus that it was trained on, as fields of `DataConfig`.
        train: how it was trained, as fields of `TrainConfig`. Hugging Face's Trainer has its own arguments.
        kwargs: what any configuration there has, such as `bos_token_id`.

    Raises:
        ValueError: unknown fields or values that cannot work, named with what was expected.

    """

    model_type = "compressive"
    keys_to_ignore_at_inference = ["past_key_values", "compression_loss"]  # noqa: RUF012  # a list, by their convention

    def __init__(
        self,
        model: ModelConfig | dict[str, Any] | None = None,
        data: dict[str, Any] | None = None,
        train: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        fields = dataclasses.asdict(model) if isinstance(model, ModelConfig) else model
        run = RunConfig.from_tables({"model": fields or {}, "data": data or {}, "train": train or {}})
        transformer(run.model)  # refuses others
        tables = json.loads(json.dumps(dataclasses.asdict(run)))  # lists for tuples, as in a file
        self.model, self.data, self.train = tables["model"], tables["data"], tables["train"]
        if (stored := kwargs.pop("weights", None)) is not None:
            raise ValueError(
                f"weights={stored!r}: expected fp32 or bf16, as transformers cannot read ours in 8 bits; "
                "compressive export FOLDER --out NEW writes them as fp32"
            )
        super().__init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values, padding included."""
        values: dict[str, Any] = super().to_dict()
        return values | {"pad_token_id": self.pad_token_id}

    @property
    def pad_token_id(self) -> int:
        """Padding: the token after the model's last, masked and never read."""
        # A property, as transformers warns of attributes that are no token of the model.
        return self.vocab_size

    @pad_token_id.setter
    def pad_token_id(self, value: int | None) -> None:
        if value not in (None, self.vocab_size):
            raise ValueError(
                f"pad_token_id={value}: expected {self.vocab_size}, the token after the model's last; "
                "AutoTokenizer.from_pretrained loads the tokeniser that an export holds"
            )

    @property
    def model_config(self) -> ModelConfig:
        """Our own configuration of the model."""
        return ModelConfig(**self.model)

    @property
    def vocab_size(self) -> int:
        """Number of different tokens, without padding."""
        return int(self.model["vocab_size"])

    @property
    def hidden_size(self) -> int:
        """Width of the activations."""
        return int(self.model["d_model"])

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return int(self.model["n_layers"])

    @property
    def num_attention_heads(self) -> int:
        """Attention heads per layer."""
        return int(self.model["n_heads"])
