"""Reads columns of numbers, prices and ratings.

A column is one of numbers if its texts survive being written again. Codes such as `007`, `1E2` and
numbers of 19 digits are texts. A few values that are no numbers, such as `N/A`, are missing in a
column of numbers; the caller counts them. Ratings may be yes and no, and texts such as
`4 out of 5 stars` and `★★★★☆`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from recsys.data.availability import read_available
from recsys.data.column_words import WORDS, pattern
from recsys.data.texts import NOTHING, each_value

INTEGER = r"^[+-]?(0|[1-9]\d{0,17})$"  # any such number fits in 64 bits
PLAIN = (
    r"^[+-]?((0|[1-9]\d*)(\.\d+)?|\.\d+)$"
    r"|^-?\d(\.\d+)?e(-\d{1,3}|\+\d{2,3})$"  # as Python and Arrow write them; 1E2 is a code
    r"|^-?\d\.\d+E(-[4-9]|-?[1-9]\d{1,2}|[7-9])$"  # as Java does
)
GROUPED = r"^[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?$"
CODE = r"^[+-]?0\d"
LONG_WHOLE = r"^\d{5,}$"
ANSWER = r"(?i)^(true|false)$"
DIGITS = 15  # significant digits that every floating number keeps
CURRENCY = f"(?i)({WORDS['currencies']})"
CURRENCY_SIGNS = "[€$£¥₹₺₽₩]"
CODES = frozenset(WORDS["codes_of_currencies"].split())
SIGNS = {sign: codes for sign, *codes in
         (text.split("=") for text in WORDS["signs_of_currencies"].split())}  # fmt: skip
THREE_DECIMALS = r"(?i)KWD|BHD|OMR|JOD|TND|IQD|LYD"
DASHES = r"[.,/](-|\x{2013}|\x{2014})+$"  # in the place of decimals
BLANKS = rf"[\s\x{{00A0}}\x{{2009}}\x{{202F}}'\x{{2019}}]|{DASHES}"
POINT = r"^[+-]?(\d[\d,]*)?\.\d+$"  # a decimal point: 1,299.50
COMMA = r"^[+-]?\d[\d.]*,\d+$"  # a decimal comma: 1.299,50
POINTS = r"^[+-]?[1-9]\d{0,2}(\.\d{3})+$"  # 1.299.000
COMMAS = r"^[+-]?[1-9]\d{0,2}(,\d{2,3})*,\d{3}$"  # 1,299,000
EITHER = r"^[+-]?[1-9]\d{0,2}[.,]\d{3}$"  # 1.299: a thousand, or one and a bit
FORMS = (("whole", r"^[+-]?\d+$"), ("point", POINT), ("comma", COMMA), ("points", POINTS),
         ("commas", COMMAS))  # fmt: skip
MONEY_SHARE = 0.9  # of the numbers of a column of prices that have a currency
MOST_CENTS = 0.9  # share of the decimals that are two
MOST_BAD, MOST_BAD_PRICES = 0.05, 0.1  # share of values that are no numbers
NO_NUMBER = frozenset([*NOTHING.to_pylist(), *WORDS["no_number"].split("|")])


class Numbers(NamedTuple):
    """A column of numbers.

    Attributes:
        values: (rows,) int64 or float64; null where a value is missing or no number.
        bad: (rows,) bool, whether a value was there and is no number.
        converted: (rows,) bool, whether a value is a number that is written in another way, as
            prices with a currency are.
        thousands: (rows,) bool, whether nothing but the name of a price decides that the mark of
            the value divides thousands, as in 1.299 beside 2.499.
    """

    values: pa.ChunkedArray
    bad: pa.ChunkedArray
    converted: pa.ChunkedArray
    thousands: pa.ChunkedArray


def read_numbers(
    texts: pa.ChunkedArray, *, named: bool, prices: bool, others: pa.Array | None = None
) -> Numbers | None:
    """A column of texts as numbers, or None if it is none.

    Args:
        texts: without blanks around them; null where missing.
        named: whether the column has the name of a price.
        prices: whether currencies and marks for thousands are read.
        others: prices of the same shop; they show what a mark means where the column does not.
    """
    encoded = texts.combine_chunks().dictionary_encode()
    words = encoded.dictionary
    if not len(words):
        return None
    rows = np.bincount(encoded.indices.drop_null().to_numpy(), minlength=len(words))
    marks = decimal_marks(pa.array([], pa.string()) if others is None else others)
    prices_read = _prices(words, rows, named, marks) if prices else None
    money = prices_read is not None
    if prices_read is None:
        prices_read = _plain(words, rows, named)
    if prices_read is None:
        return None
    bad = pc.fill_null(pc.is_null(prices_read).take(encoded.indices), False)
    guessed = converted = pa.array([False] * len(words))
    if money:
        plain = pc.if_else(pc.match_substring_regex(words, PLAIN), words, None)
        plain = pc.cast(pc.replace_substring_regex(plain, r"^\+", ""), pa.float64())
        converted = pc.and_(
            pc.is_valid(prices_read), pc.fill_null(pc.not_equal(plain, prices_read), True)
        )
        bare = pc.replace_substring_regex(words, BLANKS, "")
        guessed = pc.and_(_beside_cents(bare, rows), pc.is_valid(prices_read))
        either = pc.or_(pc.match_substring_regex(bare, EITHER), pc.is_null(prices_read))
        has_currency = pc.any(pc.match_substring_regex(words, CURRENCY)).as_py()
        if len(marks) != 1 and not has_currency and pc.all(either).as_py():
            guessed = pc.is_valid(prices_read)
    made = [pc.fill_null(values.take(encoded.indices), False) for values in (converted, guessed)]
    return Numbers(
        pa.chunked_array([prices_read.take(encoded.indices)]),
        pa.chunked_array([bad]),
        *(pa.chunked_array([values]) for values in made),
    )


def currency_of(text: str) -> str | None:
    """The currency in a price, or in a column beside it; None without one.

    It is a code, or else a sign if this may be of several currencies.

    >>> [currency_of(text) for text in ("CA$ 5 CAD", "5 Euro", "$5", "R$5", "thb", "5")]
    ['CAD', 'EUR', '$', 'BRL', 'THB', None]
    """
    words = re.sub(r"[\W\d_]+", " ", text.upper()).split()
    if len(words) == 1 and words[0] in CODES and not re.search(CURRENCY_SIGNS, text):
        return words[0]
    found = [match[0].upper().strip(".") for match in re.finditer(CURRENCY, text)]
    found += [word for word in words if word in SIGNS]
    if not found:
        return None
    if codes := [name for name in found if name in CODES]:
        return codes[0]
    meant = SIGNS.get(found[0], [found[0]])
    said = [code for code in meant if code in words]
    return (said or meant)[0] if said or len(meant) == 1 else found[0]


def decimal_marks(prices: pa.Array) -> str:
    """The marks that surely stand before decimals: a point, a comma, both, or none.

    >>> decimal_marks(pa.array(["1.299", "12.50"])), decimal_marks(pa.array(["1.299,00 €", "8"]))
    ('.', ',')
    >>> decimal_marks(pa.array(["1.299", "8,250"]))
    ''
    """
    bare = _bare(prices)
    clear = bare.filter(pc.invert(pc.match_substring_regex(bare, f"{EITHER}|{COMMAS}")))
    forms = ((".", POINT), (",", COMMA))
    return "".join(m for m, form in forms if pc.any(pc.match_substring_regex(clear, form)).as_py())


def _bare(prices: pa.Array) -> pa.Array:
    """Prices without currencies, which may stand for a mark, as in 12€50, and blanks."""
    marks = pc.replace_substring_regex(prices, rf"{CURRENCY}\s?(\d\d)$", r",\3")
    prices = pc.if_else(pc.match_substring_regex(prices, r"^\s*\d"), marks, prices)
    return pc.replace_substring_regex(pc.replace_substring_regex(prices, CURRENCY, ""), BLANKS, "")


def _plain(words: pa.Array, rows: NDArray[np.int64], named: bool) -> pa.Array | None:
    """Distinct texts as numbers, null for those that are none."""
    number = pc.match_substring_regex(words, PLAIN)
    grouped = pc.match_substring_regex(words, GROUPED)
    if pc.any(pc.and_(grouped, pc.match_substring(words, "."))).as_py():
        number = pc.or_(number, grouped)
    if pc.any(pc.match_substring_regex(words, CODE)).as_py():
        return None
    bad = pc.invert(number)
    digits = pc.and_(bad, pc.match_substring_regex(words, r"\d"))
    codes = pc.all(pc.match_substring_regex(words.filter(number), LONG_WHOLE)).as_py()
    if (pc.any(digits).as_py() and codes and not named) or not _few_bad(words, bad, rows, named):
        return None  # 080442957X among other numbers of books is none of them
    plain = pc.replace_substring_regex(words, r"^\+|,", "")
    plain = pc.if_else(number, plain, None)
    if pc.all(pc.match_substring_regex(plain, INTEGER)).as_py():
        return pc.cast(plain, pa.int64())
    short = pc.replace_substring_regex(plain, r"\.0+$", "")
    values = pc.cast(plain, pa.float64())
    decimals = pc.binary_length(pc.replace_substring_regex(plain, r"^[^.]*\.?", ""))
    zeros = pc.any(pc.match_substring_regex(plain, r"\.\d+0$")).as_py()
    if not named and zeros and pc.count_distinct(decimals).as_py() > 1:
        return None  # 1.9 and 1.10 are versions, 1.50 and 2.25 are numbers
    size = pc.binary_length(pc.replace_substring_regex(short, r"^[-0.]+|\.|[eE].*$", ""))
    long = short.filter(pc.fill_null(pc.greater(size, DIGITS), False)).to_pylist()
    if any(Decimal(repr(float(text))) != Decimal(text) for text in long):
        return None
    if any(len(text.partition(".")[0].lstrip("-")) > 18 for text in long):
        return None
    return values


def _few_bad(words: pa.Array, bad: pa.Array, rows: NDArray[np.int64], named: bool) -> bool:
    """Whether most rows are numbers, apart from words that say that there is none."""
    strange = np.array(bad.to_numpy(zero_copy_only=False), bool)
    numbers = int(rows[~strange].sum())
    if not numbers or strange.sum() > 10_000:
        return False
    positions = np.flatnonzero(strange)
    texts = words.take(pa.array(positions)).to_pylist()
    unknown = [at for at, t in zip(positions, texts, strict=True) if t.lower() not in NO_NUMBER]
    share = MOST_BAD_PRICES if named else MOST_BAD
    return int(rows[unknown].sum()) <= share * (numbers + int(rows[unknown].sum()))


def _prices(words: pa.Array, rows: NDArray[np.int64], named: bool, marks: str) -> pa.Array | None:
    """Distinct texts as prices; None without a currency or a mark that has to be understood.

    `marks` are those that stand before decimals in other prices of the shop.
    """
    money = pc.match_substring_regex(words, CURRENCY)
    bare = _bare(words)
    either = pc.match_substring_regex(bare, EITHER)
    marked = pc.or_(money, pc.match_substring_regex(words, rf",\d|{DASHES}"))
    if not pc.any(pc.or_(marked, either) if named else marked).as_py():
        return None
    number = pc.match_substring_regex(bare, "|".join(pattern for _, pattern in FORMS))
    of = {name: int(rows[np.array(mask)].sum()) for name, mask in (("n", number), ("m", money))}
    if not (named or of["m"] >= MONEY_SHARE * of["n"]) or not of["n"]:
        return None
    if not _few_bad(words, pc.invert(number), rows, named=True):
        return None
    # Without a value that shows the form, 1.299 is a thousand, because prices have two decimals.
    thousand = not pc.any(pc.match_substring_regex(words, THREE_DECIMALS)).as_py()
    cents = thousand and pc.any(_beside_cents(bare, rows)).as_py()
    return read_amounts(bare, marks, thousand=thousand, cents=cents)


def _beside_cents(bare: pa.Array, rows: NDArray[np.int64]) -> pa.Array:
    """Whether prices are such as 1.299, beside more prices that nearly all have two decimals."""
    unclear = pc.match_substring_regex(bare, EITHER)
    either = pc.and_(unclear, pc.match_substring(bare, decimal_marks(bare)))
    decimal = pc.and_(pc.match_substring_regex(bare, f"{POINT}|{COMMA}"), pc.invert(unclear))
    cents = pc.match_substring_regex(bare, r"[.,]\d\d$")
    few, every, usual = (rows[np.array(mask)].sum() for mask in (either, decimal, cents))
    return pc.and_(either, bool(usual >= max(MOST_CENTS * every, few, 1)))


def read_amounts(
    bare: pa.Array, marks: str = "", *, thousand: bool = True, cents: bool = False
) -> pa.Array:
    """Numbers with marks before decimals or between thousands: float64, null for other texts.

    >>> read_amounts(pa.array(["1.200", "3", "1.000,00", "x"])).to_pylist()
    [1200.0, 3.0, 1000.0, None]
    >>> read_amounts(pa.array(["1.200", "2.5"])).to_pylist()
    [1.2, 2.5]

    Args:
        bare: without currencies and blanks.
        marks: those that stand before decimals in other numbers of the same kind.
        thousand: whether a mark whose meaning no number shows divides thousands.
        cents: whether the mark before two decimals divides thousands before three digits.
    """
    form = {name: pc.match_substring_regex(bare, pattern) for name, pattern in FORMS}
    either = pc.match_substring_regex(bare, EITHER)
    clear = pc.invert(either)
    groups = {mark: pc.and_(form[name], clear) for mark, name in ((".", "points"), (",", "commas"))}
    own_marks = decimal_marks(bare)
    if not own_marks and len(marks) == 1 and not pc.any(pc.or_(groups["."], groups[","])).as_py():
        own_marks = marks
    reading: dict[str, bool | None] = {}  # whether the mark divides thousands
    for mark, other_mark in ((".", ","), (",", ".")):
        own, other = mark in own_marks, other_mark in own_marks
        if own and other:
            reading[mark] = None
        elif pc.any(groups[mark]).as_py() or other:
            reading[mark] = True
        else:
            reading[mark] = thousand and (cents or not own)
    point = pc.match_substring(bare, ".")
    whole = pc.or_(form["whole"], pc.or_(groups["."], groups[","]))
    result = pc.if_else(whole, pc.replace_substring_regex(bare, "[.,]", ""), None)
    decimal = pc.if_else(
        form["point"],
        pc.replace_substring(bare, ",", ""),
        pc.replace_substring(pc.replace_substring(bare, ".", ""), ",", "."),
    )
    fraction = pc.and_(pc.or_(form["point"], form["comma"]), clear)
    result = pc.coalesce(result, pc.if_else(fraction, decimal, None))
    for mark, mine in ((".", point), (",", pc.invert(point))):
        mine = pc.and_(either, mine)
        if reading[mark] is not None:
            read = pc.replace_substring(bare, mark, "" if reading[mark] else ".")
            result = pc.coalesce(result, pc.if_else(mine, read, None))
    return pc.cast(pc.replace_substring(result, "+", ""), pa.float64())


RATING = pattern("points")
MOST_SIDES = 3  # distinct ratings of a scale such as -1 and 1, whose -1 is a dislike
FULL, EMPTY = "★⭐", "☆✩\ufe0f"  # the last one chooses how the sign before it is drawn


def read_ratings(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Ratings as numbers: (rows,) float32, null where a text is missing or no rating.

    Yes and no are 1 and 0, and so are votes in words.

    >>> said = pa.chunked_array([["4.0 out of 5 stars", "1/5", "★★★☆☆", "3,5", "no", "red"]])
    >>> read_ratings(said).to_pylist()
    [4.0, 1.0, 3.0, 3.5, 0.0, None]
    """
    answers = pc.cast(read_available(texts), pa.float32())
    return pc.coalesce(each_value(texts, _points, pa.float32()), answers)


def has_unrated(texts: pa.ChunkedArray) -> bool:
    """Whether -1 says that there is no rating, beside those of a scale that begins at 1."""
    points = np.unique(read_ratings(texts).drop_null().to_numpy())
    return len(points) > MOST_SIDES and bool(points[0] == -1 and points[1] >= 1)


def share_of_points(texts: pa.ChunkedArray) -> float:
    """The share of texts that are a number of points or of stars, without yes and no."""
    points = each_value(texts, _points, pa.float32())
    return 1 - points.null_count / len(points) if len(points) else 0.0


def _points(text: str) -> float | None:
    match = RATING.fullmatch(text)
    if match is not None:
        return float(match[1].replace(",", "."))
    if text and not set(text) - set(FULL + EMPTY):
        return float(sum(text.count(star) for star in FULL))
    return None
