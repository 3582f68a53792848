"""The model behind Hugging Face's interface: logits, losses, Trainer, saving and loading."""

import copy
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import build, tied_embedding, tiny_config
from hf_helpers import behind_hf, quiet, tiny, write_tiny_release
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers import DataCollatorForLanguageModeling as Collator
from warm_python import interpreter

import compressive
from compressive import ModelConfig
from compressive.data.tokenizer import ByteTokenizer
from compressive.hf import CompressiveConfig, CompressiveForCausalLM
from compressive.runs.export import export
from compressive.runs.run import Run

PAD = 11


def windows(lm, tokens: Tensor):
    """What our own model gives for a text (B, n) from empty memory: logits, and the mean compression loss."""
    memory, logits, losses = lm.initial_memory(len(tokens)), [], []
    for part in tokens.split(lm.config.window, dim=1):
        out = lm(part, memory)
        memory = out.memory
        logits.append(out.logits)
        losses.append(out.compression_loss)
    return torch.cat(logits, dim=1), torch.stack(losses).mean()


def test_logits_are_our_own_with_and_without_a_cache():
    model, tokens = tiny(), torch.randint(11, (3, 14))
    want, compression_loss = windows(model.lm, tokens)
    plain = model(tokens)
    torch.testing.assert_close(plain.logits, want)
    torch.testing.assert_close(plain.compression_loss, compression_loss)
    assert plain.past_key_values is None
    cached = model(tokens, use_cache=True)
    torch.testing.assert_close(cached.logits, want)
    torch.testing.assert_close(model(tokens, logits_to_keep=3).logits, want[:, -3:])
    for keep, kept in ((6, 6), (99, 14)):
        torch.testing.assert_close(model(tokens, use_cache=True, logits_to_keep=keep).logits, want[:, -kept:])
    torch.testing.assert_close(model(tokens[:, :9], return_dict=False)[0], want[:, :9])
    more = model(tokens, past_key_values=cached.past_key_values).logits
    torch.testing.assert_close(more, model(torch.cat([tokens, tokens], dim=1)).logits[:, 14:])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("cache", [False, True])
