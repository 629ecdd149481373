"""The handoff: a prefill worker ships the KV of a request, layer by layer, to a decode worker that granted room.

`sender` and `receiver` are the pure state machines; `plan` cuts a request into chunks; `links` move bytes;
`session` joins one pair of workers (control stream plus link).
"""
