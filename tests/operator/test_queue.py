"""The work queue loses no key, gives a key to one worker at a time, and delays each further failure longer."""

import threading

import pytest
from persist_engine.base.env import SeededEnv, SystemEnv
from persist_operator.handlers.queue import WorkQueue


@pytest.fixture
def env():
    return SeededEnv()


@pytest.fixture
def queue(env):
    return WorkQueue(env, backoff_initial_s=1, backoff_max_s=8)


def test_a_key_waits_once_however_often_it_is_added(queue):
    for _ in range(5):
        queue.add("a")
    assert queue.take(timeout_s=0) == "a"
    assert queue.take(timeout_s=0) is None


def test_a_key_is_taken_when_it_is_due_and_the_earlier_time_wins(queue, env):
    queue.add("late", after_s=10)
    queue.add("soon", after_s=5)
    queue.add("late", after_s=2)
    queue.add("late", after_s=60)
    assert queue.take(timeout_s=0) is None
    env.advance_ms(2000)
    assert queue.take(timeout_s=0) == "late"
    env.advance_ms(3000)
    assert queue.take(timeout_s=0) == "soon"


def test_a_change_during_the_work_brings_the_key_back_and_never_to_a_second_worker(queue):
    queue.add("a")
    assert queue.take(timeout_s=0) == "a"
    queue.add("a")
    assert queue.take(timeout_s=0) is None
    queue.done("a")
    assert queue.take(timeout_s=0) == "a"
    queue.done("a")
    assert queue.take(timeout_s=0) is None


def test_failures_wait_longer_each_time_and_events_do_not_shorten_that(queue, env):
    queue.add("a")
    waits = []
    for _ in range(6):
        assert queue.take(timeout_s=0) == "a"
        queue.done("a", failed=True)
        queue.add("a")
        waited = 0
        while queue.depth == 0:
            env.advance_ms(100)
            waited += 100
        waits.append(waited / 1000)
    assert [round(one / 1.2) <= limit <= one / 0.7 for one, limit in zip(waits, [1, 2, 4, 8, 8, 8], strict=True)] == [
        True
    ] * 6
    assert queue.take(timeout_s=0) == "a"
    queue.done("a")
    queue.add("a")
    assert queue.take(timeout_s=0) == "a"


def test_depth_and_age_count_the_keys_that_wait(queue, env):
    queue.add("a")
    queue.add("b", after_s=100)
    env.advance_ms(7000)
    assert queue.depth == 1
    assert queue.oldest_s == pytest.approx(7)


def test_many_workers_do_every_key_and_none_twice_at_once():
    queue = WorkQueue(SystemEnv(), backoff_initial_s=1, backoff_max_s=8)
    lock, active, done, clashes = threading.Lock(), set(), {}, []
    finished = threading.Event()

    def work():
        while (key := queue.take(timeout_s=60)) is not None:
            with lock:
                clashes.extend([key] if key in active else [])
                active.add(key)
            with lock:
                active.discard(key)
                done[key] = done.get(key, 0) + 1
                again = done[key] < 3
            if again:
                queue.add(key)
            queue.done(key)
            if len(done) == 50 and all(count >= 3 for count in done.values()):
                finished.set()

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for key in range(50):
        queue.add(key)
    assert finished.wait(60)
    queue.close()
    for worker in workers:
        worker.join()
    assert clashes == []


def test_close_wakes_a_worker_that_waits():
    queue = WorkQueue(SystemEnv(), backoff_initial_s=1, backoff_max_s=8)
    taken = []
    worker = threading.Thread(target=lambda: taken.append(queue.take(timeout_s=60)))
    worker.start()
    queue.close()
    worker.join(60)
    assert taken == [None]


def test_thousands_of_keys_of_one_lane_delay_another_by_one(env):
    queue = WorkQueue(env, backoff_initial_s=1, backoff_max_s=8, lane_of=lambda key: key[0])
    for number in range(2000):
        queue.add(("red", number))
    assert queue.take(timeout_s=0) == ("red", 0)
    for number in range(3):
        queue.add(("blue", number))
    taken = [queue.take(timeout_s=0) for _ in range(8)]
    assert [key for key in taken if key[0] == "blue"] == [("blue", 0), ("blue", 1), ("blue", 2)]
    assert [key for key in taken[:6] if key[0] == "red"] == [("red", 1), ("red", 2), ("red", 3)]


def test_every_key_is_taken_once_whatever_its_lane(env):
    queue = WorkQueue(env, backoff_initial_s=1, backoff_max_s=8, lane_of=lambda key: str(key % 3))
    for number in range(30):
        queue.add(number, after_s=number % 4)
    env.advance_ms(10_000)
    taken = [queue.take(timeout_s=0) for _ in range(30)]
    assert sorted(taken) == list(range(30))
    assert queue.take(timeout_s=0) is None
