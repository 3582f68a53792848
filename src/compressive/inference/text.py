"""Tokens to text as they come: no half character is ever shown, no token waits longer than it must."""

import codecs

from compressive.data.tokenizer import Tokenizer, Tokens


class TextStream:
    """Decodes one token at a time, in constant time and space.

    A token's text is what it adds to that of the token before it, so that separators between words appear. Bytes
    that do not make up a whole character yet are held back; those that never will become U+FFFD. `before` is the
    token before the first one; None at the beginning of a text.
    """

    def __init__(self, tokenizer: Tokenizer, before: int | None) -> None:
        self._tokenizer = tokenizer
        self._before = [] if before is None else [before]
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return what a token adds to the text; a token that the tokeniser does not have adds U+FFFD."""
        if token >= self._tokenizer.vocab_size:
            return "\ufffd"
        decode = self._tokenizer.decode
        added = decode([*self._before, token])[len(decode(self._before)) :]
        self._before = [token]
        return self._characters.decode(added)

    def finish(self) -> str:
        """Return what was still held back."""
        return self._characters.decode(b"", final=True)


def encode_prompt(tokenizer: Tokenizer, text: bytes) -> Tokens:
    """Token ids of a text to be continued; of a newline where it is empty, as a model needs one token to begin with."""
    tokens = tokenizer.encode(text or b"\n")
    # Tokenisers of words end every line, but the last one of a prompt is to go on.
    return tokens[:-1] if tokenizer.kind == "words" and len(tokens) > 1 and not text.endswith(b"\n") else tokens