def test_padded_rows_are_what_they_are_alone(side, cache):
    model = tiny(compression="most_used")
    texts = [torch.randint(11, (n,)) for n in (3, 14, 8, 12, 1)]
    batch = torch.full((5, 14), PAD)
    for row, text in zip(batch, texts, strict=True):
        row[slice(len(text)) if side == "right" else slice(14 - len(text), None)] = text
    ways = [{"attention_mask": (batch != PAD).long()}, {}]  # the token alone says it too
    for given in ways:
        logits = model(batch, use_cache=cache, **given).logits
        for row, text in enumerate(texts):
            torch.testing.assert_close(logits[row, batch[row] != PAD], model(text[None]).logits[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_loss_of_a_padded_batch_is_that_of_its_texts(side):
    model = tiny()
    texts = [torch.randint(11, (n,)) for n in (3, 12, 8)]
    batch, labels = torch.full((3, 12), PAD), torch.full((3, 12), -100)
    for row, text in enumerate(texts):
        at = slice(len(text)) if side == "right" else slice(12 - len(text), None)
        batch[row, at] = labels[row, at] = text
    nll = [-model(text[None]).logits[0, :-1].log_softmax(-1).gather(1, text[1:, None]).sum() for text in texts]
    want = torch.stack(nll).sum() / sum(len(text) - 1 for text in texts)
    out = model(batch, labels=labels)
    torch.testing.assert_close(out.loss, want)  # without the compression loss: exp(eval_loss) is the perplexity
    assert out.logits is not None
    model.train()
    out = model(batch, labels=labels)
    # Windows of 4 without padding: the text of 3 has none, that of 12 three, that of 8 two.
    losses = [windows(model.lm, text[None])[1] for text in texts[1:]]
    torch.testing.assert_close(out.compression_loss, (3 * losses[0] + 2 * losses[1]) / 5)
    torch.testing.assert_close(out.loss, want + out.compression_loss)
    assert out.logits is None


def test_accumulated_batches_have_the_gradients_of_one():
    model, tokens = tiny().train(), torch.randint(11, (4, 12))
    labels = tokens.clone()
    labels[0, :9] = -100
    model(tokens, labels=labels).loss.backward()
    want = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    items = (labels[:, 1:] != -100).sum()
    shares = []
    for rows in (slice(2), slice(2, 4)):
        out = model(tokens[rows], labels=labels[rows], num_items_in_batch=items)
        out.loss.backward()
        shares.append((labels[rows, 1:] != -100).sum() / items)
    for name, parameter in model.named_parameters():
        if "compress" not in name:
            torch.testing.assert_close(parameter.grad, want[name])
    # The compression loss is a mean, too: its parts are weighted by the number of labels, and the weights sum to 1.
    assert float(sum(shares)) == 1
    got = {name: p.grad.clone() for name, p in model.named_parameters() if "compress" in name}
    model.zero_grad()
    sum(
        share * model(tokens[rows]).compression_loss
        for share, rows in zip(shares, (slice(2), slice(2, 4)), strict=True)
    ).backward()
    assert got
    for name, parameter in model.named_parameters():
        if name in got:
            torch.testing.assert_close(got[name], parameter.grad)


def test_a_text_without_labels_costs_nothing():
    model = tiny().train()
    out = model(torch.tensor([[1]]), labels=torch.tensor([[1]]))
    assert float(out.loss.detach()) == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": torch.tensor([1, 2])}, r"input_ids of shape \(2,\): expected a tensor \(batch, time\)"),
        ({"input_ids": torch.tensor([[1, 12]])}, "input_ids from 1 to 12: expected 0 to 10; use the tokeniser that"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"input_ids of shape \(1, 0\)"),
        (
            {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 1)},
            r"attention_mask of shape \(1, 1\)",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        tiny()(**given)


@pytest.mark.parametrize(
    "given", [{"output_hidden_states": True}, {"output_attentions": True}, {"inputs_embeds": torch.zeros(2, 3, 32)}]
)
def test_what_is_not_supported_is_said(given):
    model, tokens = tiny(), torch.randint(11, (2, 3))
    (name,) = given
    with pytest.raises(TypeError, match=f"^{name}: expected none, as a Compressive Transformer"):
        model(tokens, **given)
    torch.testing.assert_close(model(tokens, **{name: None}).logits, model(tokens).logits)


def test_hidden_states_of_generation_are_refused():
    with pytest.raises(TypeError, match=r"^output_hidden_states: expected none"):
        tiny().generate(
            torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, return_dict_in_generate=True,
            output_hidden_states=True,
        )  # fmt: skip


def test_positions_that_count_on_are_ignored_and_others_refused():
    model, tokens = tiny(), torch.tensor([[PAD, PAD, 1, 2], [3, 4, 5, 6]])
    want = model(tokens).logits
    for positions in ([[0, 1, 2, 3]], [[0, 0, 0, 1], [0, 1, 2, 3]]):
        torch.testing.assert_close(model(tokens, position_ids=torch.tensor(positions)).logits, want)
    for positions in ([[0, 1, 0, 1]], [[0, 1, 2]], [[0, 1, 2, 3]] * 3):
        with pytest.raises(TypeError, match="position_ids: expected none"):
            model(tokens, position_ids=torch.tensor(positions))


def test_copies_of_the_model_are_whole_and_replicas_are_refused():
    model = tiny()
    other = copy.deepcopy(model)
    assert other.lm.trunk is other.trunk
    with torch.no_grad():
        other.get_parameter("embedding.bias").zero_()
    tokens = torch.tensor([[1, 2, 3]])
    assert not torch.equal(other(tokens, use_cache=True).logits, model(tokens, use_cache=True).logits)
    torch.testing.assert_close(other(tokens, use_cache=True).logits, other(tokens).logits)
    with pytest.raises(RuntimeError, match="expected one process per GPU, as torchrun starts them"):
        model._replicate_for_data_parallel()(tokens)


def test_autocast_reads_in_16_bits():
    model, tokens = tiny(d_model=32).float(), torch.randint(11, (2, 14))
    want = model(tokens, labels=tokens)
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(tokens, labels=tokens)
        cached = model(tokens, use_cache=True)
    torch.testing.assert_close(out.loss - out.compression_loss, want.loss, rtol=0.02, atol=0)
    torch.testing.assert_close(cached.logits.float(), want.logits, rtol=0.1, atol=0.3)
    assert cached.past_key_values.state.layers[0].key.dtype == torch.bfloat16
    out.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# Configuration


def test_a_configuration_is_our_own_and_back():
    ours = ModelConfig(n_layers=2, memory_size=(4, 8), compressed_size=(2, 0), adaptive_cutoffs=(10, 20))
    config = CompressiveConfig(ours)
    assert config.model_config == ours
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (
        256,
        512,
        2,
        8,
    )
    assert config.pad_token_id == 256
    assert CompressiveConfig.from_dict(json.loads(config.to_json_string())).model_config == ours
    assert CompressiveConfig(model={"d_model": 64}).model_config == ModelConfig(d_model=64)


def test_a_wrong_configuration_says_what_was_expected():
    with pytest.raises(ValueError, match="model field='n_layer': expected one of vocab_size"):
        CompressiveConfig(model={"n_layer": 3})
    with pytest.raises(ValueError, match="architecture='wavenet': expected a Compressive Transformer"):
        CompressiveConfig(model={"architecture": "wavenet"})
    with pytest.raises(ValueError, match="pad_token_id=0: expected 256, the token after the model's last"):
        CompressiveConfig(pad_token_id=0)
    with pytest.raises(NotImplementedError, match="cannot be resized"):
        tiny().resize_token_embeddings(20)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "compressive.hf")
    with pytest.raises(ImportError, match=r"pip install 'compressive\[hf\]'"):
        import compressive.hf  # noqa: F401


# Files


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    return write_tiny_release(tmp_path_factory.mktemp("bytes") / "release", ByteTokenizer())


def load(folder, **options):
    with quiet() as warnings:
        model = AutoModelForCausalLM.from_pretrained(folder, **options)
    assert warnings == []
    return model


def test_a_release_loads_as_it_is(release):
    model, ours = load(release), compressive.load(release, device="cpu")
    assert isinstance(model, CompressiveForCausalLM)
    assert AutoConfig.from_pretrained(release).model_config == ours.config.model
    assert not model.training
    want = ours.model.state_dict()
    assert model.state_dict().keys() == want.keys()
    assert all(torch.equal(x, want[name]) for name, x in model.state_dict().items())
    assert (model.generation_config.pad_token_id, model.generation_config.bos_token_id) == (256, 10)
    assert load(release, dtype=torch.bfloat16, device_map="cpu").dtype == torch.bfloat16


def test_what_is_saved_loads_on_both_sides(release, tmp_path):
    model = load(release)
    with torch.no_grad():
        model.embedding.bias += torch.randn(256)
    with quiet():
        model.save_pretrained(tmp_path / "new")
    names = ["config.json", "generation_config.json", "model.safetensors", "release.json", "vocabulary.json"]
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == names
    assert len({file.stat().st_mode for file in (tmp_path / "new").iterdir()}) == 1
    ours = compressive.load(tmp_path / "new", device="cpu")
    assert (ours.step, ours.config.data.corpus) == (0, "tiny")
    origin = {"corpus": "tiny", "step": 3, "checkpoint": "best"}
    about = {"corpus": "tiny", "step": 0, "checkpoint": "last", "origin": origin}
    assert json.loads((tmp_path / "new" / "release.json").read_text()) == about
    assert torch.equal(tied_embedding(ours.model).bias, model.embedding.bias)
    assert torch.equal(load(tmp_path / "new").embedding.bias, model.embedding.bias)


def test_both_sides_read_the_other_s_shards(tmp_path):
    model = load(write_tiny_release(tmp_path / "whole", ByteTokenizer(), d_model=128, d_ff=512))
    want = model.state_dict()
    with quiet():
        model.save_pretrained(tmp_path / "theirs", max_shard_size="1MB")
    got = compressive.load(tmp_path / "theirs", device="cpu").model.state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)
    export(Run.open(tmp_path / "whole"), tmp_path / "ours", shard_size=1)
    assert {path.stat().st_mode for path in (tmp_path / "ours").iterdir()} == {
        (tmp_path / "ours" / "release.json").stat().st_mode
    }
    assert all(torch.equal(weight, want[name]) for name, weight in load(tmp_path / "ours").state_dict().items())
    for folder in ("theirs", "ours"):
        assert len(list((tmp_path / folder).glob("model-*.safetensors"))) > 1


