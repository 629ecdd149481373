"""Guided decoding: what an output may be, as a grammar, and which tokens may come next. Without torch.

The router turns what a client stated into one text, the grammar, and checks it; workers derive masks from the grammar
and the tokens so far, so nothing else crosses the wire and any worker can go on where another stopped. Grammars and
masks are llguidance's.
"""
