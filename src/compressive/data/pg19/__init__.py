"""PG-19, built from raw Project Gutenberg texts, checked, counted and looked at."""
