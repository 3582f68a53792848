"""Fast forms of the model's operations, one module each; `dispatch` chooses between them and the reference forms."""
