"""Guesses at what a sequence goes on with, and how many of them are worth a step's time."""
