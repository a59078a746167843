"""Every reader passes the suite of readers; its own features are in `test_readers.py`."""

from __future__ import annotations

import json
from typing import Any

from reader_suite import ReaderSuite

FLAGS = "|".join(["0"] * 19)
TIME = 1_500_000_000


class TestS3Rec(ReaderSuite):
    source, path = "s3rec", "X.txt"
    files = (
        ("X.txt", "1 1 2 3\n2 3 1\n"),
        ("X_item2attributes.json", '{"1": [5, 6], "2": [6], "3": []}'),
    )
    events = (("1", "1"), ("1", "2"), ("1", "3"), ("2", "3"), ("2", "1"))
    malformed = (
        ("X.txt", "1 2\n1 3\n", "user 1 has more than one line"),
        ("X.txt", "1,2,3\n4,5\n", r"X\.txt:1: expected integers separated by blanks.* '1,2,3'"),
        ("X.txt", "1 2 3\n2 4 abc\n", r"X\.txt:2: .*'abc'"),
        ("X.txt", "1 2\n2 -1\n", r"X\.txt:2: .* found '-1'"),
        ("X.txt", "1 2\n2 1.5\n", r"X\.txt:2: .* found '1\.5'"),
        ("X.txt", "1 2\n2 1_000\n", r"X\.txt:2: .* found '1_000'"),
        ("X.txt", "1 2\n2\u00a03\n", r"X\.txt:2: .* found '2\\xa03'"),
        ("X.txt", "1 2\n2 " + "9" * 19, r"X\.txt:2: .* found '9999"),
        ("X.txt", b"1 2\nCit\xe9\n", r"X\.txt:2: byte 0xe9 is not UTF-8"),
        ("X_item2attributes.json", '{"1": 5}', r"attributes\.json: item '1': expected a list"),
        ("X_item2attributes.json", '{"1": [5, ', r"attributes\.json:1: .*looks cut off"),
    )


class TestAtSpeed(ReaderSuite):
    source, path = "atspeed", "."
    files = (
        ("sequential_train.txt", "1 1 2\n2 2\n"),
        ("sequential_valid.txt", "1 \n2 1\n"),
        ("sequential_test.txt", "1 2\n2\n"),
        ("index.json", '{"0": ["<a_1>", "<b_2>"], "1": ["<a_1>", "<b_3>"]}'),
    )
    events = (("1", "0"), ("1", "1"), ("1", "1"), ("2", "1"), ("2", "0"))
    malformed = (
        ("sequential_test.txt", "1 2\n2 9\n", "user 2 has item 9, which .*index.json lacks"),
        ("sequential_test.txt", "1 0\n2\n", "user 1 has item 0"),
        ("sequential_valid.txt", "1 2\n", r"valid\.txt: its users are not those .*incomplete"),
    )


INDEX = {"0": ["<a_1>", "<b_1>"], "1": ["<a_2>", "<b_1>"]}


def indexed(**codes: Any) -> str:
    """The index with the codes of some items, `_0` for that of item 0."""
    return json.dumps(INDEX | {name.removeprefix("_"): value for name, value in codes.items()})


