"""Grammars that constrain an answer: JSON schemas made exact, then compiled under limits."""
