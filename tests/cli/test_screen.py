"""Standard output is a command's own."""

import ctypes

import pytest

from ctxflow.cli.screen import native_output_aside


def test_what_native_code_prints_goes_to_standard_error(capfd):
    native = ctypes.CDLL(None)
    with native_output_aside():
        native.puts(b"solver's words")
    print("ours")
    said = capfd.readouterr()
    assert (said.out, said.err) == ("ours\n", "solver's words\n")


def test_standard_output_is_back_after_an_error(capfd):
    with pytest.raises(ValueError, match="wrong"), native_output_aside():
        raise ValueError("wrong")
    ctypes.CDLL(None).puts(b"later")
    ctypes.CDLL(None).fflush(None)
    assert capfd.readouterr().out == "later\n"
