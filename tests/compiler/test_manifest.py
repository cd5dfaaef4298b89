"""The manifests in the repository are what the registry and the templates say."""

from __future__ import annotations

import json

from cake_kda_jit.catalog import registry
from cake_kda_jit.compiler import manifest
from cake_kda_jit.paths import manifest_path


def test_manifests_are_current():
    outdated = [path.name for path in manifest.outdated_manifests()]
    assert not outdated, "run `python -m cake_kda_jit manifest --write` and commit what it changes"


def test_manifests_name_every_record_once():
    for shipped, records in ((True, registry().shipped()), (False, registry().test_only())):
        content = json.loads(manifest_path(shipped=shipped).read_text(encoding="utf-8"))
        assert (content["schema"], content["shipped"]) == (1, shipped)
        assert manifest.read_manifest(manifest_path(shipped=shipped)) == list(records)
        for row in content["records"]:
            assert set(row) == {"program", "variant", "family", "params", "build_keywords", "targets"}
            assert all(len(digest) == 64 for digest in row["targets"].values())
