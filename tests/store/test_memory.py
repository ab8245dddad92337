from rein.store.memory_store import MemoryStore
from rein.testing import StatefulContract
from rein.testing.store import StoreContract, make_trajectory


class TestMemoryStore(StoreContract):
    def make(self, path):
        return MemoryStore()

    def read(self, store):
        return store.trajectories


class TestStateOfMemoryStore(StatefulContract):
    def make(self):
        return MemoryStore()

    def step(self, store):
        store.append(make_trajectory(len(store.trajectories) + 1))
        return store.trajectories[-1]


def test_repr_has_the_number_of_epochs():
    store = MemoryStore()
    store.append(make_trajectory(1))
    assert repr(store) == "MemoryStore(1 epochs)"
