"""Operators in C++ for CPUs, compiled at first use; everything here has a torch counterpart that is used without."""
