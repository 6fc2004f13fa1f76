"""Which bits a mixed twin's products get: those that cost the fewest bits of coded KV, under an average.

A uniform twin is fitted first. Then, layer by layer and with the true K and V, one product at a time is rounded in
another way, and K and V of the next layer are predicted again. The coder takes a value's bits from the scale s of its
channel's errors: twice the scale is one bit more. So what an option costs is the sum of log2 (s / the uniform twin's s)
over the channels of that layer, in bits a token. Costs of several products are taken to add up, which holds for small
changes. Looking two layers ahead chose no better on a model of 4 layers; costs times the number of layers above chose
worse on one of 30.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.past import OwnPast
from prolepsis.coding.predictors import Segment
from prolepsis.coding.predictors.twin import values_of
from prolepsis.coding.twin_calibration import Progress, fit_twin
from prolepsis.coding.twin_network import MIXED, Target, TwinNetwork, compile_products
from prolepsis.coding.twin_options import OWN, PRODUCTS, ROUNDINGS, bits_of, weights_of
from prolepsis.coding.twin_profile import TwinProfile
from prolepsis.coding.twin_run import Workspace
from prolepsis.errors import InputError
from prolepsis.kernels.qmatmul import NATURAL
from prolepsis.kernels.twin_pass import GROUPS, MADE, TARGETS, Network
from prolepsis.quant.allocation import allocate, least_bits
from prolepsis.quant.matrices import Placed, kept, packed

Floats = NDArray[np.float32]
Choice = NDArray[np.uint8]

_TOKENS = 512  # that errors are looked at in, at most
_TINY = 1e-12
ALL = -1
"""All of PRODUCTS, in `mean_bits`."""


def calibrate_mixed(
    sample: CalibrationSample, target: Target, bits: float, on_progress: Progress | None = None
) -> TwinProfile:
    """As `calibrate_twin`, for a twin of at most `bits` a weight on average.

    Where no product of the target has more, all are taken as they are, as "twin-int8" does.

    Raises:
        InputError: as `calibrate_twin`; or no choice has so few bits.
    """
    what = things(target)
    least = least_bits([thing.sizes for thing in what], weights_in(target), bits)
    if least is not None:
        raise InputError(f"a twin of this model takes at least {least:g} bits a weight, and is to have {bits:g}")
    if all(thing.sizes[0] <= bits * thing.weights for thing in what):
        own = np.full((target.plan.layers, len(PRODUCTS)), OWN, np.uint8)
        return fit_twin(sample, TwinNetwork.mixed(target, own), MIXED, on_progress)
    layers = target.plan.layers
    stages = 3 * layers - 1

    def stage(begin: int) -> Callable[[int, int], None]:
        def on_layer(done: int, of: int) -> None:
            if on_progress is not None:
                on_progress(begin + done, stages)

        return on_layer

    first = uniform(target, bits)
    network = TwinNetwork.mixed(target, first)
    corrections = fit_twin(sample, network, MIXED, stage(0)).corrections
    costs = measured(sample, network, corrections, first, stage(layers))
    choice = chosen(target, costs, bits)
    return fit_twin(sample, TwinNetwork.mixed(target, choice), MIXED, stage(2 * layers - 1))


class Thing(NamedTuple):
    """A product of a layer, so many weights, and the options it has. sizes: bits in memory of each."""

    layer: int
    column: int
    weights: int
    options: tuple[int, ...]
    sizes: tuple[int, ...]


def things(target: Target) -> list[Thing]:
    """All that something is chosen for: what the last layer makes of its K and V, no prediction depends on.

    No option is larger than the target's own weights, which lose nothing.
    """
    return [_thing(target, layer, column) for layer in range(target.plan.layers - 1) for column in range(len(PRODUCTS))]


def _thing(target: Target, layer: int, column: int) -> Thing:
    weights, matrices = target.plan.weights, target.product(layer, PRODUCTS[column])
    own = bits_of(weights, matrices, OWN)
    smaller = {option: bits_of(weights, matrices, option) for option in ROUNDINGS}
    sizes = {OWN: own} | {option: size for option, size in smaller.items() if size < own}
    return Thing(layer, column, weights_of(weights, matrices), tuple(sizes), tuple(sizes.values()))


def weights_in(target: Target) -> int:
    """How many weights the `things` have."""
    return sum(thing.weights for thing in things(target))


def as_choice(target: Target, what: list[Thing], options: list[int]) -> Choice:
    """uint8 [layers, len(PRODUCTS)]. options: for each thing, which of its own."""
    choice = np.zeros((target.plan.layers, len(PRODUCTS)), np.uint8)
    for thing, option in zip(what, options, strict=True):
        choice[thing.layer, thing.column] = thing.options[option]
    return choice


def mean_bits(target: Target, choice: Choice) -> dict[int, float]:
    """Bits a weight of each of PRODUCTS, scales included, and of all together, which has the number ALL."""
    taken, weights = dict.fromkeys((ALL, *PRODUCTS), 0), dict.fromkeys((ALL, *PRODUCTS), 0)
    for thing in things(target):
        for key in (ALL, PRODUCTS[thing.column]):
            taken[key] += thing.sizes[thing.options.index(choice[thing.layer, thing.column])]
            weights[key] += thing.weights
    return {key: taken[key] / max(1, weights[key]) for key in taken}


def uniform(target: Target, bits: float) -> Choice:
    """The same grid everywhere, the largest that has at most `bits` a weight; or the target's weights, where they have
    no more. The smallest, where all are larger."""
    what = things(target)

    def best(thing: Thing) -> int:
        worth = [size if size <= bits * thing.weights else -size for size in thing.sizes]
        return worth.index(max(worth))

    return as_choice(target, what, [best(thing) for thing in what])


def chosen(target: Target, costs: list[list[float]], bits: float) -> Choice:
    """The cheapest of at most `bits` a weight on average. costs: of each thing's options (`measured`).

    Raises:
        InputError: no choice has so few.
    """
    what = things(target)
    found = allocate([thing.sizes for thing in what], costs, int(bits * weights_in(target)))
    return as_choice(target, what, found.choice)


def measured(
    sample: CalibrationSample,
    network: TwinNetwork,
    corrections: NDArray[np.uint8],
    choice: Choice,
    on_layer: Progress = lambda done, of: None,
) -> list[list[float]]:
    """What the options of each of `things` cost, in coded bits a token, beside those of `choice`, which cost 0.

    network: of `choice`; corrections: fitted to it. on_layer(layers done, of layers).
    """
    base, target = network.corrected(list(corrections)), network.target
    walk, costs = _Walk(sample, base, target), []
    for layer in range(target.plan.layers - 1):
        tried = [_thing(target, layer, column) for column in range(len(PRODUCTS))]
        logs = np.log2(walk.layer(layer, _changed(network, base, choice, tried)) + _TINY)
        bits = iter((logs[1:] - logs[0]).sum(axis=(1, 2, 3)).tolist())
        for thing in tried:
            now = choice[layer, thing.column]
            costs.append([0.0 if option == now else next(bits) for option in thing.options])
        on_layer(layer + 1, target.plan.layers - 1)
    return costs


def _changed(network: TwinNetwork, base: Network, choice: Choice, tried: list[Thing]) -> list[Network]:
    """The network as it is, but with the weights of one layer alone; then with each option of that layer's products
    which `choice` does not take."""
    target, layer, placed = network.target, tried[0].layer, list[Placed]()
    groups = base.groups.copy()
    for row in groups[GROUPS * layer : GROUPS * (layer + 1)]:
        if row[2] == MADE:
            first, row[0] = int(row[0]), len(placed)
            placed += [kept(network.made, matrix) for matrix in range(first, first + int(row[1]))]
    tables = [groups]
    for thing in tried:
        group = PRODUCTS[thing.column]
        matrices = target.product(layer, group)
        for option in thing.options:
            if option == choice[layer, thing.column]:
                continue
            row = matrices.start, len(matrices), TARGETS, 0, target.order(layer, group)
            if option != OWN:
                row = len(placed), len(matrices), MADE, 0, NATURAL
                placed += [target.rounded(matrix, option) for matrix in matrices]
            tables.append(groups.copy())
            tables[-1][GROUPS * layer + group] = row
    made = packed(placed)
    for table in tables:
        compile_products(base._replace(made=made, groups=table[GROUPS * layer : GROUPS * (layer + 1)]))
    return [base._replace(made=made, groups=table) for table in tables]


class _Walk:
    """A twin on its way through the first tokens of a sample."""

    def __init__(self, sample: CalibrationSample, base: Network, target: Target) -> None:
        self._sample, self._dtype, self._work = sample, sample.geometry.dtype, Workspace(target)
        self._past = OwnPast(sample.geometry._replace(layers=1), target.positions)
        self._hidden = np.empty((min(_TOKENS, sample.tokens), target.plan.hidden), np.float32)
        for at, segment, _ in self._parts(0, 1):
            self._work.begin(base, segment, self._past)
            self._work.embed()
            self._hidden[at] = self._work.hidden

    def layer(self, layer: int, networks: Sequence[Network]) -> NDArray[np.float64]:
        """Sums of errors in the layer above, [networks, 2, kv_heads, head_dim]. Goes on with the first network."""
        sums: list[Any] = [0.0] * len(networks)
        for at, segment, true in self._parts(layer, 2):
            before = self._hidden[at].copy()
            for number, network in enumerate(networks):
                self._work.begin(network, segment, self._past)
                self._work.hidden = before
                self._work.predict(layer)
                self._work.actual[...] = true[0]
                self._work.finish(layer, 0)
                if number == 0:
                    self._hidden[at] = self._work.hidden
                self._work.predict(layer + 1)
                missed = np.nan_to_num(true[1] - self._work.means, posinf=0, neginf=0)
                sums[number] += np.abs(missed).sum(axis=1, dtype=np.float64)
        return np.stack(sums)

    def _parts(self, layer: int, count: int) -> Iterator[tuple[slice, Segment, list[Floats]]]:
        """Tokens, segment, and true K and V of so many layers from this one on, which is in the past."""
        for parts in zip(*(self._sample.layer_parts(layer + above) for above in range(count)), strict=True):
            at, segment, scalars, steps = parts[0]
            if at.stop > len(self._hidden):
                return
            self._past.put(0, segment.start, scalars, steps)
            yield at, segment, [values_of(scalars, steps, self._dtype) for _, _, scalars, steps in parts]
