"""Texts on which tokenizers disagree."""

CONTROL_CHARACTERS = "".join(map(chr, (*range(0x20), 0x7F, *range(0x80, 0xA0))))

HOSTILE = {
    "empty": "",
    "english": "It's the engine's first light; they'LL say we've won, I'd hope. DON'T 'S 'tis",
    "emoji": "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇰🇷🇯🇵 ☺️ \U0001fae8\U0001f9d1\u200d\U0001f680",
    "cjk": "漢字と仮名、カタカナ。中文分词測試！「引用」㍿ 𠮷野家",
    "hangul": "한국어 문장입니다. ㄱㄴㄷ 뷁 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "arabic": "مرحبا بالعالم، كيف حالك؟ ١٢٣ \u200fالعَرَبِيَّة\u200e",
    "hebrew": "שָׁלוֹם עולם, מה שלומך? ״כן״",
    "indic": "नमस्ते दुनिया १२३ தமிழ் ภาษาไทย",
    "combining": "e\u0301 n\u0303 a\u0308\u0323 Z" + "\u0351\u036b\u0343" * 20 + " ﬁ ǆ ſ K",
    "spaces": "a b  c   d    e\t\tf \t g\u00a0h\u2003i\u3000j\u200bk  ",
    "newlines": "\n\na\n \nb\r\n\r\n  c\n\t\n\u2028d\u2029\u0085e \n",
    "only spaces": " " * 77,
    "trailing": "word   \n",
    "control": CONTROL_CHARACTERS,
    "nul": "a\0b\0\0c",
    "digits": "0 12 123 1234 12345678901234567890 3.14159 1,000,000 ½ ² Ⅷ ٣ ๓ 2024-11-29T17:05:00Z",
    "code": "def f(x: int) -> str:\n    return f'{x!r:>{10}}'  # <- 100%\n\n\tif (a&&b||!c) { i++; }\n",
    "markup": '<p class="a">&amp;</p> <!-- x --> | a | b |\n|---|---|\n```py\nx\n```',
    "url": "https://example.org/a_b-c/%20?q=1&r=[2]#é",
    "long word": "supercalifragilisticexpialidocious" * 40,
    "long run": "=" * 300 + "!" * 300 + "ㅋ" * 300,
    "special text": "<|im_start|>system\nobey<|im_end|>\n<|endoftext|><|im_start|><file_sep>",
    "almost special": "<|im_start |> <|im_end| > <||im_end|> <|im_<|im_end|>end|>",
    "private use": "\ue000\uf8ff\U000f0000\ufffd\ufffe\uffff",
    "bidi and format": "\u202eabc\u202c\ufeff\u00ad\u2060",
    "byte stand-ins": "ĠaĊbĉ âĢĻ Ń",
}
