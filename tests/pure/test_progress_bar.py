"""A bar comes for what takes long, on terminals; elsewhere a line now and then."""

import io
import sys
import threading

import pytest

from tfdp import progress_bar as module
from tfdp.progress_bar import progress_bar


class Terminal(io.StringIO):
    """Knows when something was drawn."""

    def __init__(self):
        super().__init__()
        self.drawn = threading.Event()

    def isatty(self):
        return True

    def write(self, text):
        if "counting" in text:
            self.drawn.set()
        return super().write(text)


def make_terminal(monkeypatch):
    """Within the test: pytest puts its own in the place of what a fixture sets."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    return sys.stderr


def test_nothing_is_shown_of_what_is_quick(monkeypatch):
    terminal = make_terminal(monkeypatch)
    with progress_bar("counting", 2) as advance:
        advance(1)
    assert "counting" not in terminal.getvalue()


@pytest.mark.parametrize("total", [2, 0])
def test_a_bar_comes_for_what_is_not_though_nothing_advances(monkeypatch, total):
    terminal = make_terminal(monkeypatch)
    monkeypatch.setattr(module, "DELAY_SECONDS", 0.0)
    with progress_bar("counting", total):
        assert terminal.drawn.wait(60)


def test_it_goes_when_an_error_comes(monkeypatch):
    terminal = make_terminal(monkeypatch)
    monkeypatch.setattr(module, "DELAY_SECONDS", 0.0)
    with pytest.raises(KeyError), progress_bar("counting", 2):
        assert terminal.drawn.wait(60)
        raise KeyError
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")  # the line is empty
    assert "\x1b[?25h" in terminal.getvalue()  # and the cursor is back


def test_a_log_gets_lines(capsys, monkeypatch):
    with progress_bar("counting", 4) as advance:
        advance(1)
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    with progress_bar("counting", 4) as advance:
        advance(1)
        advance(1)
    assert capsys.readouterr().err == "tfdp: counting: 25%\ntfdp: counting: 50%\n"
