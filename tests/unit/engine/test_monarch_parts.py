"""The parts of the Monarch engine that need no Monarch: placing, rendezvous stores, deferred loads, addresses, refusals."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from helpers.cli import llamarl

from llamarl.config.file import load_config
from llamarl.engine.monarch.addresses import certificate_variables, url_of
from llamarl.engine.monarch.deferred_loads import DeferredLoads
from llamarl.engine.monarch.install import check_engine
from llamarl.engine.monarch.placement import HostRoom, place
from llamarl.engine.monarch.protocol import StoreRequest
from llamarl.engine.monarch.rendezvous import RendezvousStores
from llamarl.engine.monarch.rendezvous_store import StoreClient
from llamarl.errors import ConfigError, InputError
from llamarl.messages import LoadWeights, Up, WeightsPublished


def rooms(*used_and_free: tuple[int, int]) -> list[HostRoom]:
    return [HostRoom(host, used, free) for host, (used, free) in enumerate(used_and_free)]


@pytest.mark.parametrize(
    ("found", "num_ranks", "placed"),
    [
        (rooms((2, 9), (1, 9), (1, 9)), 1, [(1, 1)]),  # the emptiest, and of these the first
        (rooms((0, 1), (5, 4)), 4, [(1, 4)]),  # all on one host if there is room
        (rooms((0, 1), (0, 3), (0, 2)), 5, [(1, 3), (2, 2)]),  # else on as few as possible
        (rooms((0, 1), (0, 3)), 5, []),
        (rooms((0, 0)), 1, []),
        ([], 1, []),
    ],
)
def test_executors_go_to_the_emptiest_host_that_has_room(
    found: list[HostRoom], num_ranks: int, placed: list[tuple[int, int]]
) -> None:
    assert place(found, num_ranks, may_span=True) == placed
    assert place(found, num_ranks, may_span=False) == (placed if len(placed) == 1 else [])


def client_of(stores: RendezvousStores) -> StoreClient:
    lock = threading.Lock()

    def send(ask: StoreRequest) -> None:
        with lock:
            stores.handle(ask, found.on_answer)

    found = StoreClient(send)
    return found


def test_a_rendezvous_is_a_store_that_processes_share() -> None:
    stores = RendezvousStores()
    one, other = (client_of(stores).store("here", 5.0) for _ in range(2))
    heard: list[bytes] = []
    waiting = threading.Thread(target=lambda: heard.append(other.get("name")))
    waiting.start()
    one.set("name", b"value")
    waiting.join()
    assert heard == [b"value"]
    assert [one.add("count", 2), other.add("count", 3)] == [2, 5]
    assert other.compare_set("name", "value", "new") == b"new"
    assert one.compare_set("name", "value", "lost") == b"new"
    assert other.check(["name", "count"]) and not other.check(["name", "nothing"])
    assert one.num_keys() == 2 and one.delete_key("count") and not one.delete_key("count")
    assert client_of(stores).store("elsewhere", 5.0).num_keys() == 0


def test_who_waits_in_vain_is_told_for_whom() -> None:
    lonely = client_of(RendezvousStores()).store("here", 0.05)
    with pytest.raises(RuntimeError, match=r"'you' did not come to the rendezvous 'here' within 0.05 s"):
        lonely.wait(["you"])


def test_an_order_to_load_waits_until_somebody_alive_has_published_the_version() -> None:
    loads, load = DeferredLoads({"generator": "trainer"}), LoadWeights(3)
    assert loads.defer("generator/0", load)
    assert loads.on_report("trainer/0", Up()) == {}
    assert loads.on_report("trainer/0", WeightsPublished(2, 1, True)) == {}
    assert loads.on_report("trainer/0", WeightsPublished(3, 1, True)) == {"generator/0": load}
    assert not loads.defer("generator/1", load)
    assert not loads.defer("generator/1", LoadWeights(1)), "too old: the trainer itself refuses it"
    loads.on_death("trainer/0")
    assert loads.defer("generator/0", load)
    loads.on_death("generator/0")
    assert loads.on_report("trainer/0", WeightsPublished(3, 1, True)) == {}


@pytest.mark.parametrize(
    ("address", "certs", "url"),
    [
        ("127.0.0.1:2700", "", "tcp://127.0.0.1:2700"),
        ("localhost:2700", "", "tcp://localhost:2700"),
        ("[::1]:2700", "", "tcp://::1:2700"),
        ("10.0.0.2:2700", "certs", "tls://10.0.0.2:2700"),
        ("gpu-7.example:2700", "certs", "tls://gpu-7.example:2700"),
    ],
)
def test_beyond_loopback_addresses_are_tls(address: str, certs: str, url: str) -> None:
    assert url_of("here", address, certs) == url


@pytest.mark.parametrize("address", ["10.0.0.2:2700", "0.0.0.0:2700", "gpu-7.example:2700", "[::]:2700"])
def test_beyond_loopback_nothing_goes_without_certificates(address: str) -> None:
    with pytest.raises(InputError, match="`llamarl certs` makes certificates"):
        url_of("here", address, "")
    done = llamarl("worker", "--listen", address)
    assert done.code == 2 and "beyond this machine" in done.err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["engine.hosts=[10.0.0.2:1]"], "engine.hosts: cannot take effect on one machine"),
        (["engine=monarch", "engine.hosts=[10.0.0.2:1]"], "engine.hosts: 10.0.0.2:1 is beyond this machine"),
        (["engine=monarch", "engine.hosts=[10.0.0.2:1]", "engine.certs=/nowhere"], "needs monarch|holds no ca.crt"),
    ],
)
def test_what_cannot_work_is_told_before_anything_starts(settings: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_engine(load_config(None, settings).engine)


def test_hosts_are_addresses_or_tell_their_room_and_roles() -> None:
    text = "engine.hosts=[10.0.0.2:1, {address: '10.0.0.3:1', ranks: 8, roles: [generator]}]"
    first, second = load_config(None, ["engine=monarch", text]).engine.all_hosts
    assert (first.address, first.ranks, first.roles) == ("10.0.0.2:1", 0, ())
    assert (second.address, second.ranks, second.roles) == ("10.0.0.3:1", 8, ("generator",))
    with pytest.raises(ConfigError, match=r"engine.hosts"):
        load_config(None, ["engine.hosts=[10.0.0.2]"])


def test_a_folder_without_certificates_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--certs: .* holds no ca.crt; `llamarl certs` makes a folder for every host"):
        certificate_variables("--certs", str(tmp_path))