def test_weights_in_8_bits_are_refused_with_the_remedy(release, tmp_path):
    run = Run.open(release)
    export(run, tmp_path / "small", precision="int8")
    assert compressive.load(tmp_path / "small", device="cpu").generate("the", length=3)
    with pytest.raises(ValueError, match=r"weights='int8': .* compressive export FOLDER --out NEW writes them as fp32"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    export(Run.open(tmp_path / "small"), tmp_path / "again")
    again = compressive.load(tmp_path / "small", device="cpu").model.state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in load(tmp_path / "again").state_dict().items())


def test_a_model_made_here_has_no_tokeniser_of_ours(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where no corpus is prepared that could stand in
    with quiet():
        behind_hf(build(tiny_config(), dtype=torch.float32)).save_pretrained(tmp_path / "new")
    assert json.loads((tmp_path / "new" / "release.json").read_text())["step"] == 0
    assert load(tmp_path / "new").config.model_config == tiny_config()
    with pytest.raises(FileNotFoundError):
        compressive.load(tmp_path / "new")


def test_what_is_pushed_to_the_hub_is_a_release(release, tmp_path, monkeypatch):
    hub, pushed = "transformers.utils.hub", {}

    def upload(self, folder, repo_id, *args, **kwargs):
        pushed[repo_id] = shutil.copytree(folder, tmp_path / "hub")

    monkeypatch.setattr(f"{hub}.PushToHubMixin._upload_modified_files", upload)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda self, name, **options: SimpleNamespace(repo_id=name)
    )
    monkeypatch.setattr(f"{hub}.create_and_tag_model_card", lambda *args, **options: Mock())
    with quiet():
        load(release).push_to_hub("someone/tiny")
    assert pushed == {"someone/tiny": tmp_path / "hub"}
    assert compressive.load(tmp_path / "hub", device="cpu").tokenizer.kind == "bytes"
    assert load(tmp_path / "hub").config.model_config == load(release).config.model_config


