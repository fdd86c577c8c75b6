"""The program cache on disk: what it returns is what was put, and it is never in the way."""

from __future__ import annotations

import errno
import logging
import os
import pwd
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nxrt_cuda.program_cache import ProgramCache, program_key

KEY = program_key([b"a program"])
OTHER = program_key([b"another program"])
PAYLOAD = bytes(range(256)) * 40


@pytest.fixture
def cache(tmp_path: Path) -> ProgramCache:
    return ProgramCache(tmp_path / "cache")


def entry(cache: ProgramCache, key: str = KEY) -> Path:
    (path,) = cache.directory.glob(f"{key}*")
    return path


def test_a_program_comes_back_as_it_was_put(cache: ProgramCache) -> None:
    """Another process, here another instance, finds what was kept; an unknown key finds nothing."""
    assert cache.get(KEY) is None
    cache.put(KEY, PAYLOAD)
    assert ProgramCache(cache.directory).get(KEY) == PAYLOAD
    assert cache.get(OTHER) is None
    assert cache.damaged == 0


def test_the_cache_is_private(cache: ProgramCache) -> None:
    """The directory is the user's alone, and so is each entry, whatever the umask."""
    mask = os.umask(0)
    try:
        cache.put(KEY, PAYLOAD)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry(cache).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:10], id="cut in the magic"),
        pytest.param(lambda data: data[:40], id="cut in the digest"),
        pytest.param(lambda data: data[:-1], id="cut by a byte"),
        pytest.param(lambda data: data + b"\0", id="a byte too many"),
        pytest.param(lambda data: bytes([data[0] ^ 1]) + data[1:], id="bit of the magic"),
        pytest.param(lambda data: data[:25] + bytes([data[25] ^ 1]) + data[26:], id="bit of the length"),
        pytest.param(lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], id="bit of the digest"),
        pytest.param(lambda data: data[:-1] + bytes([data[-1] ^ 128]), id="bit of the payload"),
        pytest.param(lambda data: b"\x7fELF" + bytes(5000), id="a bare CUBIN"),
    ],
)
def test_a_damaged_entry_is_a_counted_miss(cache: ProgramCache, damage: Callable[[bytes], bytes]) -> None:
    """It is never returned, it is removed, and the next program takes its place."""
    cache.put(KEY, PAYLOAD)
    path = entry(cache)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get(KEY) is None
    assert cache.damaged == 1
    assert not path.exists()
    cache.put(KEY, PAYLOAD)
    assert cache.get(KEY) == PAYLOAD


def test_an_entry_under_another_key_is_damaged(cache: ProgramCache) -> None:
    """A file that was renamed holds a whole program, and not the one that was asked for."""
    cache.put(KEY, PAYLOAD)
    path = entry(cache)
    path.rename(path.with_name(path.name.replace(KEY, OTHER)))
    assert cache.get(OTHER) is None
    assert cache.damaged == 1


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """Beyond the bound, entries leave in the order of their last use."""
    room_for_two = 2 * (len(PAYLOAD) + 100)
    cache = ProgramCache(tmp_path, room_for_two)
    tmp_path.chmod(0o700)
    keys = [program_key([bytes([i])]) for i in range(3)]
    for age, key in zip((300, 200), keys, strict=False):
        cache.put(key, PAYLOAD)
        os.utime(entry(cache, key), (time.time() - age,) * 2)
    assert cache.get(keys[0]) == PAYLOAD  # now the younger one
    cache.put(keys[2], PAYLOAD)
    assert cache.get(keys[1]) is None
    assert cache.get(keys[0]) == cache.get(keys[2]) == PAYLOAD


def test_a_program_larger_than_the_bound_is_not_kept(tmp_path: Path) -> None:
    """Nor does it push the others out."""
    cache = ProgramCache(tmp_path / "cache", 1000)
    cache.put(KEY, b"small")
    cache.put(OTHER, PAYLOAD)
    assert cache.get(OTHER) is None
    assert cache.get(KEY) == b"small"


def test_partial_files_of_dead_processes_are_removed(cache: ProgramCache) -> None:
    """One that another process may still be writing is left alone."""
    cache.put(KEY, PAYLOAD)
    old, young = cache.directory / "old.tmp", cache.directory / "young.tmp"
    for path, age in ((old, 7200), (young, 60)):
        path.write_bytes(b"half an entry")
        os.utime(path, (time.time() - age,) * 2)
    cache.put(OTHER, PAYLOAD)
    assert not old.exists()
    assert young.exists()


