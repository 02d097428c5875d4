# SPDX-License-Identifier: Apache-2.0
"""Scores segments with sacreBLEU 2.6.0's chrF, the oracle of tests/text/chrf_test.cpp.

    python3 -B make_chrf_oracle.py > chrf_oracle.json       writes the recorded cases
    python3 -B make_chrf_oracle.py --score cases.json       scores the cases of a file

Cases are those of make_bleu_oracle.py. A scored case has "score", "counts" (three an order),
"signature", "line" and "json" (7 decimals) besides.
"""
import random

from sacrebleu.metrics import CHRF

from make_bleu_oracle import CHINESE, WORDS, any_letters, disturbed, main, segment

WORDS_WITH_SIGNS = (
    "(hi) 'tis' dogs' ... .. , a, ,a ,, $5 #x x# _y_ don't \"q\" ! \u3002 a\u3002").split()


def make_cases():
    rng = random.Random(20260202)
    cases = []

    def add(hypotheses, references, **options):
        cases.append({"hypotheses": hypotheses, "references": references, "options": options})

    def any_options():
        return {"char_order": rng.choice([1, 4, 6, 6, 6, 12]),
                "word_order": rng.choice([0, 0, 1, 2, 2, 4]),
                "beta": rng.choice([0, 1, 2, 2, 3]), "lowercase": rng.random() < 0.4,
                "whitespace": rng.random() < 0.4, "eps_smoothing": rng.random() < 0.4}

    for word_order in (0, 2):
        for eps_smoothing in (False, True):
            for whitespace in (False, True):
                options = {"word_order": word_order, "eps_smoothing": eps_smoothing,
                           "whitespace": whitespace}
                add([""], [[""]], **options)
                add(["", "a b"], [["a", ""]], **options)
                add([" "], [[" a"]], **options)
                add(["a"], [["a"]], **options)
                add(["ab"], [["ba"]], **options)
                add(["x"], [["y"]], **options)
                add(["a b c d"], [["a b  c d"]], **options)
                add(["abc def"], [["abc"], ["def"], ["abcdef"]], **options)
                add(["the dog", "a"], [["the", ""], ["dog", "a"]], **options)
    for pool in (WORDS, CHINESE, WORDS + CHINESE, WORDS_WITH_SIGNS):
        for count in (1, 2, 3):
            for _ in range(5):
                hypotheses = [segment(rng, pool, 14) for _ in range(3)]
                references = [[disturbed(rng, h, pool) for h in hypotheses] for _ in range(count)]
                add(hypotheses, references, **any_options())
    for _ in range(20):
        text = any_letters(rng, 60)
        other = list(text)
        for _ in range(6):
            other[rng.randrange(len(other))] = any_letters(rng, 1)
        add([text], [["".join(other)]], **any_options())
    return cases


def score(case):
    metric = CHRF(**case["options"])
    result = metric.corpus_score(case["hypotheses"], case["references"])
    stats = metric._extract_corpus_statistics(case["hypotheses"], case["references"])
    signature = metric.get_signature().format()
    return {**case, "score": result.score, "counts": [sum(column) for column in zip(*stats)],
            "signature": signature, "line": result.format(1, False, signature),
            "json": result.format(7, False, signature, True)}


main(make_cases, score)