class TestLcRec(ReaderSuite):
    source, path = "lcrec", "X.inter.json"
    files = (
        ("X.inter.json", '{"0": [0, 1], "1": [1]}'),
        ("X.item.json", '{"0": {"title": "A", "description": "[\'x\']"}, "1": {"title": "B"}}'),
        ("X.index.json", json.dumps(INDEX)),
    )
    events = (("0", "0"), ("0", "1"), ("1", "1"))
    malformed = (
        *(
            ("X.inter.json", f'{{"0": [1], "8": {history}}}', "user '8': expected a list of item")
            for history in ("[1, null]", '"1 2"', "[1.5]", "[true]", "[-1]", '["1"]')
        ),
        ("X.inter.json", f'{{"0": [1], "8": [{"9" * 19}]}}', "user '8': expected a list of item"),
        ("X.inter.json", '{"0": [0, 1],\n "1": [1', r"inter\.json:2: not valid JSON: .*cut off"),
        ("X.inter.json", "{'0': [1]}", r"inter\.json:1: not valid JSON: [^;]*$"),
        ("X.inter.json", '{"1": [0], "7": [1], "7": [1]}', "key '7' occurs twice"),
        ("X.inter.json", f'{{"0":\n {"9" * 5000}}}', "not valid JSON: Exceeds the limit"),
        ("X.inter.json", f'{{"0":\n {"[" * 100_000}}}', "not valid JSON: maximum recursion depth"),
        ("X.inter.json", r'{"0": ["\ud800"]}', r"a string contains \\ud800, half of a surrogate"),
        ("X.inter.json", "[1]", "expected a JSON object, found list"),
        ("X.index.json", indexed(_7=["<a_3>", "<b_1>"]), "item '7' is out of range"),
        ("X.index.json", indexed(_1=["<a_1>"]), "item '1' has 1 codes, earlier ones have 2"),
        ("X.index.json", indexed(_0=["<a_1>", "b2"]), "item '0': 'b2' is not a code"),
        ("X.index.json", indexed(_0=["<a_1>", 2]), "item '0': 2 is not a code"),
        ("X.index.json", indexed(_0=["<a_-1>", "<b_1>"]), "is not a code"),
        ("X.index.json", indexed(_0="<a_1>"), "expected a list of codes"),
        ("X.index.json", indexed(_0=[]), "expected a list of codes"),
        *(
            ("X.index.json", json.dumps(INDEX | {key: ["<a_3>", "<b_1>"]}), "a number as key")
            for key in ("zero", "-1", "1.5", "007", "", " 1", "²", "9" * 19)
        ),
        ("X.index.json", "{}", "no items in it"),
        ("X.item.json", '{"0": ["title"], "1": {}}', r"item\.json: item '0': expected"),
        ("X.item.json", '{"0": {"title": 5}, "1": {}}', r"item\.json: item '0': expected"),
    )


class TestMovieLens(ReaderSuite):
    source, path = "movielens", "."
    files = (
        ("u.data", "1\t1\t5\t100\n2\t2\t4\t90\n"),
        ("u.item", f"1|A (1995)|x||y|{FLAGS}\n2|B (1996)|x||y|{FLAGS}\n"),
    )
    events = (("1", "1"), ("2", "2"))
    malformed = (
        ("u.data", "1;1;4;964982703\n", r"u\.data: .*Line: 1;.* Columns: 4 Found: 1"),
        ("u.data", "1\tx\tfive\t4\n", r"Line: 1;.* column \"rating\".*'?five"),
        ("u.data", "1\t1\t4\t5\n2\t1\t4\t\n", r"column 'timestamp' is empty in data row 2"),
        ("u.data", b"1\t\xe9\t4\t5\n", r"u\.data:1: byte 0xe9 is not UTF-8"),
        ("u.item", "1|A|x\n", r"u\.item:1: no id, or other than 24 columns"),
    )


def review(user: str, item: str, time: int, text: str = "", **more: Any) -> str:
    record = {"reviewerID": user, "asin": item, "overall": 5.0, "unixReviewTime": time}
    return json.dumps(record | {"reviewText": text} | more) + "\n"


