"""`onefold cache` on a cache written here by hand, by the description of its format."""

from __future__ import annotations

import hashlib
import json
import os
import time

import pytest

from onefold import _core
from onefold._commands import cli
from processes import output_of, python

NUMBERS = ("registers", "spill_store_bytes", "spill_load_bytes", "local_bytes")
SPILLED = {"registers": 255, "spill_store_bytes": 8, "spill_load_bytes": 12, "local_bytes": 16}


def checksum(*parts: bytes) -> str:
    """SHA-256 of the parts, each after its length in eight bytes."""
    return hashlib.sha256(b"".join(len(p).to_bytes(8, "big") + p for p in parts)).hexdigest()


def write_entry(root, name, *, target="sm_90a", used=0, warnings=(), numbers=None, cubin=b"cubin"):
    """One folder of the cache, last used so many seconds ago."""
    digest = hashlib.sha256(f"{name} {target}".encode()).hexdigest()[:40]
    folder = root / f"{name}-{digest}-nvrtc13.2"
    folder.mkdir(parents=True)
    fields = {"name": name, "digest": digest, "nvrtc": "13.2", "entry": "k", "target": target}
    fields |= {"options": [f"--gpu-architecture={target}"]}
    fields |= numbers or dict.fromkeys(NUMBERS, 0)
    fields |= {"static_shared_bytes": 0, "compile_seconds": 0.5, "warnings": list(warnings)}
    body = "{\n" + "".join(f'  "{key}": {json.dumps(value)},\n' for key, value in fields.items())
    seal = f'  "checksum": "{checksum(b"source", cubin, body.encode())}"\n}}\n'
    (folder / "source.cu").write_bytes(b"source")
    (folder / "kernel.cubin").write_bytes(cubin)
    (folder / "facts.json").write_text(body + seal)
    then = time.time() - used
    os.utime(folder, (then, then))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ONEFOLD_CACHE_DIR", str(folder))
    return folder


def test_an_empty_cache_has_no_kernels(cache, capsys):
    assert cli.main(["cache", "list"]) == 0
    assert capsys.readouterr().out == f"0 kernels, 0.0 MiB in {cache}\n"


def test_list_shows_only_as_many_kernels_as_the_limit_and_counts_the_others(cache, capsys):
    for age, name in enumerate(("first", "second", "third")):
        write_entry(cache, name, used=60 * age)
    assert cli.main(["cache", "list", "--limit", "2"]) == 0
    _, first, second, more, total = capsys.readouterr().out.splitlines()
    assert (first.split()[0], second.split()[0]) == ("first", "second")
    assert more == "... and 1 more"
    assert total.startswith("3 kernels, ")
    assert cli.main(["cache", "list", "--limit", "3"]) == 0
    assert "more" not in capsys.readouterr().out
    assert cli.main(["cache", "list", "--limit", "0"]) == 2
    assert "--limit is 0: at least 1 is needed" in capsys.readouterr().err


def test_list_shows_each_kernel_the_last_used_first(cache, capsys):
    write_entry(cache, "old", used=3 * 86400, numbers=SPILLED)
    write_entry(cache, "new", target="sm_80", used=120, cubin=bytes(2**20))
    assert cli.main(["cache", "list"]) == 0
    header, new, old, total = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["kernel", "target", "NVRTC"]
    assert " ".join(new.split()) == "new sm_80 13.2 0 0 0.50 s 1024 2 min ago"
    assert " ".join(old.split()) == "old sm_90a 13.2 255 20 0.50 s 0 3 d ago"
    assert total == f"2 kernels, 1.0 MiB in {cache}"


def test_a_long_list_adds_folders_and_warnings(cache, capsys):
    folder = write_entry(cache, "noisy", warnings=["wgmma is serialized", 'a "quoted" one'])
    assert cli.main(["cache", "list", "--long"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[2:5] == [folder.name, "wgmma is serialized", 'a "quoted" one']


def test_export_copies_what_is_whole_and_can_be_read_as_a_further_folder(
    cache, tmp_path, monkeypatch, capsys
):
    write_entry(cache, "good")
    (write_entry(cache, "bad") / "source.cu").write_bytes(b"changed")
    target = tmp_path / "exported"
    assert cli.main(["cache", "export", str(target)]) == 0
    assert capsys.readouterr().out.startswith(f"1 new in {target}")
    assert [folder.name.split("-")[0] for folder in target.iterdir()] == ["good"]
    assert cli.main(["cache", "export", str(target)]) == 0
    assert capsys.readouterr().out.startswith("0 new")

    monkeypatch.setenv("ONEFOLD_CACHE_DIR", f"{cache}:{target}")
    assert cli.main(["cache", "list"]) == 0
    assert f"also read: {target}" in capsys.readouterr().out


def test_export_to_where_nothing_can_be_written_is_one_sentence(cache, tmp_path, capsys):
    write_entry(cache, "good")
    (tmp_path / "file").write_text("")
    assert cli.main(["cache", "export", str(tmp_path / "file" / "folder")]) == 2
    assert capsys.readouterr().err.startswith("onefold cache: cannot write to ")


def test_clear_deletes_the_kernels_and_nothing_else(cache, capsys):
    write_entry(cache, "one")
    write_entry(cache, "two")
    (cache / "precious").mkdir()
    assert cli.main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"2 deleted from {cache}\n"
    assert [path.name for path in cache.iterdir()] == ["precious"]


def test_without_a_folder_there_is_one_sentence(monkeypatch, capsys):
    for name in ("ONEFOLD_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["cache", "list"]) == 2
    assert capsys.readouterr().err.startswith("onefold cache: there is no cache on disk")


def test_an_action_is_needed(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["cache"])
    assert "ACTION" in capsys.readouterr().err


def test_info_names_the_compiler_that_pip_installed(cache, capsys):
    nvidia = pytest.importorskip("nvidia")
    if not any(os.path.isdir(f"{path}/cu13/lib") for path in nvidia.__path__):
        pytest.skip("nvidia-cuda-nvrtc for CUDA 13 is not installed")
    assert cli.main(["info"]) == 0
    line = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("compiler: ")
    )
    assert "NVRTC 13" in line and "libnvrtc.so.13" in line and str(cache) in line
    assert _core.compiler_info() in line


def test_folders_whose_names_are_no_text_work_and_are_shown_with_escapes(tmp_path):
    """Where a package lies, the cache, and where it is copied to."""
    odd = os.fsencode(tmp_path) + b"/\xff"
    os.makedirs(odd + b"/nvidia/cuda_nvrtc/lib")  # the import hands it to the core
    path = os.fsdecode(odd) + os.pathsep + os.environ.get("PYTHONPATH", "")
    code = """
        import os, sys
        sys.path.append(None)
        import onefold
        sys.path.pop()
        from onefold._commands import cli
        to = os.environ["ONEFOLD_CACHE_DIR"]
        for words in (["info"], ["cache", "list"], ["cache", "export", to + "2"]):
            assert cli.main(words) == 0
    """
    out = output_of(code, PYTHONPATH=path, ONEFOLD_CACHE_DIR=os.fsdecode(odd))
    assert f"kernel cache {tmp_path}/\\xff" in out
    assert f"0 kernels, 0.0 MiB in {tmp_path}/\\xff" in out
    assert f"0 new in {tmp_path}/\\udcff2" in out


def test_a_setting_that_is_no_text_is_told_with_escapes():
    done = python("import onefold; onefold.info()", ONEFOLD_BACKEND=os.fsdecode(b"\xff"))
    assert "ValueError: ONEFOLD_BACKEND is \\xff: this build" in done.stderr
