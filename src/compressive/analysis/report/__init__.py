"""The HTML report of a run: one self-contained page about a model of text, a model of speech or an agent."""
