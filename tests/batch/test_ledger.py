"""The ledger: whatever is torn, what it vouches for is whole, and nothing is there twice."""

import json
import os
import subprocess
import tracemalloc

import numpy as np
import pytest
from batch_helpers import as_of_an_earlier_ctxflow
from hypothesis import given, settings
from hypothesis import strategies as st

from ctxflow.batch import ledger as journals
from ctxflow.batch.ledger import Ledger, SeenKeys, as_keys, contained, id_key
from ctxflow.batch.pump import Pump
from ctxflow.batch.row_items import Prepared
from ctxflow.errors import BusyError


def paths(folder):
    return [folder / name for name in ("out.jsonl", "out.jsonl.errors.jsonl", "out.jsonl.progress")]


def opened(folder, **options):
    return Ledger(*paths(folder), **options)


def lines(keys):
    return "".join(f"{key}\n" for key in keys).encode()


def commit(ledger, done, dead=()):
    ledger.commit(lines(done), lines(dead), *([(key, key % 100) for key in keys] for keys in (done, dead)))


def listed(path):
    return [int(line) for line in path.read_bytes().split()] if path.exists() else []


def test_what_is_committed_is_there_when_it_is_opened_again(tmp_path):
    with opened(tmp_path) as ledger:
        ledger.note({"settings": {"a": 1}})
        commit(ledger, [1, 5], [3])
        commit(ledger, [1 << 63])
    with opened(tmp_path) as ledger:
        assert (ledger.done, ledger.dead, ledger.finished) == (3, 1, False)
        assert ledger.settled.tolist() == [1, 3, 5, 1 << 63]
        assert ledger.facts == {"settings": {"a": 1}}
        ledger.finish()
    with opened(tmp_path) as ledger:
        assert ledger.finished
        commit(ledger, [9])
    with opened(tmp_path) as ledger:
        assert not ledger.finished


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_after_any_tear_the_files_hold_exactly_what_counts(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("torn")
    keys = iter(range(1, 1000))
    safe = 0  # Bytes of the journal that are on the disk for good.
    with opened(folder) as ledger:
        ledger.note({"settings": 1})
        safe = paths(folder)[2].stat().st_size
        for _ in range(data.draw(st.integers(1, 5))):
            if data.draw(st.integers(0, 4)) == 0:
                ledger.retry()
                safe = paths(folder)[2].stat().st_size
            else:
                counts = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
                commit(ledger, *([next(keys) for _ in range(count)] for count in counts))
    for path in paths(folder):
        if path.exists():
            size = path.stat().st_size
            if data.draw(st.booleans()):
                least = safe if path == paths(folder)[2] else 0
                os.truncate(path, max(least, size - data.draw(st.integers(0, 40))))
            else:
                path.write_bytes(path.read_bytes() + b"torn")
    with opened(folder) as ledger:
        commit(ledger, [5000])
        settled = ledger.settled.tolist()
    results, errors = listed(paths(folder)[0]), listed(paths(folder)[1])
    assert sorted(results + errors) == sorted([*settled, 5000])
    assert len(set(results)) == len(results) and results[-1] == 5000
    with opened(folder) as ledger:
        assert sorted(ledger.settled.tolist()) == sorted([*settled, 5000])


def test_a_shorter_output_has_its_lost_rows_run_again(tmp_path):
    with opened(tmp_path) as ledger:
        commit(ledger, [10, 11])
        commit(ledger, [12, 13])
    os.truncate(paths(tmp_path)[0], 8)
    with opened(tmp_path) as ledger:
        assert (ledger.settled.tolist(), ledger.forgotten) == ([10, 11], 2)
        commit(ledger, [12])
    assert listed(paths(tmp_path)[0]) == [10, 11, 12]


def test_rows_are_skipped_by_number_as_long_as_the_input_is_the_same(tmp_path):
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": 1})
        commit(ledger, [501], [503])
    with opened(tmp_path) as ledger:
        assert (ledger.skip, sorted(ledger.skipped.tolist())) == (b"\0\1\0\1", [501, 503])
        ledger.note({"input": "a", "settings": 2})
        assert ledger.skip
        ledger.retry()
        assert (ledger.skip, ledger.skipped.tolist()) == (b"\0\1", [501])
        commit(ledger, [], [503])
        ledger.note({"input": "b"})
        assert (ledger.skip, ledger.skipped.tolist(), ledger.facts["settings"]) == (b"", [], 2)
        commit(ledger, [502], [505])
    with opened(tmp_path) as ledger:
        assert ledger.settled.tolist() == [501, 502, 503, 505]
        assert (ledger.skip, sorted(ledger.skipped.tolist())) == (b"\0\0\1\0\0\1", [502, 505])
        ledger.retry()
        assert (ledger.skip, ledger.settled.tolist()) == (b"\0\0\1", [501, 502])


def test_retry_forgets_the_dead(tmp_path):
    with opened(tmp_path) as ledger:
        commit(ledger, [1], [2, 3])
        ledger.retry()
        assert (ledger.done, ledger.dead, ledger.settled.tolist()) == (1, 0, [1])
        commit(ledger, [2])
    assert listed(paths(tmp_path)[0]) == [1, 2]
    assert not paths(tmp_path)[1].exists(), "no empty file of errors is left"


def test_a_second_driver_is_refused_until_the_first_is_gone(tmp_path):
    with opened(tmp_path) as ledger:
        commit(ledger, [1])
        with pytest.raises(ValueError, match="being written by another driver"):
            opened(tmp_path)
        with pytest.raises(ValueError, match="being written by another driver"):
            opened(tmp_path, fresh=True)
        commit(ledger, [2])
    with opened(tmp_path) as ledger:
        assert ledger.done == 2


def test_files_of_others_are_refused(tmp_path):
    results, _, journal = paths(tmp_path)
    results.write_text("mine\n")
    for _ in range(3):  # Whoever is refused tries again.
        with pytest.raises(ValueError, match="without the journal"):
            opened(tmp_path)
        assert results.read_text() == "mine\n" and not journal.exists()
    for begun in (journals.MAGIC, journals.MAGIC[:9], journals.EARLIER, b""):
        journal.write_bytes(begun)
        with pytest.raises(ValueError, match="without the journal"):
            opened(tmp_path)
        assert results.read_text() == "mine\n"
    journal.write_text("a diary\n")
    for fresh in (False, True):
        with pytest.raises(ValueError, match="not the journal of a job"):
            opened(tmp_path, fresh=fresh)
    assert journal.read_text() == "a diary\n"
    journal.write_text("")
    with opened(tmp_path, fresh=True) as ledger:
        commit(ledger, [1])
    assert listed(results) == [1]


def test_an_output_that_was_changed_is_refused(tmp_path):
    with opened(tmp_path) as ledger:
        commit(ledger, [1, 2])
    paths(tmp_path)[0].write_bytes(b"1234567")
    with pytest.raises(ValueError, match="changed by another program"):
        opened(tmp_path)


@pytest.mark.parametrize("results", ["same length", "the longer, the later it came"])
def test_an_output_without_one_of_its_lines_is_refused_and_left_as_it_is(tmp_path, results):
    """Cut where the journal ends, it would hold a row twice and lack another, or lose what its owner has kept."""
    output, _, journal = paths(tmp_path)
    answers = ["x" * (n if "longer" in results else 1) for n in range(7)]
    made = [json.dumps({"row": n, "result": answer}).encode() + b"\n" for n, answer in enumerate(answers)]
    with opened(tmp_path) as ledger:
        for n, line in enumerate(made):
            ledger.commit(line, b"", [(n, n)], [])
    edited, before = b"".join(made[1:]), journal.read_bytes()
    output.write_bytes(edited)
    with pytest.raises(ValueError, match="changed by another program"):
        opened(tmp_path)
    assert (output.read_bytes(), journal.read_bytes()) == (edited, before)
    output.write_bytes(b"".join(made))
    with opened(tmp_path) as ledger:
        assert (ledger.done, ledger.forgotten) == (7, 0)


def named(keys):
    return "".join(json.dumps({"row": key, "result": f"of {key}"}) + "\n" for key in keys).encode()


def keep(ledger, done, dead=()):
    pairs = [[(key, key) for key in keys] for keys in (done, dead)]
    ledger.commit(named(done), named(dead), *pairs, bytes(8 * len(done)))


def test_a_journal_with_a_flipped_bit_costs_no_result(tmp_path):
    """Wherever it is: the job is refused, and nothing is changed, or goes on with all results."""
    results, errors, journal = paths(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        for first in range(0, 12, 3):
            keep(ledger, [first, first + 1], [first + 2])
        ledger.finish()
    good = {path: path.read_bytes() for path in (results, errors, journal)}
    refused = 0
    for place in range(len(good[journal])):
        for path, data in good.items():
            path.write_bytes(data)
        bad = bytearray(good[journal])
        bad[place] ^= 1 << place % 8
        journal.write_bytes(bad)
        try:
            with opened(tmp_path) as ledger:
                assert ledger.done == 8, place
        except ValueError as error:
            refused += 1
            assert "put a copy of it back" in str(error) or "put that back" in str(error)
            assert journal.read_bytes() == bad and errors.read_bytes() == good[errors]
        assert results.read_bytes() == good[results], place
    assert refused > 0.9 * len(good[journal])


def test_a_damaged_journal_goes_on_as_the_message_says(tmp_path):
    results, _, journal = paths(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        keep(ledger, [0, 1], [2])
        before = journal.stat().st_size
        keep(ledger, [3, 4], [5])
        keep(ledger, [6])
    data = bytearray(journal.read_bytes())
    data[before + 40] ^= 1
    journal.write_bytes(data)
    with pytest.raises(ValueError, match=rf"damaged at byte {before}, .*: put a copy of it back; or call cp") as told:
        opened(tmp_path)
    subprocess.run(str(told.value).partition("or call ")[2].partition(", and results")[0], shell=True, check=True)
    kept = results.read_bytes()
    for _ in range(2):
        with opened(tmp_path) as ledger:
            assert (ledger.settled.tolist(), ledger.done, ledger.dead) == ([0, 1, 2, 3, 4, 6], 5, 1)
    assert results.read_bytes() == kept


@pytest.mark.parametrize("id_column", [None, "id", "custom_id"])
@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_results_that_the_journal_does_not_know_count_by_what_they_say(tmp_path, known, id_column):
    """As where it is older than they are, or a power cut took its end."""
    results, errors, journal = paths(tmp_path)

    def key(number):
        return number if id_column is None else id_key(f"i{number}")

    def line_of(number):
        if id_column == "custom_id":  # As OpenAI's form has it.
            return {"id": f"batch_req_{key(number):016x}", "custom_id": f"i{number}", "error": None}
        return {"row": number, "id": f"i{number}", "result": 1}

    def lines_of(numbers):
        return "".join(json.dumps(line_of(number)) + "\n" for number in numbers).encode()

    ends = []
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": id_column}})
        for first in (0, 3, 6):
            ends.append(journal.stat().st_size)
            done, dead = [(key(n), n) for n in (first, first + 1)], [(key(first + 2), first + 2)]
            ledger.commit(lines_of([first, first + 1]), lines_of([first + 2]), done, dead, bytes(16))
        ends.append(journal.stat().st_size)
    kept, letters = results.read_bytes(), errors.read_bytes()
    os.truncate(journal, ends[known])
    for _ in range(2):
        with opened(tmp_path) as ledger:
            assert (ledger.done, ledger.dead) == (6, known)
            settled = [*(0, 1, 3, 4, 6, 7), *(3 * n + 2 for n in range(known))]
            assert ledger.settled.tolist() == sorted(map(key, settled))
            if id_column is not None and known < 3:
                assert not ledger.skip, "rows are known by their keys, whatever their places are now"
            assert ledger.facts == {"input": "a", "settings": {"id_column": id_column}}
        assert results.read_bytes() == kept and letters.startswith(errors.read_bytes() if known else b"")


@pytest.mark.parametrize(
    ("added", "rows"),
    [
        (b"a note\n", 0),
        (named([2, 1, 3]), 1),  # Row 1 has a line.
        (named([3, 3]), 1),
        (b'{"row": true}\n{"row": 4}\n', 0),
        (b'{"id": "12"}\n', 0),
    ],
)
def test_what_stands_behind_the_results_and_is_none_is_kept_beside(tmp_path, added, rows):
    results = paths(tmp_path)[0]
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        keep(ledger, [0, 1])
    kept = results.read_bytes()
    results.write_bytes(kept + added + b"torn")
    beside = tmp_path / "out.jsonl.cut"
    (tmp_path / "others").write_bytes(b"not ours")
    beside.symlink_to(tmp_path / "others")
    with pytest.raises(ValueError, match=r"out\.jsonl\.cut is a link, which is not followed"):
        opened(tmp_path)
    assert (tmp_path / "others").read_bytes() == b"not ours"
    beside.unlink()
    beside.mkdir()
    with pytest.raises(ValueError, match=r"out\.jsonl\.cut cannot be written: Is a directory"):
        opened(tmp_path)
    assert results.read_bytes() == kept + added + b"torn", "what cannot be kept is not cut off"
    beside.rmdir()
    beside.write_bytes(b"of before\n")
    with opened(tmp_path) as ledger:
        assert ledger.done == 2 + rows
        assert any(str(beside) in note for note in ledger.notes)
    new = b"".join(added.splitlines(keepends=True)[:rows])
    assert results.read_bytes() == kept + new
    assert beside.read_bytes() == b"of before\n" + added.removeprefix(new) + b"torn"


TAILS = {
    "its begin": lambda frame: frame[: len(frame) // 2],
    "its begin, with zeros behind": lambda frame: frame[: len(frame) // 2] + bytes(2 * len(frame)),
    "zeros": lambda frame: bytes(4096),
    "its begin, with the middle of another behind": lambda frame: frame[:80] + frame[-300:-8],
    "its middle": lambda frame: frame[100:-8],
}


@pytest.mark.parametrize("name", sorted(TAILS))
def test_what_a_kill_a_full_disk_or_a_power_cut_leaves_of_a_frame_is_no_damage(tmp_path, name):
    results, _, journal = paths(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        keep(ledger, [0, 1], [2])
        before, known = journal.stat().st_size, results.stat().st_size
        keep(ledger, range(3, 400))
    whole, lines = journal.read_bytes(), results.read_bytes()
    journal.write_bytes(whole[:before] + TAILS[name](whole[before:]))
    with opened(tmp_path) as ledger:
        assert (ledger.done, ledger.dead) == (399, 1)
    results.write_bytes(lines[:known])
    journal.write_bytes(whole[:before] + TAILS[name](whole[before:]))
    with opened(tmp_path) as ledger:
        assert (ledger.done, ledger.dead) == (2, 1)


def test_a_journal_whose_first_frame_is_damaged_is_not_to_be_cut(tmp_path):
    _, _, journal = paths(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        keep(ledger, [0, 1])
    data = bytearray(journal.read_bytes())
    data[60] ^= 1
    journal.write_bytes(data)
    with pytest.raises(ValueError, match=r"put a copy of it back; name another output, or begin anew with --fresh$"):
        opened(tmp_path)


def test_what_cannot_be_begun_anew_is_left_as_it_was(tmp_path):
    files = paths(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        keep(ledger, [0, 1])
    before = [files[0].read_bytes(), files[2].read_bytes()]
    files[1].mkdir()
    with pytest.raises(ValueError, match="Is a directory"):
        Ledger(*files, fresh=True)
    assert [files[0].read_bytes(), files[2].read_bytes()] == before
    files[1].rmdir()
    (tmp_path / "empty").touch()
    for target in (os.devnull, tmp_path / "empty"):
        files[1].symlink_to(target)
        with pytest.raises(ValueError, match="is a link, which is not followed"):
            opened(tmp_path)
        assert files[1].is_symlink() and os.path.exists(target)
        files[1].unlink()


def test_a_second_driver_is_refused_also_where_the_journal_was_moved_away(tmp_path):
    results, errors, journal = paths(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        journal.unlink()
        for fresh in (False, True):
            with pytest.raises(BusyError):
                Ledger(results, errors, journal, fresh)
            journal.unlink()
        keep(ledger, [0, 1])
    assert len(results.read_bytes().splitlines()) == 2


def test_lines_that_are_nested_too_deeply_are_nobodys(tmp_path):
    results, _, _ = paths(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        keep(ledger, [0, 1])
    with results.open("ab") as file:
        file.write(b"[" * 100_000 + b"\n")
    with opened(tmp_path) as ledger:
        assert ledger.done == 2


def test_rows_whose_numbers_no_line_tells_are_known_by_their_keys(tmp_path):
    _, _, journal = paths(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        before = journal.stat().st_size
        ledger.commit(b'{"id": "batch_req_%016x"}\n' % id_key("a"), b"", [(id_key("a"), 3)], [], b"\1" * 8)
    os.truncate(journal, before)
    for _ in range(2):
        with opened(tmp_path) as ledger:
            assert (ledger.skip, ledger.skipped.tolist()) == (b"", [])
            assert ledger.settled.tolist() == [id_key("a")]


@pytest.mark.parametrize("size", [None, 0, 1])
def test_dead_letters_that_are_gone_have_their_rows_tried_again(tmp_path, size):
    results, errors, _ = paths(tmp_path)
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        keep(ledger, [0], [1])
        first = errors.read_bytes()
        keep(ledger, [2], [3])
        ledger.finish()
    kept = results.read_bytes()
    if size is None:
        errors.unlink()
    else:
        os.truncate(errors, size * (len(first) + 4))
    for _ in range(2):
        with opened(tmp_path) as ledger:
            assert (ledger.settled.tolist(), ledger.finished) == ([0, 1, 2] if size else [0, 2], False)
        assert results.read_bytes() == kept
        assert (errors.read_bytes() == first) if size else not errors.exists()
    with opened(tmp_path) as ledger:
        keep(ledger, [], [3])
    with opened(tmp_path) as ledger:
        assert ledger.settled.tolist() == ([0, 1, 2, 3] if size else [0, 2, 3])


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        Ledger(tmp_path / "file" / "out", tmp_path / "e", tmp_path / "file" / "p")


def test_digests_are_kept_of_rows_that_are_done(tmp_path):
    with opened(tmp_path) as ledger:
        ledger.commit(lines([5, 2]), lines([3]), [(5, 5), (2, 2)], [(3, 3)], b"\5" * 8 + b"\2" * 8)
        commit(ledger, [1])
    with opened(tmp_path) as ledger:
        keys, digests = ledger.digests()
        assert keys.tolist() == [1, 2, 5]
        assert digests.tolist() == [0, int.from_bytes(b"\2" * 8, "little"), int.from_bytes(b"\5" * 8, "little")]


def test_the_journal_of_an_earlier_ctxflow_is_taken_up(tmp_path):
    with opened(tmp_path) as ledger:
        ledger.note({"settings": {"a": 1}})
        ledger.commit(lines([1, 2]), lines([3]), [(1, 1), (2, 2)], [(3, 3)], bytes(range(16)))
        ledger.retry()
        commit(ledger, [], [3])
    as_of_an_earlier_ctxflow(paths(tmp_path)[2])
    assert b'"version": 1' in paths(tmp_path)[2].read_bytes()[:60]
    with opened(tmp_path) as ledger:
        assert (ledger.settled.tolist(), ledger.dead, ledger.facts) == ([1, 2, 3], 1, {"settings": {"a": 1}})
        assert ledger.digests()[1].tolist() == [0, 0]
        ledger.commit(lines([4]), b"", [(4, 4)], [], b"\4" * 8)
    assert b'"version": 2' in paths(tmp_path)[2].read_bytes()[:60], "an earlier one does not take it up again"
    with opened(tmp_path) as ledger:
        assert (ledger.settled.tolist(), ledger.digests()[0].tolist()) == ([1, 2, 3, 4], [1, 2, 4])


def test_a_ledger_of_many_rows_is_opened_in_little_memory(tmp_path):
    rows = 200_000
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a"})
        for first in range(0, rows, 1000):
            ledger.commit(b"\n" * 1000, b"", [(n, n) for n in range(first, first + 1000)], [], b"\1" * 8000)
    tracemalloc.start()
    try:
        with opened(tmp_path) as ledger:
            held, peak = tracemalloc.get_traced_memory()
            assert ledger.done == rows
    finally:
        tracemalloc.stop()
    assert held < 10 * rows and peak < 12 * rows


numbers = st.integers(0, 30)


@given(st.lists(st.lists(numbers, max_size=12), max_size=12))
def test_seen_keys_tell_what_a_set_would(chunks):
    seen, plain = SeenKeys(), set()
    for chunk in chunks:
        expected = []
        for number in chunk:
            expected.append(number in plain)
            plain.add(number)
        assert seen.add(as_keys(chunk)).tolist() == expected


@given(st.lists(numbers), st.lists(numbers))
def test_contained_tells_what_in_would(keys, among):
    assert contained(as_keys(keys), np.sort(as_keys(among))).tolist() == [key in among for key in keys]


def test_many_keys_take_a_handful_of_runs():
    seen = SeenKeys()
    for start in range(0, 100_000, 1000):
        assert not seen.add(as_keys(range(start, start + 1000))).any()
    assert len(seen._runs) < 10
    assert seen.add(as_keys(range(0, 100_000, 7))).all()


@given(st.text())
def test_an_id_is_no_number(text):
    assert id_key(text) >= 1 << 63


def test_an_id_that_is_no_valid_unicode_has_a_key_too():
    assert id_key("\ud800") != id_key("\ud801")


def test_answers_to_items_that_nobody_asked_for_keep_no_others_out(tmp_path):
    """As of a chunk of which a run that ends lets in a part only."""
    rows = [Prepared(n, n, None, (f"text {n}",), {}, 1) for n in range(3)]
    in_flight = []

    def submit(items, stream):
        stream.deliver([9, 0, 1, 2], ["not asked for", *items])
        return range(len(items))

    def show(count):
        assert not in_flight, "all are answered at once"
        in_flight.append(count)

    with opened(tmp_path) as ledger:
        options = {"told": print, "show": show, "place": str, "in_order": False}
        Pump(iter([rows]), submit, ledger, lambda row, result: {"row": row.number, "result": result}, **options).run()
        assert (ledger.done, ledger.dead) == (3, 0)


@pytest.mark.parametrize("finished", [True, False])
def test_only_results_that_were_published_can_be_lacking(tmp_path, finished):
    """An output that a job finds there, as --fresh does, is not made of its results."""
    made = tmp_path / "out.csv"
    made.write_text("of the job before\n")
    with Ledger(*paths(tmp_path), made=made) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        keep(ledger, [0, 1])
        if finished:
            ledger.finish()
    os.truncate(paths(tmp_path)[0], 0)
    with Ledger(*paths(tmp_path), made=made) as ledger:
        assert (ledger.lacking, ledger.done, ledger.forgotten) == (finished, 2 * finished, 2 * (not finished))


def test_the_begin_of_a_line_alone_is_dropped_and_whole_ones_are_kept_beside(tmp_path):
    results = paths(tmp_path)[0]
    with opened(tmp_path) as ledger:
        ledger.note({"input": "a", "settings": {"id_column": None}})
        keep(ledger, [0, 1])
    kept = results.read_bytes()
    for added, beside in ((b'{"row": 2, "re', None), (b'{"row": 2, "result": "of 2"}', True), (b"a note", True)):
        results.write_bytes(kept + added)
        with opened(tmp_path) as ledger:
            assert ledger.done == 2
        cut = tmp_path / "out.jsonl.cut"
        assert results.read_bytes() == kept and cut.exists() == bool(beside)
        if beside:
            assert cut.read_bytes() == added
            cut.unlink()
