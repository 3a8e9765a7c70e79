"""Solvers of a timing problem: each gives the same times, for another class of problems."""
