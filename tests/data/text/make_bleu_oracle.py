# SPDX-License-Identifier: Apache-2.0
"""Scores segments with sacreBLEU 2.6.0, the oracle of tests/text/bleu_test.cpp.

    python3 make_bleu_oracle.py > bleu_oracle.json         writes the recorded cases
    python3 make_bleu_oracle.py --score cases.json         scores the cases of a file

A case: {"hypotheses": [...], "references": [[...], ...] (one list a reference), "options": {...}}.
A scored case has "score", "precisions", "bp", "ratio", "sys_len", "ref_len", "correct", "total",
"signature", "line" and "json" (7 decimals) besides; correct and total are the raw counts.
"""
import json
import random
import sys

import sacrebleu
from sacrebleu.metrics import BLEU

TOKENIZERS = ["13a", "zh", "char", "none", "intl"]
WORDS = (
    "the The dog DOG bit a man of in is was not it's U.S. e.g. 3.14 1,000 10-20 pre-war x-2 "
    "well-known ... , . ; : ! ? ( ) [x] {y} \"quoted\" 'single' $5 50% a/b c&d user@host "
    "&quot;hi&quot; &amp; &lt;tag&gt; &amp;lt; <skipped> -\n\n end- 1990s. .5 5. ,a a, 9,b b,9 "
    "\u00c4pfel \u00d6l STRASSE \u1e9e \u0130stanbul \u039f\u0394\u039f\u03a3 \u03a3 "
    "\u03a3\u0391\u03a3. na\u00efve caf\u00e9 CAF\u00c9 \u041c\u0418\u0420 "
    "\u043c\u0438\u0440").split(" ")
