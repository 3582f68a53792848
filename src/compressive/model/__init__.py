"""The model: memory, attention, compression, its losses, embeddings, the trunk and the language model.

Shapes are written with these letters throughout the package:

    B  batch rows             D  d_model
    T  tokens in the window   H  heads
    M  recent slots, n_m      K  width of a head, D = H·K
    C  compressed slots, n_cm V  vocabulary
    N  all slots a window attends to: C + M + T, oldest first
"""
