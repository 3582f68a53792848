"""Export a trained model as one folder, a release: weights, configuration and tokeniser, without training state.

config.json          the run's configuration, and what Hugging Face's libraries ask for
model.safetensors    all weights, or several shards with an index; see `weights.py`
vocabulary.json      the tokeniser
tokenizer.json       the same in Hugging Face's form, and tokenizer_config.json; not for audio
corpus.json          name and fingerprint of the corpus, unless a run of version 0.1 was exported
origin.json          the weights that the run started from, if not random ones
release.json         corpus, step and checkpoint that it was exported from
model.onnx           if asked for: one window with both memories in and out, see `onnx.py`

`compressive evaluate`, `generate` and `analyze` take a release instead of a run; `compressive.hf` loads it as it is.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from torch import Tensor

from compressive.config import ModelConfig, RunConfig
from compressive.data.tokenizer import VOCABULARY, Tokenizer
from compressive.runs.onnx import ONNX, require_exportable, write_onnx
from compressive.runs.run import CORPUS, ORIGIN, RELEASE, Run
from compressive.runs.trained import Trained
from compressive.runs.weights import Stored, weight_files, write_weights


def export(
    run: Run,
    out: Path,
    which: Literal["best", "last"] = "best",
    data_dir: Path | None = None,
    onnx: bool = False,
    precision: Stored = "fp32",
    shard_size: int = 0,
) -> Path:
    """Write a run's model into the new folder `out`, atomically, and return it; `onnx` adds `model.onnx`.

    `precision` rounds the weights: "bf16" halves their size, "int8" quarters it; they are loaded as fp32 again. With a
    `shard_size` they are split into files of at most so many MiB.

    Raises ValueError if the folder exists, the model has no ONNX form or one of its tensors is larger than
    `shard_size`, and OSError, with nothing left behind, if it cannot be written.
    """
    require_new(out)
    exportable = require_exportable(run.config.model) if onnx else None
    trained, tokenizer = Trained.load(run, which), run.tokenizer(data_dir)
    with new_release(out) as partial:
        about = {"corpus": run.config.data.corpus, "step": trained.step, "checkpoint": which}
        write_release(partial, run.config, trained.weights, tokenizer, about, precision, shard_size)
        for name in (CORPUS, ORIGIN):
            if (run.folder / name).is_file():
                shutil.copyfile(run.folder / name, partial / name)
        if exportable is not None:
            write_onnx(trained.model(exportable), partial / ONNX)
    return out


def require_new(out: Path) -> None:
    """Raise ValueError if the folder of a new release exists already."""
    if out.exists():
        raise ValueError(f"out={out} exists already: choose another folder, or remove it first")


@contextlib.contextmanager
def new_release(out: Path) -> Iterator[Path]:
    """Yield a folder to write into, which becomes `out` at the end; raise OSError, with nothing left, if it cannot."""
    partial = out.with_name(f".{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        partial.rename(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):  # the latter is none, also if the disk is full
            reason = getattr(error, "strerror", None) or error
            raise OSError(
                f"out={out} cannot be written ({reason}): choose another folder, or free some space"
            ) from error
        raise


def write_release(
    folder: Path,
    config: RunConfig,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    about: dict[str, Any],
    precision: Stored = "fp32",
    shard_size: int = 0,
) -> None:
    """Write all that a release must have into a folder; `about` is what release.json says."""
    write_weights(folder, weights, precision, shard_size)
    tables = dataclasses.asdict(config)
    if isinstance(config.model, ModelConfig):
        tables |= write_huggingface(folder, tokenizer, config.model.vocab_size)
        tables |= {"weights": "int8"} if precision == "int8" else {}  # which transformers must not take as they are
    (folder / "config.json").write_text(json.dumps(tables, indent=1), "utf-8")
    tokenizer.save(folder, VOCABULARY)
    (folder / RELEASE).write_text(json.dumps(about, indent=1), "utf-8")
    # safetensors writes files that only their owner can read; the umask decides for the others.
    for file in weight_files(folder):
        file.chmod((folder / RELEASE).stat().st_mode)


def write_huggingface(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Write tokenizer.json and tokenizer_config.json in Hugging Face's form; return what config.json needs for it."""
    keys = {"model_type": "compressive", "architectures": ["CompressiveForCausalLM"], "dtype": "float32"}
    if (engine := tokenizer.huggingface()) is None:
        return keys
    pad = "<pad>"
    while engine.token_to_id(pad) is not None:
        pad = f"<{pad}>"
    # Padding is the token after the model's last, so that it takes no place in the vocabulary.
    unused = [f"<unused {i}>" for i in range(engine.get_vocab_size(), vocab_size)]
    engine.add_special_tokens([*unused, pad])
    engine.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "padding_side": "left",
        "split_special_tokens": True,  # "<pad>" in a text is text
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), "utf-8")
    newline = tokenizer.encode(b"\n")  # what an empty prompt begins with
    return keys | {"bos_token_id": int(newline[0]), "pad_token_id": vocab_size}


def is_release(run: Run) -> bool:
    """Return whether a folder is a release, which `export` wrote."""
    return (run.folder / RELEASE).is_file()
