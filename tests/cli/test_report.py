"""``report`` writes one HTML file about a run, and ``--json`` prints what it would show."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser

from resume_adapters.core.run_directory.control import ControlDirectory
from resume_adapters.core.storage.local import LocalStorage


class Page(HTMLParser):
    """The text of a page, its tags, and what it would load."""

    def __init__(self, text):
        super().__init__()
        self.words, self.tags, self.loads = "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        self.words += data


def test_the_page_says_what_became_of_the_run_and_loads_nothing(command, run_dir, tmp_path):
    done = command("report", run_dir, "-o", tmp_path / "page.html")
    assert done.code == 0 and "of the wall time ended in steps that are kept" in done.out
    page = Page((tmp_path / "page.html").read_text())
    for words in ("finished, step 30 of 30; 1 launches", "checkpoint-20", "3 checkpoints were committed", "eval_loss"):
        assert words in page.words
    assert page.tags.count("polyline") == 1 and not page.loads and "script" not in page.tags
    assert re.search(
        r"<polyline points=\"0\.0,10\.0 500\.0,290\.0 1000\.0,150\.0\"", (tmp_path / "page.html").read_text()
    )


def test_the_document_has_launches_goodput_and_what_was_removed(command, run_dir):
    command("prune", run_dir, "--keep-last", "1")
    found = command("report", run_dir, "--json").json
    assert [(each["how"], each["kept"]) for each in found["launches"]] == [("finished", 30)]
    assert found["goodput"]["share"] == command("status", run_dir, "--json").json["goodput"]
    assert [each["name"] for each in found["kept"]] == ["checkpoint-30"]
    assert [each["checkpoint"] for each in found["removed"]] == ["checkpoint-10", "checkpoint-20"]
    assert found["saves"]["count"] == 3 and found["curves"]["eval_loss"] == [[30, 2.0]]


def test_the_losses_are_those_that_the_trainer_has_logged(command, run_dir):
    logged = [{"step": 5, "loss": 2.0}, {"step": 10, "loss": float("nan")}, {"step": 10, "eval_loss": 1.5}, {}]
    (run_dir / "checkpoint-30" / "trainer_state.json").write_text(json.dumps({"log_history": logged}))
    assert command("report", run_dir, "--json").json["curves"] == {"loss": [[5, 2.0]], "eval_loss": [[10, 1.5]]}


def test_what_a_run_directory_holds_is_text(command, run_dir, tmp_path):
    journal = ControlDirectory(LocalStorage(), run_dir, time.time).journal
    journal.append("failed", step=30, generation=1, reason="<script>alert('$title')</script>")
    journal.append("prune", checkpoint="<img src=x>", reason="& so on")
    command("report", run_dir, "-o", tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert not {"script", "img"} & set(page.tags) and "<script>alert('$title')</script>" in page.words


def test_no_file_is_overwritten(command, run_dir, tmp_path):
    (tmp_path / "page.html").write_text("mine")
    done = command("report", run_dir, "-o", tmp_path / "page.html")
    assert (done.code, (tmp_path / "page.html").read_text()) == (2, "mine") and "exists" in done.err
