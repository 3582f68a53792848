"""Hugging Face: importing this registers our exports with `AutoConfig`, `AutoModelForCausalLM` and `AutoTokenizer`.

import compressive.hf
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("release")  # a folder that `compressive export` wrote
model = AutoModelForCausalLM.from_pretrained("release")
print(tokenizer.decode(model.generate(**tokenizer("The old house", return_tensors="pt"), max_new_tokens=200)[0]))
"""

try:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
except ImportError as error:
    raise ImportError(
        f"compressive.hf needs transformers ({error}): install it with pip install 'compressive[hf]'"
    ) from error

from compressive.hf.cache import CompressiveCache
from compressive.hf.config import CompressiveConfig
from compressive.hf.model import CompressiveCausalLMOutput, CompressiveForCausalLM

AutoConfig.register(CompressiveConfig.model_type, CompressiveConfig, exist_ok=True)
AutoModelForCausalLM.register(CompressiveConfig, CompressiveForCausalLM, exist_ok=True)
AutoTokenizer.register(CompressiveConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)

__all__ = ["CompressiveCache", "CompressiveCausalLMOutput", "CompressiveConfig", "CompressiveForCausalLM"]
