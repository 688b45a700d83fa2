"""Random numbers inside a forward pass come from the client's generator, whatever else runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers import bits
from torch import Tensor, nn

from fedfac.noise import Routed, Seeded, how_it_draws, silent, taking_turns

CPU = torch.device("cpu")


class Functional(nn.Module):
    """Dropout as a function."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training)


class Noisy(nn.Module):
    """Random numbers made in the forward pass itself."""

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape) + torch.rand(x.shape) + torch.empty(x.shape).uniform_(0, 1)
        return x + noise + torch.bernoulli(torch.full(x.shape, 0.5)) if self.training else x


class Attention(nn.Module):
    """Dropout inside one fused operator."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(1, 1, -1, 4)
        return F.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5 if self.training else 0.0)


CASES: dict[str, tuple[nn.Module, tuple[int, ...], Seeded]] = {
    "nothing random": (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4)), (8, 4), silent),
    "dropout of probability 0": (nn.Dropout(0.0), (8, 4), silent),
    "dropout in evaluation mode": (nn.Dropout(0.5).eval(), (8, 4), silent),
    "Dropout": (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (8, 4), Routed),
    "Dropout1d": (nn.Dropout1d(0.5), (8, 4, 3), Routed),
    "Dropout2d": (nn.Dropout2d(0.5), (8, 4, 3, 3), Routed),
    "Dropout3d": (nn.Dropout3d(0.5), (8, 4, 2, 2, 2), Routed),
    "F.dropout": (Functional(), (8, 4), Routed),
    "torch.randn and the like": (Noisy(), (8, 4), Routed),
    "an LSTM with dropout inside": (nn.LSTM(4, 4, num_layers=2, dropout=0.5), (5, 2, 4), taking_turns),
    "AlphaDropout": (nn.AlphaDropout(0.5), (8, 4), taking_turns),
    "fused attention": (Attention(), (8, 4), taking_turns),
    "dropout and an LSTM": (nn.Sequential(nn.Dropout(0.5), nn.LSTM(4, 4, 2, dropout=0.5)), (5, 2, 4), taking_turns),
}
RANDOM = [case for case, (_, _, kind) in CASES.items() if kind is not silent]


def seeded_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def forward_of(case: str) -> Callable[[], Tensor]:
    model, shape, _ = CASES[case]
    inputs = torch.randn(shape, generator=seeded_generator(1))

    def forward() -> Tensor:
        made = model(inputs)
        output: Tensor = made[0] if isinstance(made, tuple) else made
        return output.detach()

    return forward


@pytest.fixture(autouse=True)
def global_generator_stays() -> Iterator[None]:
    """In every test here: the global generator is afterwards what it was before."""
    before = torch.default_generator.get_state()
    yield
    assert torch.equal(torch.default_generator.get_state(), before)


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_seen_to_draw_nothing_or_by_functions_or_otherwise(case: str) -> None:
    assert how_it_draws(forward_of(case), CPU) is CASES[case][2]


@pytest.mark.parametrize("case", RANDOM)
def test_the_same_generator_gives_the_same_draw_and_its_continuation_another(case: str) -> None:
    forward, kind = forward_of(case), CASES[case][2]

    def two(seed: int) -> tuple[Tensor, Tensor]:
        generator = seeded_generator(seed)
        with kind(generator):
            first = forward()
        with kind(generator):
            return first, forward()

    one, again, other = two(5), two(5), two(6)
    assert bits(one[0]) == bits(again[0])
    assert bits(one[1]) == bits(again[1])
    assert bits(one[0]) != bits(one[1])
    assert bits(one[0]) != bits(other[0])


@pytest.mark.parametrize("case", RANDOM)
def test_a_draw_does_not_depend_on_what_other_threads_draw(case: str) -> None:
    forward, kind = forward_of(case), CASES[case][2]
    draws = 20

    def drawn(seed: int) -> list[object]:
        generator = seeded_generator(seed)
        made: list[object] = []
        for _ in range(draws):
            with kind(generator):
                made.append(bits(forward()))
        return made

    alone = {seed: drawn(seed) for seed in (1, 2)}
    assert alone[1] != alone[2]
    together: dict[int, list[object]] = {}
    start = threading.Barrier(3)

    def run(place: int, seed: int) -> None:
        start.wait()
        together[place] = drawn(seed)

    threads = [threading.Thread(target=run, args=(place, seed)) for place, seed in enumerate((1, 1, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == {0: alone[1], 1: alone[1], 2: alone[2]}


def draw_and_fail() -> None:
    F.dropout(torch.ones(100))
    torch.rand(3)
    raise ZeroDivisionError


@pytest.mark.parametrize("kind", [Routed, taking_turns])
def test_the_global_generator_is_given_back_after_an_error(kind: Seeded) -> None:
    before = torch.default_generator.get_state()
    with pytest.raises(ZeroDivisionError), kind(seeded_generator()):
        draw_and_fail()
    assert torch.equal(torch.default_generator.get_state(), before)
    assert bits(F.dropout(torch.ones(9), 0.5, training=False)) == bits(torch.ones(9))


def test_trying_a_model_that_fails_gives_the_generator_back() -> None:
    before = torch.default_generator.get_state()
    with pytest.raises(ZeroDivisionError):
        how_it_draws(draw_and_fail, CPU)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_taking_turns_draws_what_the_client_s_generator_would() -> None:
    client, twin = seeded_generator(3), seeded_generator(3)
    with taking_turns(client):
        drawn = torch.rand(5)
    assert torch.equal(drawn, torch.rand(5, generator=twin))
    assert torch.equal(client.get_state(), twin.get_state())


# --- routed functions ----------------------------------------------------------------------------------------------


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_routed_dropout_zeroes_the_right_share_and_keeps_the_mean(p: float) -> None:
    n = 40_000
    with Routed(seeded_generator()):
        made = nn.Dropout(p)(ones(n))
    deviation = (p * (1 - p) / n) ** 0.5
    assert abs((made == 0).float().mean().item() - p) < 5 * deviation
    assert sorted(set(made[made != 0].tolist())) == pytest.approx([1 / (1 - p)])
    assert abs(made.mean().item() - 1) < 5 * deviation / (1 - p)


def test_routed_dropout_draws_every_entry_by_itself() -> None:
    with Routed(seeded_generator()):
        made = F.dropout(ones(300, 300), 0.5) != 0
    for together in (made[1:] & made[:-1], made[:, 1:] & made[:, :-1]):
        assert together.float().mean().item() == pytest.approx(0.25, abs=0.01)


def assert_drops_whole(made: Tensor, dims: int) -> None:
    """Either all or nothing of the last ``dims`` dimensions is dropped, and each by itself."""
    blocks = made.flatten(made.ndim - dims)
    assert (blocks == blocks[..., :1]).all()
    kept = blocks[..., 0]
    assert set(kept.flatten().tolist()) == {0, 2}
    for sample in kept if kept.ndim > 1 else [kept]:
        assert set(sample.tolist()) == {0, 2}  # with 64 channels: never all alike


@pytest.mark.parametrize(
    ("function", "shape", "dims"),
    [
        (F.dropout1d, (3, 64, 5), 1),
        (F.dropout1d, (64, 5), 1),
        (F.dropout2d, (3, 64, 5, 2), 2),
        (F.dropout3d, (3, 64, 2, 2, 2), 3),
        (F.dropout3d, (64, 2, 2, 2), 3),
    ],
)
def test_routed_channel_dropout_drops_whole_channels(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], dims: int
) -> None:
    with Routed(seeded_generator()):
        assert_drops_whole(function(ones(*shape)), dims)


@pytest.mark.filterwarnings("ignore:dropout2d. Received a 3-?D input")
def test_dropout2d_reads_three_dimensions_as_pytorch_does() -> None:
    with taking_turns(seeded_generator()):
        assert_drops_whole(F.dropout2d(ones(3, 64, 5)), 1)  # samples, channels, length
    with Routed(seeded_generator()):
        assert_drops_whole(F.dropout2d(ones(3, 64, 5)), 1)


@pytest.mark.parametrize("function", [F.dropout, F.dropout1d])
def test_probability_one_drops_all_and_zero_nothing(function: Callable[..., Tensor]) -> None:
    with Routed(seeded_generator()):
        assert function(ones(4, 5), 1.0).tolist() == [[0] * 5] * 4
        assert function(ones(4, 5), 0.0).tolist() == [[1] * 5] * 4
        assert function(ones(4, 5), 0.5, training=False).tolist() == [[1] * 5] * 4


def test_routed_dropout_in_place_changes_its_input_and_otherwise_does_not() -> None:
    with Routed(seeded_generator()):
        x, y = ones(50), ones(50)
        outside = F.dropout(x, 0.5)
        inside = F.dropout(y, 0.5, inplace=True)
        gone = F.dropout(z := ones(5), 1.0, inplace=True)
    assert x.tolist() == [1] * 50
    assert outside is not x
    assert inside is y
    assert set(y.tolist()) == {0, 2}
    assert gone is z
    assert z.tolist() == [0] * 5


def test_the_gradient_of_routed_dropout_is_its_mask() -> None:
    x = ones(60).requires_grad_()
    with Routed(seeded_generator()):
        made = F.dropout(x, 0.5)
    made.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, made.detach())


def test_routed_dropout_keeps_the_type() -> None:
    with Routed(seeded_generator()):
        assert F.dropout(ones(4).to(torch.bfloat16), 0.5).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "draw",
    [
        lambda **g: torch.rand(5, **g),
        lambda **g: torch.randn(5, **g),
        lambda **g: torch.randint(100, (5,), **g),
        lambda **g: torch.randperm(20, **g),
        lambda **g: torch.bernoulli(torch.full((20,), 0.5), **g),
        lambda **g: torch.multinomial(torch.ones(9), 4, **g),
        lambda **g: torch.normal(torch.zeros(5), torch.ones(5), **g),
        lambda **g: torch.zeros(20).bernoulli_(0.5, **g),
        lambda **g: torch.zeros(5).normal_(**g),
        lambda **g: torch.zeros(5).uniform_(**g),
        lambda **g: torch.zeros(5).random_(**g),
        lambda **g: torch.zeros(5).exponential_(**g),
        lambda **g: torch.ones(9).multinomial(4, **g),
    ],
)
def test_the_usual_random_functions_are_routed(draw: Callable[..., Tensor]) -> None:
    expected = draw(generator=seeded_generator(8))
    with Routed(seeded_generator(8)):
        assert bits(draw()) == bits(expected)
    with Routed(seeded_generator(9)):
        assert bits(draw(generator=seeded_generator(8))) == bits(expected)  # one that was asked for stays


def test_functions_without_chance_are_passed_on() -> None:
    generator = seeded_generator()
    before = generator.get_state()
    with Routed(generator):
        assert F.relu(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]
        assert torch.cat([ones(1), ones(2)]).tolist() == [1, 1, 1]
    assert torch.equal(generator.get_state(), before)


def test_routing_holds_for_one_thread_only() -> None:
    generator = seeded_generator()
    made: list[Tensor] = []
    saved = torch.default_generator.get_state()
    with Routed(generator):
        before = generator.get_state()
        thread = threading.Thread(target=lambda: made.append(torch.rand(3)))
        thread.start()
        thread.join()
        assert torch.equal(generator.get_state(), before)
    assert len(made) == 1
    torch.default_generator.set_state(saved)
