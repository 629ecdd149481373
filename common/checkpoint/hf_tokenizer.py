"""What a Hugging Face directory says about text, read as transformers 5 does: tokenizer, special tokens, template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from common.checkpoint.model_files import read_bytes, read_json
from common.checkpoint.spec import CheckpointError

Config = Mapping[str, Any]
SpecialTokens = Mapping[str, str | list[str]]


def read_special_tokens(path: Path, tokenizer_config: Config) -> dict[str, str | list[str]]:
    """By the name that a template uses. special_tokens_map.json counts unless the configuration lists added tokens."""
    merged = dict(tokenizer_config)
    if "added_tokens_decoder" not in tokenizer_config:
        own = read_json(path / "special_tokens_map.json", is_optional=True)
        merged |= {name: value for name, value in own.items() if value is not None}
    if isinstance(extra := merged.get("extra_special_tokens"), dict):
        merged |= extra
    found: dict[str, str | list[str]] = {}
    for name, value in merged.items():
        if name.endswith("_token") and (content := _content(value)) is not None:
            found[name] = content
        elif name.endswith("_special_tokens") and isinstance(value, list):
            found[name] = [content for each in value if (content := _content(each)) is not None]
    return found


def read_tokenizer(path: Path, tokenizer_config: Config, special_tokens: SpecialTokens) -> Tokenizer:
    """Raises CheckpointError when tokenizer.json is missing or damaged, or other files do not agree with it."""
    tokenizer = _tokenizer_of(path / "tokenizer.json")
    # What the file's last user had set would cut prompts or fill them up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_listed_tokens(path, tokenizer, tokenizer_config)
    _make_special(tokenizer, special_tokens)
    return tokenizer


def read_chat_template(path: Path, tokenizer_config: Config) -> str | None:
    """The template of its own file, else of tokenizer_config.json, where it may be a list of named ones, else of
    chat_template.json."""
    file = path / "chat_template.jinja"
    if file.exists():
        try:
            return read_bytes(file).decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} is not UTF-8: {error}") from error
    template = tokenizer_config.get("chat_template")
    if template is None:
        template = read_json(path / "chat_template.json", is_optional=True).get("chat_template")
    if isinstance(template, list):
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"{path}: chat_template should be text or a list of named texts, got {template!r:.80}")
    return template


def _tokenizer_of(file: Path) -> Tokenizer:
    if not file.exists():
        raise CheckpointError(
            f"cannot read {file}: No such file or directory; other tokenizer files are not read: "
            "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) writes it"
        )
    content = read_bytes(file)
    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} is not a tokenizer: {error}") from error


def _add_listed_tokens(path: Path, tokenizer: Tokenizer, tokenizer_config: Config) -> None:
    """Tokens of tokenizer_config.json or added_tokens.json that tokenizer.json lacks, at the ids that those name."""
    listed: dict[int, AddedToken] = {}
    for idx, flags in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        listed[int(idx)] = AddedToken(**flags)
    if not listed:
        own = read_json(path / "added_tokens.json", is_optional=True)
        listed = {int(idx): AddedToken(text, normalized=True) for text, idx in own.items()}
    known = tokenizer.get_added_tokens_decoder()
    for idx, token in sorted(listed.items()):
        if idx in known and known[idx].content == token.content:
            continue
        tokenizer.add_tokens([token])
        if (found := tokenizer.token_to_id(token.content)) != idx:
            raise CheckpointError(f"{path}: {token.content!r} has id {idx} in one file and {found} in tokenizer.json")


def _make_special(tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
    """What the files call special is one token wherever it is written, as far as the vocabulary has it."""
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    named = [text for value in special_tokens.values() for text in (value if isinstance(value, list) else [value])]
    missing = [text for text in named if text not in added and tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in dict.fromkeys(missing)])


def _content(value: Any) -> str | None:
    """A special token is written as a string or as an AddedToken object."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
