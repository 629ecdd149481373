"""Texts that tokenizers stumble over."""

import unicodedata

_ACCENTS = "Ünïcödé naïve café Ångström ﬁ ½ ① 각 がぎ ệ"
NORMAL_FORMS = tuple(unicodedata.normalize(form, _ACCENTS) for form in ("NFC", "NFD"))
# What is left of bytes that are no UTF-8 once a client's library has decoded them, and characters like it.
NOT_UTF8 = (
    b"ab\xff\xfe\xc3 \xe2\x82".decode(errors="replace"),
    "\ufffd\ufffd x",
    "\x00\x01\x7f",
    "a\u200bb\u00ad\ufeff",
)

CORPUS = (
    "",
    " ",
    "   ",
    "\n",
    "the sea",
    " the sea",
    "the sea ",
    "  the  sea\n\n and   \t the land  ",
    "\r\n\r\n a\r\n  b\n   \nc",
    "1 12 123 1234 12345 3.14159 1,000,000 0x1F ١٢٣ ⅷ ²",
    "We'll they'RE it's I'm 'tis DON'T can’t",
    "def f(x):\n    return x**2  # 你好\n\tif x>=0 and y!=1: pass",
    "漢字と仮名 中文字符。한국어 문장, 「括弧」！？",
    "😀 👍🏽 👨‍👩‍👧‍👦 🇫🇷 a😀b",
    "Здравствуй, мир! Ελληνικά العربية עברית हिन्दी ไทย",
    "<s>the</s> sea <pad>and</s>",
    "a</s>b <s> c<s>",
    "use <tool> or<tool>that <unk> <tool>",
    "https://example.org/a_b-c?d=e&f=%20#g ... --- ___ ===",
    "CamelCaseWORDSandMore ALLCAPS mixedCASE ǅ ʰ",
    "x" * 40 + " " * 20 + "!" * 30,
    *NORMAL_FORMS,
    *NOT_UTF8,
)
