"""Values of items in a shop's export of which some contradict the others, with what is right."""

from __future__ import annotations

import json

import pytest


def described(values, name="price", quote=True) -> str:
    texts = [f'"{v}"' if quote else str(v) for v in values]
    rows = [f"p{n},Thing {n},{text}" for n, text in enumerate(texts)]
    return "\n".join([f"item,title,{name}", *rows]) + "\n"


# Prices are read in the form of their column.


@pytest.mark.parametrize(
    ("texts", "right"),
    [
        (["1.299 €", "2.050 €", "899 €", "49 €"], [1299, 2050, 899, 49]),
        (["1.299", "2.050", "899", "49"], [1299, 2050, 899, 49]),
        (["1.299,00 €", "12,50 €", "899 €", "1.049 €"], [1299, 12.5, 899, 1049]),
        (["1,299 $", "2,050 $", "899 $", "49 $"], [1299, 2050, 899, 49]),
        (["$1,299.00", "$12.50", "$1,050", "$49"], [1299, 12.5, 1050, 49]),
        (["CHF1'299.50", "12.50CHF", "49.–", "Fr. 5.-"], [1299.5, 12.5, 49, 5]),
        (["₹1,29,900.50", "Rs. 1,250", "INR1,100", "₹49/-"], [129900.5, 1250, 1100, 49]),
        (["CHF 1'299.50", "CHF 12.00", "CHF 49", "CHF 1'000"], [1299.5, 12, 49, 1000]),
        (["1 299,90 zł", "12,50 zł", "49 zł", "1\u00a0000 zł"], [1299.9, 12.5, 49, 1000]),
        (["1.234.567 €", "2.000 €", "3 €", "4 €"], [1234567, 2000, 3, 4]),
        (["0.299", "1.315", "1.299", "1.402"], [0.299, 1.315, 1.299, 1.402]),
        (["12.50", "1.299", "3.1", "4"], [12.5, 1.299, 3.1, 4]),
        (["12.500 KWD", "1.299 KWD", "3.100 KWD", "4.000 KWD"], [12.5, 1.299, 3.1, 4]),
    ],
    ids=lambda values: str(values[0]),
)
def test_prices_are_read_in_the_form_of_their_column(shop, texts, right):
    assert shop(items=described(texts)).values("price") == right


@pytest.mark.parametrize("mark", [".", ","])
def test_prices_with_nothing_but_a_mark_before_three_digits(shop, mark):
    texts = [f"{n}{mark}299" for n in range(1, 5)]
    found = shop(items=described(texts, "Preis (EUR)"))
    assert found.values("Preis (EUR)") == [1299, 2299, 3299, 4299]
    assert found.counts["prices_of_thousands"] == 4
    if mark == ".":
        plain = shop(items=described(texts, "Preis (EUR)"), clean={"skip": ["prices"]})
        assert plain.values("Preis (EUR)") == [1.299, 2.299, 3.299, 4.299]
        assert "prices_of_thousands" not in plain.counts


def test_a_column_of_numbers_with_commas_stays_text(shop):
    found = shop(items=described(["12,5", "3,25", "1,0", "2,75"], "weight"))
    assert found.values("weight") == ["12,5", "3,25", "1,0", "2,75"]


def test_numbers_of_json_are_prices_as_they_are(shop):
    items = [{"item": f"p{n}", "title": f"T{n}", "price": p}
             for n, p in enumerate([1.299, 2.05, 899, 49])]  # fmt: skip
    text = "".join(json.dumps(i) + "\n" for i in items)
    assert shop(items=text, items_file="i.jsonl").values("price") == [1.299, 2.05, 899, 49]
    text = text.replace("1.299", "Infinity").replace("899", "NaN")
    assert shop(items=text, items_file="i.jsonl").values("price") == [None, 2.05, None, 49]


def test_a_price_that_may_be_read_in_two_ways_is_missing(shop):
    """Some prices have a decimal point and others a decimal comma, so 1.299 has no one reading."""
    texts = ["12.50 €", "12,50 €", "1.299 €", *(f"{n},99 €" for n in range(20))]
    found = shop(items=described(texts))
    assert found.values("price")[:4] == [12.5, 12.5, None, 0.99]
    assert found.counts["values_not_read"] == 1


