"""What a rendering read is remembered exactly: a hit without rendering depends on it."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cake_kda_jit import errors
from cake_kda_jit.codegen.render import render
from cake_kda_jit.compiler import rendering
from cake_kda_jit.compiler.build import build
from cake_kda_jit.compiler.memo import source_digest
from cake_kda_jit.record import make_params

from .test_build import run_tiny
from .tiny import HOST_ARCH, tiny_record

TEMPLATES = {"cpu/tiny.cpp.jinja", "host/args.jinja", "host/entry.jinja", "host/steps.hpp", "shared/gain.hpp"}


def test_threads_that_render_at_once_do_not_mix_their_lists(data):
    """A list that misses an include would call an entry current after that include has changed."""
    records = [tiny_record(params=make_params(gain=gain)) for gain in range(60)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda record: rendering.render_for_build(record, HOST_ARCH), records))
    finally:
        sys.setswitchinterval(interval)
    for record, (source, inputs) in zip(records, found):
        assert set(inputs["templates"]) == TEMPLATES
        assert inputs["source_digest"] == source.digest == render(record, HOST_ARCH).digest


@pytest.fixture
def edit_after_rendering(data, monkeypatch):
    """Edit the include after a rendering has read it and before its digest is taken, once for each given text."""
    header = data / "templates" / "shared" / "gain.hpp"
    texts = []

    def render_then_edit(record, arch):
        source = render(record, arch)
        if texts:
            header.write_text(texts.pop(0))
        return source

    monkeypatch.setattr(rendering, "render", render_then_edit)
    return texts


def test_template_edited_while_it_is_read_is_read_again(edit_after_rendering):
    edit_after_rendering.append("constexpr float kGain = 3;\n")
    source, inputs = rendering.render_for_build(tiny_record(), HOST_ARCH)
    assert "kGain = 3" in source.text and rendering.is_current(inputs)
    assert inputs["source_digest"] == render(tiny_record(), HOST_ARCH).digest


def test_build_during_an_edit_never_serves_the_old_text_later(data, edit_after_rendering):
    edit_after_rendering.append("constexpr float kGain = 3;\n")
    first = build(tiny_record(), HOST_ARCH)
    again = build(tiny_record(), HOST_ARCH)
    assert (again.origin, again.source_key) == ("cache", first.source_key)
    assert run_tiny(again.library, 1.0) == [3.0, 6.0, 9.0]
    assert source_digest(tiny_record(), HOST_ARCH) == render(tiny_record(), HOST_ARCH).digest


def test_templates_that_never_hold_still_are_told(edit_after_rendering):
    edit_after_rendering += [f"constexpr float kGain = {number};\n" for number in range(20)]
    with pytest.raises(errors.RenderError, match="cpu/tiny__fp32 change while they are read"):
        rendering.render_for_build(tiny_record(), HOST_ARCH)


def test_fork_while_another_thread_renders(data, monkeypatch):
    from .forked import Forked

    begun, go = threading.Event(), threading.Event()

    def slow(record, arch):
        begun.set()
        go.wait(10)
        return render(record, arch)

    monkeypatch.setattr(rendering, "render", slow)
    thread = threading.Thread(target=rendering.render_for_build, args=(tiny_record(), HOST_ARCH))
    thread.start()
    begun.wait(10)

    def child():
        rendering.render = render
        return rendering.render_for_build(tiny_record(), HOST_ARCH)[0].digest

    assert Forked(child).result(timeout=5)["value"] == render(tiny_record(), HOST_ARCH).digest
    go.set()
    thread.join()
