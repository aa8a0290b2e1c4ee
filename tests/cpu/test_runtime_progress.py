"""Where a rank is, when the device lags behind the host and when it does not."""

from megatron_epp.runtime.watchdog import Progress, ProgressPoint, device_mark


class Queue:
    """A device that passes marks when it is told to."""

    def __init__(self):
        self.issued = self.passed = 0

    def mark(self):
        self.issued += 1
        return Mark(self, self.issued)


class Mark:
    def __init__(self, queue, number):
        self.queue, self.number = queue, number

    def query(self):
        return self.queue.passed >= self.number


def test_without_a_device_of_its_own_the_rank_is_where_the_host_is():
    progress = Progress(lambda: None)
    assert progress.point() == ProgressPoint(0)
    progress.reach(ProgressPoint(1, receiving=True))
    assert progress.point() == ProgressPoint(1, receiving=True)
    progress.reach(None)
    assert progress.point() is None


def test_with_a_device_it_is_at_the_first_place_the_device_has_not_passed():
    queue = Queue()
    progress = Progress(queue.mark)
    for point in (ProgressPoint(0), ProgressPoint(1, receiving=True), ProgressPoint(1), None):
        progress.reach(point)
    seen = []
    for queue.passed in range(5):
        seen.append(progress.point())
    assert seen == [ProgressPoint(0), ProgressPoint(0), ProgressPoint(1, receiving=True), ProgressPoint(1), None]


def test_a_host_that_gave_up_leaves_what_it_had_issued():
    queue = Queue()
    progress = Progress(queue.mark)
    progress.reach(ProgressPoint(1))
    progress.close()
    assert progress.point() == ProgressPoint(0)
    queue.passed = 1
    assert progress.point() is None


def test_a_processor_has_no_queue_to_mark(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)
    assert device_mark() is None
