"""The agent of the paper's section 5.7: IMPALA with the Compressive Transformer as its memory.

`env` has the environments, `agent` the network. `acting` collects rollouts, `learning` and `vtrace` update the agent,
and `loop` alternates the two. `policies` has everything that can choose actions; `evaluate` and `video` use it.
"""
