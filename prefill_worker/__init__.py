"""The prefill role: computes prompts chunk by chunk, samples the first token, ships the KV."""
