"""The router: validates and tokenizes, picks workers, streams text back. No torch, triton or ray, even indirectly."""
