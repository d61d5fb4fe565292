"""Readers of store files: each kind reads the same bytes, and says what it cannot read."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading

import pytest
from foregate.collect.errors import SettingError, TransferError
from foregate.runtime import readers
from foregate.runtime.readers import READERS, FailingReader, Reader, open_reader

PAGE = 4096


@pytest.fixture
def files(tmp_path):
    paths = []
    for index in range(2):
        path = tmp_path / f"file-{index}.bin"
        path.write_bytes(os.urandom(16 * PAGE))
        paths.append(path)
    return paths


@pytest.fixture
def target():
    with mmap.mmap(-1, 8 * PAGE) as memory, memoryview(memory) as view:
        yield view


def available(kind, files):
    try:
        return open_reader(files, kind)
    except SettingError as error:
        pytest.skip(f"{kind} does not work here: {error}")


@pytest.mark.parametrize("kind", sorted(READERS))
def test_every_kind_reads_the_bytes(kind, files, target):
    reader = available(kind, files)
    assert isinstance(reader, Reader)
    assert reader.kind == kind
    assert reader.reason
    for index, path in enumerate(files):
        for page, count in [(0, 1), (3, 8), (15, 1)]:
            part = target[: count * PAGE]
            reader.read_into(index, page * PAGE, part)
            assert part == path.read_bytes()[page * PAGE : (page + count) * PAGE]
    reader.close()
    reader.close()


@pytest.mark.parametrize("kind", sorted(READERS))
def test_the_end_of_a_file_is_an_error_with_file_and_offset(kind, files, target):
    reader = available(kind, files)
    with pytest.raises(TransferError, match=r"file-1\.bin.*offset 65536.*ends there"):
        reader.read_into(1, 15 * PAGE, target[: 2 * PAGE])
    reader.close()


@pytest.mark.parametrize("kind", ["preadv", "seek"])
def test_a_read_after_close_is_an_error(kind, files, target):
    reader = available(kind, files)
    reader.close()
    with pytest.raises(TransferError):
        reader.read_into(0, 0, target)


@pytest.mark.parametrize("kind", sorted(READERS))
def test_threads_share_a_reader(kind, files):
    reader = available(kind, files)
    content = files[0].read_bytes()
    wrong = []

    def read(offset):
        with mmap.mmap(-1, PAGE) as memory, memoryview(memory) as view:
            for _ in range(50):
                reader.read_into(0, offset, view)
                if view != content[offset : offset + PAGE]:
                    wrong.append(offset)

    threads = [threading.Thread(target=read, args=(page * PAGE,)) for page in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reader.close()
    assert not wrong


def test_direct_refuses_what_is_not_aligned(files, target):
    reader = available("direct", files)
    for offset, part in [(512, target[:PAGE]), (0, target[:100]), (0, target[64 : 64 + PAGE])]:
        with pytest.raises(ValueError, match="multiples of 4096"):
            reader.read_into(0, offset, part)
    reader.close()


def test_short_reads_go_on(files, target, monkeypatch):
    reader = available("preadv", files)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:1000]], offset))
    reader.read_into(0, PAGE, target[: 2 * PAGE])
    assert target[: 2 * PAGE] == files[0].read_bytes()[PAGE : 3 * PAGE]
    reader.close()


def test_an_error_of_the_system_names_file_and_offset(files, target, monkeypatch):
    reader = available("preadv", files)

    def broken(fd, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(TransferError, match=r"file-0\.bin.*offset 4096.*Input/output error"):
        reader.read_into(0, PAGE, target[:PAGE])
    reader.close()


def test_auto_takes_the_first_that_works_and_says_why(files, monkeypatch, caplog):
    def refused(paths):
        raise OSError(errno.EINVAL, "no O_DIRECT on this file system")

    monkeypatch.setitem(READERS, "direct", refused)
    with caplog.at_level(logging.INFO, logger="foregate.runtime.readers"):
        reader = open_reader(files)
    assert reader.kind == "preadv"
    assert "no O_DIRECT" in reader.reason
    assert len(caplog.records) == 1
    reader.close()


def test_a_file_system_that_refuses_the_read_is_passed_over(files, monkeypatch):
    class Refusing(readers.PreadvReader):
        def read_into(self, file, offset, target):
            raise TransferError("refused at the first read")

    monkeypatch.setitem(READERS, "direct", Refusing)
    reader = open_reader(files)
    assert reader.kind == "preadv"
    assert "refused at the first read" in reader.reason
    reader.close()


def test_a_system_without_preadv_reads_with_seek(files, monkeypatch):
    monkeypatch.delattr(os, "preadv")
    reader = open_reader(files)
    assert reader.kind == "seek"
    reader.close()
    with pytest.raises(SettingError, match="preadv does not work"):
        open_reader(files, "preadv")


def test_an_unknown_kind_is_refused(files):
    with pytest.raises(SettingError, match="auto or one of direct, preadv, seek, got 'mmap'"):
        open_reader(files, "mmap")


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SettingError, match=r"No such file"):
        open_reader([tmp_path / "absent"], "seek")


def test_failing_reader_fails_where_told(files, target):
    reader = FailingReader(available("seek", files), lambda file, offset: offset == PAGE)
    reader.read_into(0, 0, target[:PAGE])
    with pytest.raises(TransferError, match="offset 4096"):
        reader.read_into(0, PAGE, target[:PAGE])
    reader.close()