def test_a_name_on_the_hub_is_loaded_with_all_that_a_release_holds(release, tmp_path):
    """From the cache of an earlier download, as nothing may be downloaded here."""
    folder = tmp_path / "models--someone--tiny"
    shutil.copytree(release, folder / "snapshots" / "0123456789012345678901234567890123456789")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123456789012345678901234567890123456789")
    model = load("someone/tiny", cache_dir=tmp_path, local_files_only=True)
    assert model.files.keys() == {"release.json", "vocabulary.json"}
    with quiet():
        model.save_pretrained(tmp_path / "new")
    assert compressive.load(tmp_path / "new", device="cpu").tokenizer.kind == "bytes"


def test_the_package_itself_does_not_import_transformers():
    code = "import compressive.api, compressive.cli, sys; print(any('transformers' in name for name in sys.modules))"
    assert subprocess.run([*interpreter(), "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# Trainer


@pytest.mark.slow
def test_trainer_fine_tunes_with_the_compression_loss(release, tmp_path):
    model, tokenizer = load(release), AutoTokenizer.from_pretrained(release)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    texts = ["the cat sat on a mat. " * n for n in (1, 2, 3, 2)] * 4
    data = [tokenizer(text) for text in texts]
    arguments = TrainingArguments(
        str(tmp_path / "run"), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=3e-3, save_steps=3, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, seed=1,
    )  # fmt: skip

    def trainer(model):
        return Trainer(
            model, arguments, train_dataset=data, eval_dataset=data[:3], data_collator=Collator(tokenizer, mlm=False),
            processing_class=tokenizer,
        )  # fmt: skip

    with quiet() as warnings:
        run = trainer(model)
        run.train()
        scores = run.evaluate()
    assert warnings == []
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.3
    assert scores["eval_loss"] < losses[-1]
    changed = [name for name, x in model.state_dict().items() if not torch.equal(x, before[name])]
    assert [name for name in changed if "compress" in name]
    # Both sides read its checkpoints, and Trainer goes on from them.
    checkpoint = tmp_path / "run" / "checkpoint-6"
    saved = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(saved[name], x) for name, x in model.state_dict().items())
    ours = compressive.load(checkpoint, device="cpu")
    assert torch.equal(tied_embedding(ours.model).bias, model.embedding.bias)
    with quiet():
        again = trainer(load(release))
        again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    for name, x in again.model.state_dict().items():
        torch.testing.assert_close(x, saved[name])
