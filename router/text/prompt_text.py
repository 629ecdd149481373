"""Where the tokens of a prompt stand in its text. Pure: no IO."""

from collections.abc import Sequence

from router.text.choice_text import Detokenizer
from router.text.token_text import TokenTexts


def prompt_offsets(token_ids: Sequence[int], text: str, token_texts: TokenTexts) -> list[int]:
    """For each token where in `text`, as its client wrote it, its own text begins; within `text` always.

    A special token that the tokenizer adds in front is no part of that text, and stands at its beginning.
    """
    detokenizer = Detokenizer(token_texts, (), skip_special_tokens=False)
    begins, num_chars = [], 0
    for token_id in token_ids:
        begins.append(num_chars)
        num_chars += len(detokenizer.push(token_id))
    num_chars += len(detokenizer.flush())
    num_added = max(0, num_chars - len(text))
    return [min(max(0, begin - num_added), len(text)) for begin in begins]