class TestAmazon(ReaderSuite):
    source, path = "amazon", "X_5.json"
    files = (
        ("X_5.json", review("u", "a", 9, "Good") + review("v", "b", 7)),
        ("meta_X.json", "{'asin': 'a', 'title': 'A', 'categories': [['x', 'y']], 'price': 1.5}\n"),
    )
    events = (("u", "a"), ("v", "b"))
    malformed = (
        ("X_5.json", '{"a": 1}\n', r"X_5\.json: not a review of a known edition"),
        ("X_5.json", '{"reviewerID": "u"}\n', "has None in data row 1, which is no time"),
        ("X_5.json", "[1]\n", "no line is a JSON object|one JSON list"),
        ("X_5.json", review("u", "a", 1) + "{", "1 of 2 rows are damaged.*line 2"),
        ("X_5.json", review("u", "a", 1).encode() + b"\xff\n", "JSON lines must be in UTF-8"),
        *(
            ("X_5.json", review("u", "a", 9) + review("v", "b", 9, **change), says)
            for change, says in (
                ({"unixReviewTime": "soon"}, "'soon' in data row 2, which is no time"),
                ({"unixReviewTime": 10**400}, "'unixReviewTime' has '1000.* in data row 2"),
                ({"unixReviewTime": 2**63}, "'9223372036854775808' in data row 2, which is no ti"),
                ({"unixReviewTime": float("nan")}, "'NaN' in data row 2, which is no time"),
                ({"unixReviewTime": True}, "'true' in data row 2, which is no time"),
                ({"overall": "good"}, "'good' in data row 2, which is no number"),
                ({"asin": "\ud800"}, "1 of 2 rows are damaged.*line 2"),
                ({"reviewText": "\udfff"}, "1 of 2 rows are damaged.*line 2"),
                ({"reviewerID": "u\0"}, r"events: user 'u\\x00' ends with the character NUL"),
            )
        ),
        ("meta_X.json", "{'asin': 'a', 'title': '\\ud800'}\n", r"meta_X\.json:1: .* half of a"),
        ("meta_X.json", "{'asin': '\\uDFFF'}\n", r"meta_X\.json:1: .* half of a surrogate"),
    )


class TestTable(ReaderSuite):
    source, path, items = "table", "e.csv", "i.csv"
    files = (
        ("e.csv", "user,item,timestamp,rating\nu,a,1500000001,5\nv,\"b,c\",1500000002,4\n"),
        ("i.csv", "item,title,price,tags\na,A,1.5,x|y\n\"b,c\",B,2,z\n"),
    )  # fmt: skip
    events = (("u", "a"), ("v", "b,c"))
    malformed = (
        ("e.csv", "user item\nu a\n", "no column is recognised as the user.*--column user=NAME"),
        ("e.csv", "Shop\n\n1 May\n\nalpha,beta\nu,a\n", "such as a title stand above the names"),
        ("e.csv", "user,item,user\nu,a,v\n", "2 columns are called 'user'"),
        (
            "e.csv",
            f"user,item,timestamp,rating,rating\nu,a,{TIME},1,2\n",
            "2 columns are called 'rating'",
        ),
        ("e.csv", 'user,"item', "a quote that is opened and not closed"),
        ("e.csv", f"user,item,timestamp\nu,a\0,{TIME}\n", r"'a\\x00' ends with the character NUL"),
        ("e.csv", "user,item,timestamp\nu,a,1\nu,b,noon\n", "'timestamp' looks like a time, but"),
        ("e.csv", "user,item,timestamp\nu,a,1\nu\n", "no column holds the time"),
        ("e.csv", f"user,item,timestamp\nu,a,{TIME}\nu\n", "1 of 2 rows are damaged"),
        (
            "e.csv",
            f'user,item,timestamp\nu,a,{TIME}\nu,"a,{TIME}\nu,b,{TIME}\n',
            "a quote is not closed",
        ),
        (
            "e.csv",
            "17,4711,1500000000\n17,4712,1500000100\n",
            "the first line holds values",
        ),
        ("e.csv", "user,item\n", "no rows"),
        ("e.csv", "user,item\nu,a\n", "no column holds the time"),
        ("i.csv", "item,,\na,1,2\n", r"i\.csv: 2 columns are called ''; rename all but one"),
    )

    def test_columns_without_names_are_read_or_refused_with_words(self, folder):
        """Found by `make fuzz`: two columns had no name, and one of them was the users'."""
        content = dict(self.files)["e.csv"].encode()
        for start, end in ((5, 9), (16, 22)):
            content = content[:start] + content[end:]
        self.read_or_refuse(folder, "e.csv", content)
