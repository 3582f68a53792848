"""PG-19: built from raw Project Gutenberg texts, verified, with statistics and topics."""
