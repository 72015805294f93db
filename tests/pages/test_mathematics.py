# ruff: noqa: E501  (payloads and programs in strings are read whole)
from xml.etree import ElementTree

import pytest

from postil.pages.mathematics import MathError, set_formula


@pytest.mark.parametrize(
    "tex", ["", " ", r"\frac{a", r"\nosuch x", "a_b_c", r"x \tag{1} \tag{2}", r"\href{javascript:x}{y}"]
)
def test_bad_tex_is_loud(tex):
    with pytest.raises(MathError):
        set_formula(tex, True)


def test_the_number_stands_outside_the_formula():
    formula = set_formula(r"a = b \tag{3}", True)
    assert formula.tag == "3" and "3" not in formula.mathml


@pytest.mark.parametrize(
    "tex",
    [r"\begin{align} a &= b \\ c &= d \end{align}", r"\begin{cases} 1 & x > 0 \\ 0 & \text{else} \end{cases}", r"\color{red}{x}",
     r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\operatorname{softmax}\left(\frac{QK^\top}{\sqrt{E}}\right)V", r"\sum_{s=1}^{t} f'(x)''"],
)  # fmt: skip
def test_output_is_well_formed_and_has_no_style(tex):
    mathml = set_formula(tex, True).mathml
    assert " style=" not in mathml
    root = ElementTree.fromstring(mathml.replace("&ApplyFunction;", "\u2061"))
    assert root.attrib["alttext"].replace("align*", "align") == tex


@pytest.mark.parametrize("tex", ["<img src=x onerror=alert(1)>", 'a"b', "a & b < c"])
def test_markup_in_tex_is_text(tex):
    try:
        mathml = set_formula(tex, False).mathml
    except MathError:
        return
    assert "<img" not in mathml
    ElementTree.fromstring(mathml)
