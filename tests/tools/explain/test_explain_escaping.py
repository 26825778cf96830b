"""The page of --mode=explain with names that would run in a browser, looked at without one.

tests/tools/explain/test_explain_page.py shows the same page in a browser, where one is installed.
"""

import json
import re
from importlib import resources

import jax
from jax.sharding import PartitionSpec as P

from praxis_lite.core import StateLayout
from praxis_tools.explain.explain_page import page

HOSTILE = "</script><script>document.title=7</script><!--<img src=x onerror=a>{{title}}{{document}}"


def test_names_stay_text_in_the_page(mesh_of):
    layout = StateLayout(
        shapes={HOSTILE: jax.ShapeDtypeStruct((7,), "float32")},
        specs={HOSTILE: P("data")},
        axis_sizes={"replica": 1, "data": 4, "mdl": 2},
        notes=(HOSTILE,),
        declared_by={HOSTILE: HOSTILE},
    )
    text = page(HOSTILE, mesh_of(1, 4, 2), layout, [HOSTILE], [])
    folder = resources.files("praxis_tools.explain")
    template = (folder / "explain_page.html").read_text("utf-8")
    for tag in ("<script", "</script", "<img", "<!--"):
        assert text.count(tag) == template.count(tag), tag
    (actual,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    document = json.loads(actual)
    assert document["title"] == document["leaves"][0]["by"] == document["warnings"][0] == HOSTILE
    # What draws makes text nodes only, and a policy forbids what is not in the page.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", template)
    assert "Content-Security-Policy" in template
