# SPDX-License-Identifier: Apache-2.0
"""Decides which catalogue entries are sentences that people wrote, and frees them of program marks."""
import html
import re
import unicodedata

FORMAT_CODE = re.compile(
    r"%%|%\([\w.]+\)[-#0 +]*\d*(?:\.\d+)?[a-zA-Z]|%(?:\d+\$)?[-#0+' ]*(?:\d+|\*)?(?:\.(?:\d+|\*))?"
    r"(?:hh|h|ll|l|q|j|z|t|L)?[diouxXeEfFgGaAcCsSpnmqDEHTKLPQRVZ](?![a-zA-Z])|%[1-9]\d?|%\w+%|%[a-zA-Z]\b"
    r"|\{[\w.:!%-]*\}|\$\{?[A-Za-z_]\w*\}?|\$\([\w.]+\)|@[\w.]+@")
BLOCK_TAG = re.compile(
    r"</?(?:p|br|li|ul|ol|h[1-6]|qt|html|body|div|para|title|note|item|list|nl|center|img|hr|table|tr|td"
    r"|th|pre)(?:\s[^<>]*)?/?>", re.IGNORECASE)
INLINE_TAG = re.compile(
    r"</?(?:b|i|u|tt|a|em|big|small|span|font|strong|code|sub|sup|interface|filename|command|emphasis"
    r"|application|link|icode|resource|shortcut|kbd|abbr|cite|q)(?:\s[^<>]*)?/?>", re.IGNORECASE)
ENTITY = re.compile(r"&(amp|lt|gt|quot|nbsp|apos|#\d+);")
ACCELERATOR_SUFFIX = re.compile(r"\s*[(（]\s*[_&~]\s*(\w|[^\w\s])\s*[)）]")
ACCELERATOR = re.compile(r"(?<![A-Za-z0-9_&~])[_&~](?=[A-Za-z0-9])")
ACCELERATOR_INSIDE = re.compile(r"[_&~](?=[A-Za-z0-9])")
HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
LATIN = re.compile(r"[A-Za-z]")
CREDITS = re.compile(r"translator[-_ ]credits|(names|e-?mails?) of (the )?translators|^your (names|emails)$",
                     re.IGNORECASE)
CODE_LIKE = re.compile(r"[{}\[\]<>=;|\\/#*^~@$`+_]")


def clean(english, chinese):
    """Returns ((English, Chinese), None), or (None, why the entry is dropped)."""
    if CREDITS.search(english):
        return None, "credits of translators"
    english, chinese = english.strip(), chinese.strip()
    if not english or not chinese:
        return None, "empty"
    if "\n" in english or "\n" in chinese or "\\n" in english or "\\n" in chinese:
        return None, "multi-line"
    if "\ufffd" in english + chinese:
        return None, "wrong encoding"
    english, chinese = strip_context(english, chinese)
    english, chinese = strip_tags(english, chinese)
    english, chinese = strip_accelerators(english, chinese)
    english, chinese = normalise(english), normalise(chinese)
    if not english or not chinese:
        return None, "empty"
    if english.casefold() == chinese.casefold():
        return None, "untranslated (equal)"
    return check(english, chinese)


def check(english, chinese):
    num_han = len(HAN.findall(chinese))
    if num_han == 0:
        return None, "no Chinese characters"
    if HAN.search(english) or sum(ord(c) > 0x24f for c in english) * 10 > len(english):
        return None, "English side is not English"
    if "<" in english and re.search(r"<[^<>]*[=/][^<>]*>|</", english):
        return None, "markup"
    codes = sorted(map(plain_code, FORMAT_CODE.findall(english)))
    if codes != sorted(map(plain_code, FORMAT_CODE.findall(chinese))):
        return None, "format codes differ"
    rest = FORMAT_CODE.sub("", english)
    num_letters = len(LATIN.findall(rest))
    if num_letters < 2:
        return None, "no words"
    if len(codes) > 4 or num_letters < 0.55 * len(english.replace(" ", "")):
        return None, "mostly codes or symbols"
    if len(CODE_LIKE.findall(rest)) * 8 > len(rest):
        return None, "mostly codes or symbols"
    if len(LATIN.findall(FORMAT_CODE.sub("", chinese))) > 2 * num_han + 4:
        return None, "mostly untranslated"
    if len(english) > 400 or len(chinese) > 200:
        return None, "too long"
    if len(english) > 10 * len(chinese) + 8 or len(chinese) > len(english) + 6:
        return None, "absurd length ratio"
    return (english, chinese), None


def plain_code(code):
    """The code without its position, so that a translation may change the order: %2$s is %s."""
    return re.sub(r"\d+\$", "", code)


def strip_context(english, chinese):
    """Removes what some programs write beside the text: a context "menu|File", a shortcut "Open|O"."""
    if "|" in english and "|" not in chinese:
        english = english.rpartition("|")[2]
    shortcut = re.compile(r"\|\S$")  # "Open...|O", with the letter on both sides
    if shortcut.search(english) and shortcut.search(chinese):
        letter = re.escape(chinese[-1])
        english, chinese = english[:-2], re.sub(rf"[(（]{letter}[)）]", "", chinese[:-2], count=1,
                                                flags=re.IGNORECASE)
    return english, chinese


def strip_tags(english, chinese):
    if BLOCK_TAG.search(english) or INLINE_TAG.search(english) or ENTITY.search(english):
        return strip_tags_of(english), strip_tags_of(chinese)
    return english, chinese


def strip_tags_of(text):
    return html.unescape(INLINE_TAG.sub("", BLOCK_TAG.sub(" ", text)))


def strip_accelerators(english, chinese):
    """Removes the mark of a menu's shortcut letter: "E_xit" and its "(_X)" in the translation."""
    suffix = ACCELERATOR_SUFFIX.search(chinese)
    if suffix:
        chinese = chinese[:suffix.start()] + chinese[suffix.end():]
        letter = re.escape(suffix.group(1))
        marked = re.compile(rf"[_&~](?={letter})", re.IGNORECASE)
        english, found = marked.subn("", english, count=1)
        if not found:
            english = ACCELERATOR_INSIDE.sub("", english, count=1)
    elif len(ACCELERATOR.findall(english)) == 1:
        english = ACCELERATOR.sub("", english)
        chinese = ACCELERATOR.sub("", chinese, count=1)
    return english.replace("&&", "&"), chinese.replace("&&", "&")


def normalise(text):
    text = unicodedata.normalize("NFC", text)
    text = "".join(c for c in text if c.isspace() or unicodedata.category(c)[0] != "C")
    return " ".join(text.split())


def key(english):
    """What is left of a text without case, punctuation, accents and format codes."""
    text = unicodedata.normalize("NFKD", FORMAT_CODE.sub(" ", english)).casefold()
    return "".join(c for c in text if c.isalnum()) or english


def is_worth_testing(english, chinese):
    """True for a sentence or phrase of 4 to 40 words, nearly free of codes and symbols."""
    words = re.findall(r"[A-Za-z][A-Za-z'-]*", FORMAT_CODE.sub(" ", english))
    symbols = len(FORMAT_CODE.findall(english)) + len(CODE_LIKE.findall(english))
    return 4 <= len(words) <= 40 and symbols <= 1 and len(HAN.findall(chinese)) >= 3