# One bad value costs one value.


@pytest.mark.parametrize(
    "bad", ["N/A", "-", "n/a", "TBD", "on request", "inf", "—", "auf Anfrage", "?", "#N/A", "NaN",
            "call us", "1.2.3"],
)  # fmt: skip
def test_one_bad_price_is_one_missing_price(shop, bad):
    texts = [f"{n}.5" for n in range(39)]
    found = shop(items=described([*texts[:7], bad, *texts[7:]]))
    right = [n + 0.5 for n in range(39)]
    assert found.values("price") == [*right[:7], None, *right[7:]]
    if bad != "NaN":
        assert found.counts["values_not_read"] == 1
        finding = next(
            f for f in found.info["cleaning"]["findings"] if f["rule"] == "values_not_read"
        )
        assert f"price: {bad}" in finding["examples"]


def test_a_code_among_numbers_is_not_lost(shop):
    codes = [*(str(1804429570 + n) for n in range(40)), "080442957X", "180442957X"]
    assert shop(items=described(codes, "isbn_of_print")).values("isbn_of_print") == codes
    assert shop(items=described(codes[:40] + codes[41:], "code")).values("code")[-1] == codes[-1]


# Categories.


@pytest.mark.parametrize("nothing", ["N/A", "n/a", "#N/A", "n.a.", "-", "—", "NULL", "NA"])
def test_a_category_that_says_nothing_is_missing(shop, nothing):
    found = shop(items=described([nothing, "tea", "coffee", nothing], "category"))
    assert found.values("category") == [None, "tea", "coffee", None]
    assert "category_top" not in found.data.items.column_names


def test_paths_beside_missing_categories_are_paths(shop):
    found = shop(items=described(["N/A", "Home / Kitchen", "Home / Garden", "n/a"], "category"))
    assert found.values("category") == [None, ["Home", "Kitchen"], ["Home", "Garden"], None]
    assert found.values("category_top") == [None, "Home", "Home", None]


def test_lists_of_category_paths_are_their_paths(shop):
    texts = ["Drinks > Tea, Sale", "Drinks > Tea", "Drinks > Coffee", "Drinks > Coffee, Sale"]
    found = shop(items=described(texts, "Categories"))
    assert found.values("Categories") == [
        ["Drinks", "Drinks > Tea", "Sale"], ["Drinks", "Drinks > Tea"],
        ["Drinks", "Drinks > Coffee"], ["Drinks", "Drinks > Coffee", "Sale"],
    ]  # fmt: skip
    assert found.values("Categories_top") == ["Drinks"] * 4


@pytest.mark.parametrize(
    ("texts", "right"),
    [
        (["Drinks, Drinks > Tea", "Food > Nuts > Salted, Sale", "Sale", "Drinks"],
         [["Drinks", "Drinks > Tea"],
          ["Food", "Food > Nuts", "Food > Nuts > Salted", "Sale"], ["Sale"], ["Drinks"]]),
        (["Food\\, Drinks > Tea, Sale", "Sale", "Food\\, Drinks", "Sale"],
         [["Food, Drinks", "Food, Drinks > Tea", "Sale"], ["Sale"], ["Food, Drinks"], ["Sale"]]),
    ],
    ids=["parents", "escaped"],
)  # fmt: skip
def test_forms_of_lists_of_category_paths(shop, texts, right):
    assert shop(items=described(texts, "Categories")).values("Categories") == right


def test_commas_in_the_names_of_categories_stay(shop):
    texts = ["Food, Beverages & Tobacco > Beverages > Tea", "Food, Beverages & Tobacco > Nuts",
             "Home & Garden > Linens, Bedding", "Home & Garden"]  # fmt: skip
    found = shop(items=described(texts, "google_product_category"))
    assert found.values("google_product_category")[0] == [
        "Food, Beverages & Tobacco", "Beverages", "Tea",
    ]  # fmt: skip
    assert found.values("google_product_category_top")[2] == "Home & Garden"