def test_readers_and_writers_of_one_key_never_see_a_part_of_it(cache: ProgramCache) -> None:
    """A reader gets all of an entry or nothing, while others write the same key."""
    whole = {text * 20000 for text in (b"A", b"B", b"C")}
    stop = threading.Event()
    seen: set[bytes | None] = set()
    reads: list[int] = []

    def write(payload: bytes) -> None:
        while not stop.is_set():
            cache.put(KEY, payload)

    def read() -> None:
        while not stop.is_set():
            payload = cache.get(KEY)
            seen.add(payload)
            reads.append(len(payload or b""))

    threads = [threading.Thread(target=write, args=(payload,)) for payload in whole]
    threads += [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while (len(reads) < 300 or not whole <= seen) and time.monotonic() < deadline:
        time.sleep(0.01)
    stop.set()
    for thread in threads:
        thread.join()
    assert seen - {None} == whole
    assert cache.damaged == 0
    assert not list(cache.directory.glob("*.tmp"))


# Where the cache cannot be used.


def refuse(code: int) -> Callable[..., None]:
    def call(*arguments: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


def use_twice(cache: ProgramCache, caplog: pytest.LogCaptureFixture) -> str:
    """Two rounds of use, which must do nothing; returns the one warning that they may log."""
    with caplog.at_level(logging.WARNING, "nxrt_cuda"):
        for _ in range(2):
            assert cache.get(KEY) is None
            cache.put(KEY, PAYLOAD)
    (record,) = caplog.records
    return record.getMessage()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
def test_an_unwritable_directory_costs_one_warning(
    cache: ProgramCache, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read-only home, a full disk and a spent quota are no errors."""
    monkeypatch.setattr(tempfile, "mkstemp", refuse(code))
    message = use_twice(cache, caplog)
    assert os.strerror(code) in message
    assert str(cache.directory) in message


def test_programs_in_a_read_only_directory_are_found(
    cache: ProgramCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container image that was filled when it was built: only the time of last use cannot be noted."""
    cache.put(KEY, PAYLOAD)
    monkeypatch.setattr(os, "utime", refuse(errno.EROFS))
    assert cache.get(KEY) == PAYLOAD
    assert not caplog.records


def test_running_out_of_space_leaves_no_partial_file(
    cache: ProgramCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was written before the disk was full is removed again."""
    monkeypatch.setattr(os, "replace", refuse(errno.ENOSPC))
    assert os.strerror(errno.ENOSPC) in use_twice(cache, caplog)
    assert list(cache.directory.iterdir()) == []


def test_a_directory_that_cannot_be_made_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file stands where a directory should."""
    (tmp_path / "file").write_text("in the way")
    assert "cannot be used" in use_twice(ProgramCache(tmp_path / "file" / "cache"), caplog)


def test_an_entry_of_another_user_is_a_miss(
    cache: ProgramCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that cannot be read costs one warning, and is replaced by the new program where possible."""
    cache.put(KEY, PAYLOAD)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse(errno.EACCES))
        assert os.strerror(errno.EACCES) in use_twice(cache, caplog)
    assert cache.get(KEY) == PAYLOAD


def test_a_directory_that_others_may_write_is_not_trusted(
    cache: ProgramCache, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else could put code there for us to run."""
    cache.put(KEY, PAYLOAD)
    cache.directory.chmod(0o770)
    assert "must be yours, with mode 0700" in use_twice(cache, caplog)


# What the environment says.


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("NXRT_CUDA_CACHE", "NXRT_CUDA_CACHE_DIR", "NXRT_CUDA_CACHE_BYTES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_directory_is_the_environments(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NXRT_CUDA_CACHE_DIR, then XDG_CACHE_HOME if absolute, then the home directory."""
    clean.setenv("HOME", str(tmp_path / "home"))
    assert ProgramCache.from_environment().directory == tmp_path / "home/.cache/nxrt_cuda"
    clean.setenv("XDG_CACHE_HOME", "relative")
    assert ProgramCache.from_environment().directory == tmp_path / "home/.cache/nxrt_cuda"
    clean.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ProgramCache.from_environment().directory == tmp_path / "xdg/nxrt_cuda"
    clean.setenv("NXRT_CUDA_CACHE_DIR", str(tmp_path / "mine"))
    assert ProgramCache.from_environment().directory == tmp_path / "mine"
    clean.setenv("NXRT_CUDA_CACHE_DIR", "~/mine")  # as a service manager or a container file leaves it
    assert ProgramCache.from_environment().directory == tmp_path / "home/mine"
    assert not list(tmp_path.iterdir())  # asking makes nothing


def test_without_home_the_users_own_is_taken(clean: pytest.MonkeyPatch) -> None:
    """HOME may be unset, as under a service manager; the user database knows."""
    clean.delenv("HOME", raising=False)
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert ProgramCache.from_environment().directory == Path(home, ".cache/nxrt_cuda")


def test_a_user_without_any_home_has_no_cache(clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As in a container that runs under a bare user id: one warning that says what to set."""
    clean.delenv("HOME", raising=False)
    clean.setattr(pwd, "getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(uid)))
    assert ProgramCache.from_environment() is None
    (record,) = caplog.records
    assert "NXRT_CUDA_CACHE_DIR" in record.getMessage()


def test_the_cache_can_be_turned_off_and_bounded(clean: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """NXRT_CUDA_CACHE=0 and NXRT_CUDA_CACHE_BYTES; a bound that is no number is said and ignored."""
    assert ProgramCache.from_environment().max_bytes == 512 * 2**20
    clean.setenv("NXRT_CUDA_CACHE_BYTES", "1000")
    assert ProgramCache.from_environment().max_bytes == 1000
    assert not caplog.records
    clean.setenv("NXRT_CUDA_CACHE_BYTES", "1 GB")
    assert ProgramCache.from_environment().max_bytes == 512 * 2**20
    assert "NXRT_CUDA_CACHE_BYTES=1 GB" in caplog.records[0].getMessage()
    clean.setenv("NXRT_CUDA_CACHE", "0")
    assert ProgramCache.from_environment() is None


# Keys.


def test_a_key_says_where_each_part_ends() -> None:
    """The same bytes, cut or ordered otherwise, are another program."""
    keys = {
        program_key(parts)
        for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"", b"abc"], [b"abc", b""], [b"c", b"ab"], [])
    }
    assert len(keys) == 7