CHINESE = (
    "\u6211\u4eec \u4f60\u597d \u4e16\u754c \u4eca\u5929 2024\u5e74 GPT-4\u6a21\u578b \u3002 "
    "\uff0c \uff01 \uff08\u6ce8\uff09 \u201c\u5f15\u53f7\u201d \u2018\u5355\u2019 \u2014\u2014 "
    "\u2026\u2026 \u2192 \u00d7 \u00b7 \uff11\uff12\uff13 \u304b\u306a \u30ab\u30ca "
    "\ud55c\uad6d\uc5b4 \u3402 \U00020000\U0002a6d6 \U0002f800 \u9fbc \u9fff \uf900 \u2001x "
    "\u2a6d \u2a6e \u2000y \u2603 \u2713 \u3231 \u33a1 \ufe30 \U0001f600 "
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u00e9 e\u0301 ABC abc 3.5% 1,234\u4eba").split(" ")
SPACES = [" "] * 12 + ["  ", "\t", "\u00a0", "\u3000", "\u2003", "\u200b", "\u2028", "\x1c", "\x85",
                       "\u1680", "\u205f", "\u202f", "\x0b", "\r", "\ufeff", ""]


def segment(rng, pool, longest):
    text = ""
    for _ in range(rng.randint(0, longest)):
        text += rng.choice(pool) + rng.choice(SPACES)
    return text


def disturbed(rng, text, pool):
    """A reference that shares much with `text`."""
    pieces = text.split(" ")
    for i in range(len(pieces)):
        chance = rng.random()
        if chance < 0.12:
            pieces[i] = rng.choice(pool)
        elif chance < 0.18:
            pieces[i] = ""
        elif chance < 0.24:
            pieces[i] = pieces[i].swapcase()
    return " ".join(pieces)


def any_letters(rng, length):
    """Letters from everywhere, dense where the rules have their borders."""
    borders = [0x3400, 0x4DB5, 0x9FA5, 0x9FBB, 0xF900, 0xFA2D, 0xFA6A, 0xFAD9, 0xFEFF, 0xFFEF,
               0x2E80, 0x303F, 0x31C0, 0x2FDF, 0x312F, 0x31BF, 0xFE1F, 0xFE4F, 0x2001, 0x2A6D,
               0x27BF, 0x33FF]
    letters = []
    while len(letters) < length:
        kind = rng.random()
        if kind < 0.4:
            c = rng.randint(1, 126)
        elif kind < 0.7:
            c = rng.choice(borders) + rng.randint(-2, 2)
        elif kind < 0.9:
            c = rng.randint(0x80, 0x24FF)
        else:
            c = rng.randint(0x10000, 0x10FFFF)
        letters.append(chr(c))
    return "".join(letters)


def make_cases():
    rng = random.Random(20260101)
    cases = []

    def add(hypotheses, references, **options):
        cases.append({"hypotheses": hypotheses, "references": references, "options": options})

    dog = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him."]
    dog_references = [
        ["The dog bit the man.", "It was not unexpected.", "The man bit him first."],
        ["The dog had bit the man.", "No one was surprised.", "The man had bitten the dog."]]
    for tokenize in TOKENIZERS:
        for lowercase in (False, True):
            add(dog, dog_references, tokenize=tokenize, lowercase=lowercase)
        for smooth in ("floor", "add-k", "none"):
            for effective in (False, True):
                add(dog[1:2], [dog_references[0][1:2]], tokenize=tokenize, smooth_method=smooth,
                    effective_order=effective)
        add([""], [[""]], tokenize=tokenize)
        add(["", "a b"], [["a", ""]], tokenize=tokenize)
        add(["a"], [["a"]], tokenize=tokenize)
        add(["a b c"], [["a b c"]], tokenize=tokenize, effective_order=True)
        add(["x"], [["y"]], tokenize=tokenize)
        add(["x y"], [["x"]], tokenize=tokenize, smooth_method="floor", smooth_value=0.25)
        add(["x y z w v"], [["x q z w u"]], tokenize=tokenize, smooth_method="add-k",
            smooth_value=2.5)
    for tokenize in TOKENIZERS:
        for count in (1, 2, 3):
            for lowercase in (False, True):
                for pool in (WORDS, CHINESE, WORDS + CHINESE):
                    hypotheses = [segment(rng, pool, 14) for _ in range(3)]
                    references = [[disturbed(rng, h, pool) for h in hypotheses]
                                  for _ in range(count)]
                    add(hypotheses, references, tokenize=tokenize, lowercase=lowercase)
        for lowercase in (False, True):
            for _ in range(8):
                text = any_letters(rng, 60)
                other = list(text)
                for _ in range(6):
                    other[rng.randrange(len(other))] = any_letters(rng, 1)
                add([text], [["".join(other)]], tokenize=tokenize, lowercase=lowercase)
    return cases


def score(case):
    metric = BLEU(force=True, **case["options"])
    result = metric.corpus_score(case["hypotheses"], case["references"])
    stats = metric._extract_corpus_statistics(case["hypotheses"], case["references"])
    sums = [sum(column) for column in zip(*stats)]
    signature = metric.get_signature().format()
    return {**case, "score": result.score, "precisions": result.precisions, "bp": result.bp,
            "ratio": result.ratio, "sys_len": sums[0], "ref_len": sums[1], "correct": sums[2:6],
            "total": sums[6:], "signature": signature, "line": result.format(1, False, signature),
            "json": result.format(7, False, signature, True)}


def main(make, score_one):
    """Prints the scored cases that `make` gives, or those of the file after --score."""
    if sacrebleu.__version__ != "2.6.0":
        sys.exit(f"expected sacrebleu 2.6.0, found {sacrebleu.__version__}")
    if sys.argv[1:2] == ["--score"]:
        with open(sys.argv[2], encoding="utf-8") as file:
            cases = json.load(file)
    else:
        cases = make()
    rows = [json.dumps(score_one(case), ensure_ascii=True, sort_keys=True) for case in cases]
    print("[\n" + ",\n".join(rows) + "\n]")


if __name__ == "__main__":
    main(make_cases, score)
