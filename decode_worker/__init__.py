"""The decode role: grants room, takes KV in, generates under continuous batching; prefills short tails itself."""
