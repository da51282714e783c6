import json

from benchmarks import report
from benchmarks.page import PAGE, page


def test_the_page_is_what_the_committed_result_says():
    assert PAGE.read_text() == page(json.loads((report.RESULTS / "queue.json").read_text()))
