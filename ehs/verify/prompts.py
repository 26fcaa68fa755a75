# SPDX-License-Identifier: Apache-2.0
# Prompts by (index, length): distinct indices give distinct tokens, so that a mixed-up request shows.
from collections.abc import Callable

from ehs.models.checkpoints import PREDICTABLE_VOCAB_SIZE

Prompts = Callable[[int, int], list[int]]

TEXT = """\
The ferry leaves the north pier at a quarter past six, and nobody who works on the island has ever seen it wait. On
Thursdays it carries flour, two crates of lamp oil and whatever letters the winter has left dry. The captain counts the
passengers twice, writes the larger number down, and says that the sea corrects all bookkeeping in the end.
def moving_average(values, width):
    if width < 1 or width > len(values):
        raise ValueError(f"width={width}: 1 to {len(values)}")
    window = sum(values[:width])
    yield window / width
    for old, new in zip(values, values[width:]):
        window += new - old
        yield window / width
Der Zug nach Lindau haelt heute nicht in Kempten, weil zwischen den beiden Tunneln ein Baum auf den Gleisen liegt. Wer
umsteigen muss, bekommt am Schalter eine Tasse Tee und die Auskunft, dass es ungefaehr eine Stunde dauern wird.
{"id": 4711, "kind": "sensor", "unit": "kPa", "samples": [101.3, 101.2, 101.4, 99.8], "note": "valve B was open"}
La receta pide tres limones, pero mi abuela usaba dos y una hoja de laurel; decia que el tercero era para el vecino.
Question: a tank holds 240 litres and loses 3 litres every 20 minutes. After how many hours is it two thirds full?
Answer: it must lose 80 litres, which takes 80 / 3 * 20 minutes, a little less than nine hours.
Il pleut depuis mardi sur les toits de zinc, et le chat du troisieme regarde les gouttes comme on lit un journal.
SELECT station, avg(level) AS level FROM gauge WHERE day >= '2026-03-01' GROUP BY station HAVING count(*) > 24;
"""


def arithmetic_prompts(index: int, length: int) -> list[int]:
    """Token ids for the predictable model: at any position, requests whose index differs have different tokens."""
    return [(211 * index + 17 * position + 5) % PREDICTABLE_VOCAB_SIZE for position in range(length)]


def text_prompts(model: str) -> Prompts:
    """Windows of a mixed text (prose, code, several languages), cut at another place for every index."""
    from transformers import AutoTokenizer

    tokens: list[int] = AutoTokenizer.from_pretrained(model)(TEXT)["input_ids"]

    def prompt(index: int, length: int) -> list[int]:
        start = 97 * index % len(tokens)
        repeated = tokens * (2 + length // len(tokens))
        return repeated[start : start + length]

    return prompt
