"""The agent: the paper's last experiment (section 5.7), IMPALA with the Compressive Transformer as its memory.

The task is in `rooms` and its neighbours, the network in `networks`, `cores` and `agent`, acting in `actor`, learning
in `vtrace` and `learner`, and `train` lets them play together.
"""
