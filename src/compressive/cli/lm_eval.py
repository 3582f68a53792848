"""`compressive lm-eval ...`: lm-evaluation-harness with our model and tasks registered; all flags are its own.

compressive lm-eval --model compressive --model_args path=runs/enwik8 --tasks enwik8
"""

import sys

from compressive.cli import guarded

HELP = """\
usage: compressive lm-eval [run | ls | validate] [FLAGS OF lm_eval]

lm-evaluation-harness, with the model `compressive` and the tasks enwik8 and pg19 added:

  compressive lm-eval --model compressive --model_args path=RUN --tasks enwik8 --metadata enwik8=enwik8.zip
  compressive lm-eval --model compressive --model_args path=RUN --tasks lambada_openai,hellaswag --batch_size 16

Values of --model_args, separated by commas:

  path              folder of the run or release
  which             best or last checkpoint
  memory_size       slots of recent memory per layer, if other than in training
  compressed_size   slots of compressed memory per layer, if other than in training
  empty_memory      auto, zeros or masked
  precision         fp32, or bf16 by autocast

compressive lm-eval run --help lists all flags, compressive lm-eval ls tasks all tasks. Needs lm_eval:
pip install 'compressive[lm-eval]'."""


def main(arguments: list[str], prog: str) -> int:
    """Print the help, or register the model and hand all arguments to lm_eval."""
    if arguments in ([], ["-h"], ["--help"]):
        print(HELP)
        return 0
    return guarded(lambda: evaluate(arguments, prog), prog)


def evaluate(arguments: list[str], prog: str) -> int:
    """Call lm_eval's command line, with the folder of our tasks unless another is given."""
    try:
        from compressive.harness import TASKS
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from None
    from lm_eval.__main__ import cli_evaluate

    given = any(word.split("=")[0] == "--include_path" for word in arguments)
    sys.argv = [prog, *arguments, *([] if given else ["--include_path", str(TASKS)])]
    cli_evaluate()
    return 0
