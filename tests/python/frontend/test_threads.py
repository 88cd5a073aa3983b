"""How many threads a call uses: torch's number, onefold's own, what the process may use.

Each case is a process of its own: threads that were started once stay.
"""

from __future__ import annotations

import os
import textwrap

import pytest

from processes import output_of

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc"
)

PRELUDE = """
import os, torch, onefold

def threads():
    return len(os.listdir("/proc/self/task"))

# More items than threads, so that every thread that may help is started.
q, k, v = (torch.randn(2, 300, 16, 32, requires_grad=True) for _ in range(3))
outs, lses = torch.randn(3, 5000, 32), torch.randn(3, 5000)

def started(*, numpy=False):
    before = threads()
    if numpy:
        onefold.attention(*(x.detach().numpy() for x in (q, k, v)))
    else:
        onefold.attention(q, k, v).sum().backward()
        onefold.merge_states(outs, lses)
    return threads() - before

"""


def numbers_of(code: str) -> list[int]:
    """The numbers that this code prints."""
    return [int(word) for word in output_of(PRELUDE + textwrap.dedent(code)).split()]


def test_torch_s_number_of_threads_is_kept() -> None:
    assert numbers_of("torch.set_num_threads(1); print(started())") == [0]


def test_a_number_given_to_onefold_is_kept_whatever_torch_says() -> None:
    code = "torch.set_num_threads(1); onefold.set_num_threads(4); print(started())"
    assert numbers_of(code) == [3]


def test_torch_s_number_means_nothing_to_numpy() -> None:
    code = """
    torch.set_num_threads(1)
    print(started(numpy=True), onefold.get_num_threads())
    """
    new, all_there_are = numbers_of(code)
    assert new == all_there_are - 1


def test_the_number_may_change_from_call_to_call_and_be_another_in_every_thread() -> None:
    code = """
    import threading
    onefold.set_num_threads(0)
    found = []
    with torch.no_grad():
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            found.append(onefold.attention(q, k, v))
        def work():
            torch.set_num_threads(1)
            found.append(onefold.attention(q, k, v))
        thread = threading.Thread(target=work)
        thread.start()
        found.append(onefold.attention(q, k, v))
        thread.join()
    print(sum(torch.equal(out, found[0]) for out in found))
    """
    assert numbers_of(code) == [5]


def test_explain_counts_with_torch_s_threads() -> None:
    code = """
    import contextlib, io
    q = torch.randn(1, 3000, 1, 32)
    def items():
        with contextlib.redirect_stdout(io.StringIO()):
            return onefold.explain(q, q, q).forward.work_items
    onefold.set_num_threads(2); two = items()
    onefold.set_num_threads(1); one = items()
    onefold.set_num_threads(0); torch.set_num_threads(1)
    print(one, two, items())
    """
    one, two, torch_s_one = numbers_of(code)
    assert torch_s_one == one != two


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux's")
def test_a_process_confined_to_one_processor_uses_one_thread() -> None:
    code = "print(started(), onefold.get_num_threads())"
    confine = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
    assert output_of(confine + PRELUDE + code).split() == ["0", "1"]
