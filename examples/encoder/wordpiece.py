"""The uncased BERT tokeniser: clean, fold, split, then the longest known pieces from the left.

Names of special tokens in the text (``[MASK]``) are split as ordinary text is.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

__all__ = ["WordPiece"]

# Longer words become [UNK] unread, which keeps the search for pieces from going quadratic.
_MAX_WORD = 100

# Chinese, Japanese and Korean ideographs: each is a word of its own.
_IDEOGRAPHS = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPiece:
    """Sentences to token ids.

    Args:
        vocabulary: path of ``vocab.txt``, one piece a line; a piece that continues a word starts with ``##``.
    """

    def __init__(self, vocabulary: Path) -> None:
        pieces = vocabulary.read_text(encoding="utf-8").splitlines()
        self._ids = {piece: index for index, piece in enumerate(pieces)}
        self._pad, self._unknown, self._first, self._last = (
            self._ids[piece] for piece in ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
        )

    def encode(self, text: str, max_length: int = 256) -> list[int]:
        """``[CLS]``, the pieces of ``text``, ``[SEP]``: at most ``max_length`` ids, cut at the end of the text."""
        pieces = [piece for word in split_words(text) for piece in self._pieces(word)]
        return [self._first, *pieces[: max_length - 2], self._last]

    def batch(self, texts: Sequence[str], length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """``(ids, lengths)`` of ``texts``: int64 ``[B, S]`` padded on the right, int32 ``[B]``.

        S is ``length``, or else that of the longest text.
        """
        rows = [self.encode(text) if length is None else self.encode(text, length) for text in texts]
        lengths = np.array([len(row) for row in rows], np.int32)
        ids = np.full((len(rows), length or lengths.max()), self._pad, np.int64)
        for line, row in zip(ids, rows, strict=True):
            line[: len(row)] = row
        return ids, lengths

    def _pieces(self, word: str) -> list[int]:
        """The ids of a word: the longest piece in the vocabulary, again and again; all or nothing."""
        if len(word) > _MAX_WORD:
            return [self._unknown]
        found = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            for end in range(len(word), start, -1):
                index = self._ids.get(prefix + word[start:end])
                if index is not None:
                    break
            else:
                return [self._unknown]
            found.append(index)
            start = end
        return found


def split_words(text: str) -> Iterator[str]:
    """Lower-case words without accents; each punctuation mark and each ideograph is a word."""
    decomposed = unicodedata.normalize("NFD", "".join(_clean(text)))
    folded = "".join(
        # One character at a time: a final sigma is not special here.
        character.lower()
        for character in decomposed
        if unicodedata.category(character) != "Mn"
    )
    for chunk in folded.split():
        word = ""
        for character in chunk:
            if _is_punctuation(character):
                if word:
                    yield word
                yield character
                word = ""
            else:
                word += character
        if word:
            yield word


def _clean(text: str) -> Iterator[str]:
    """Drops control characters, makes every white space a blank, and sets ideographs apart."""
    for character in text:
        category = unicodedata.category(character)
        if character in "\t\n\r":
            yield " "
        elif category in ("Cc", "Cf", "Co", "Cs") or character == "\ufffd":
            continue
        elif character.isspace():
            yield " "
        elif any(low <= ord(character) <= high for low, high in _IDEOGRAPHS):
            yield f" {character} "
        else:
            yield character


def _is_punctuation(character: str) -> bool:
    """Unicode punctuation, and every ASCII symbol (``$ + < = > ^ ` | ~`` are not punctuation to Unicode)."""
    if character.isascii():
        return character.isprintable() and not character.isalnum() and character != " "
    return unicodedata.category(character).startswith("P")
