"""Analyses of a trained run, as tables, figures and one HTML report."""
