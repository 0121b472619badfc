"""What building a context is sure to import is found in its recipe."""

import numpy

from ctxflow import context
from ctxflow.models import encoder
from ctxflow.preloading import preloaded


@context
def sure(given):
    import json.decoder

    with open(given) as file:
        import zlib
    if given:
        import bz2
    return json, zlib, bz2, file


@context
def refers():
    return numpy.zeros(2)


def test_what_comes_before_a_branch_is_sure():
    assert preloaded(sure("x")) == ["json.decoder", "zlib"]


def test_packages_that_the_code_refers_to_are_sure():
    assert preloaded(refers()) == ["numpy"]


def test_what_is_named_comes_first_and_inner_recipes_count():
    @context(preload=["wave"])
    def outer(inner):
        return inner

    assert preloaded(outer(refers())) == ["wave", "numpy"]
    assert preloaded(outer(refers.options(preload=False)())) is None
    assert preloaded(outer.options(preload=False)(1)) is None


def test_ready_made_contexts_name_theirs():
    assert "ctxflow.models.encode" in preloaded(encoder("x"))


def test_it_is_no_part_of_what_identifies_a_context():
    assert refers().id == refers.options(preload=["wave"])().id == refers.options(preload=False)().id
