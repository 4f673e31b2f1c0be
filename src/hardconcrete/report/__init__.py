"""Measurements of models, as tables and plots."""
