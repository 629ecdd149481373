"""Which worker caches which block: a hint shared by all routers. A stale hit costs time, never correctness."""
