"""Publication years inferred from raw texts: the most reliable sign wins."""

from collections import Counter

import pytest

from compressive.data.pg19.infer import infer, roman, split_of

HEADER = "Title: A Long\n       Title\n\nAuthor: Some One\n\nLanguage: English\n"


@pytest.mark.parametrize(
    ("header", "pages", "year", "sign"),
    [
        (HEADER, "X\r\n\r\n1911\r\n\r\n_Copyright, 1909, 1910, by Y_\r\n", 1910, "copyright"),
        (HEADER, "Published October, 1899\n\n1902\n", 1899, "copyright"),
        (HEADER, "Entered according to Act of Congress, in\nthe year 1863, by Z\n\n1864\n", 1863, "copyright"),
        (HEADER, "It was published at great cost, and read in places by 1620.\n\nA. D. 1895.\n", 1895, "title page"),
        (HEADER, "LONDON\n\n  MDCCCXCVI.\n\n1700\n", 1896, "title page"),
        (HEADER, "M.DCCC.II.\n", 1802, "title page"),
        (HEADER, "PRESTON. 1869.\n\nSome prose that ends its line in a year, and goes on after 1620\nlike this.\n", 1869, "end of a line"),  # noqa: E501
        ("Title: The Strand, January 1894\n", "LONDON, 1900.\n\n", 1894, "title"),
        ("Title: A\nAuthor: Charles Dickens, 1812-1870\n", "no year", 1852, "author's life"),
        ("Title: A\nAuthor: John Keats (1795–1821)\n", "no year", 1821, "author's life"),
        (HEADER, "In the year 1620 it cost 1,895 pounds, $1900 or £1750. " + "x" * 6000 + "\n1899\n", None, "nothing"),
        ("", "", None, "nothing"),
    ],
)  # fmt: skip
def test_the_year(header, pages, year, sign):
    told = infer(header, pages)
    assert (told.year, told.year_from) == (year, sign)


def test_title_and_language_are_read_from_the_header():
    told = infer(HEADER, "")
    assert (told.title, told.language) == ("A Long Title by Some One", "English")
    assert infer("Title: Only\r\nLanguage: French\r\n", "").title == "Only"
    assert infer("Title: Only\r\nLanguage: French\r\n", "").language == "French"
    assert infer("", "").language == ""
    assert infer("", "Title: No START line\r\nLanguage: German\r\n").language == "German"


@pytest.mark.parametrize(
    ("numeral", "number"), [("MDCCCXCVI", 1896), ("MDCCCCX", 1910), ("MCMXVIII", 1918), ("MM", 2000)]
)
def test_roman_numerals(numeral, number):
    assert roman(numeral) == number


def test_splits_depend_on_the_id_alone_and_are_small():
    splits = Counter(split_of(book_id) for book_id in range(20_000))
    assert splits["train"] > 19_500
    assert 150 < splits["validation"] < 250
    assert 150 < splits["test"] < 250
    assert [split_of(book_id) for book_id in (860, 225, 99)] == ["train", "validation", "test"]
