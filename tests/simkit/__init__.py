"""Pieces for deterministic simulations: fakes that compute nothing and check everything."""
