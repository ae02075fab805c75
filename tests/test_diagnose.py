"""python -m needle.diagnose as the shell meets it."""

import pytest

from needle import diagnose


def test_help(capsys):
    with pytest.raises(SystemExit) as caught:
        diagnose.main(["--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0 and "multiplies two matrices" in out and "device" in out


@pytest.mark.parametrize("word", ["--verbose", "cuda", "-x"])
def test_what_it_does_not_know_is_refused(capsys, word):
    with pytest.raises(SystemExit) as caught:
        diagnose.main([word])
    out, error = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and f"unrecognized arguments: {word}" in error


def test_the_facts(capsys):
    assert diagnose.main([]) == 0
    assert "matmul is" in capsys.readouterr().out
