"""Analysis: read a run, produce tables and figures."""
