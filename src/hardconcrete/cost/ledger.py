"""Expected and delivered cost: one polynomial in the numbers of units that are alive.

A weight counts when its input unit and its output unit are alive, so a layer costs the product of
two sizes, and a size is a sum over units. What a unit needs to be alive is a conjunction of
clauses, each a disjunction of independent gates: a feature map of LeNet-5 needs its own gate, and
one of those of its 16 inputs to the dense layer.
"""

from dataclasses import dataclass, fields, replace
from functools import reduce

import torch
from torch import Tensor

KINDS = ("params", "macs", "weight_bytes")
"""The costs of a ledger, in the order of its results; as ``count`` counts them."""

TINY = 1e-30
"""Instead of a division by zero."""

SURE = 1e-12
"""A group that is left with nothing, or not, less often is not in doubt."""

FEW = 6
"""Groups that are taken to be in doubt where code is compiled or captured: none can be asked."""

NONE = 1e-6
"""An axis that is expected to have fewer indices has none, and what is as likely is not there."""


@dataclass(frozen=True, eq=False)
class Ledger:
    """What a model costs, given which of its gates are open. All indices are made once.

    A strand is a set of indices along axes that are kept by formulas of their own; most are the
    units of a group, wherever they lie. The size of an axis is what always stays, plus a multiple
    of each strand's. A term is a number times a product of quantities: sizes, spreads of strands,
    or numbers of inputs that layers select. Indices of -1 stand for the number 1.

    Args:
        dense: the cost of the model without gates.
        clauses: gates of every clause that has several, of which one must be open, by number:
            first those that are tied, then all.
        formulas: what must all hold, by number: first these clauses, then such gates.
        needs: the formula of every kind of index.
        hosts: the formula of the unit that such an index belongs to.
        members: how many indices of each kind a strand has.
        kinds: which kinds it has.
        owners: the group of every strand; the last stands for none.
        wholes: for every strand the one that has an index whenever it has: that of its group.
        cases: of how many of these it is asked at most, for a mean, whether nothing is left.
        base: indices of every axis that always stay.
        times: how often an axis has each strand.
        holds: whether it has it; the last stands for what always stays.
        spare: how often an axis has one unit of each group that is never empty.
        arriving: for an axis that selects among its inputs the axis without selection, else itself.
        others: for each axis of a gated parameter the other axes of it.
        sources: by which of these, or by something without gates at the end, the units of a group
            are read, and by which they are made.
        rounds: how often one death can bring another.
        tied: gates, or none, that count while one of some axes of gated parameters, or of some of
            their lines, is not cut off.
        stands: which ones, by number, first axes and then lines: indices of parameters with gates
            on single weights.
        each: these gates.
        ends: the formulas of the units at the ends of each such weight.
        at: its lines.
        lines: how many there are.
        selecting: whether a layer selects among its inputs.
        idles: axes by which layers select among inputs that others read too.
        idle: the strands of each; empty for one that always has an input.
        cuts: 0 for what is cut off where nothing is left along it, else 1.
        alike: for every gate a number, the same for those of one site that cost the same.
        pairs: strands of one group whose sizes are multiplied, the finer one last.
        factors: the quantities of each term.
        prices: the number of each term, by kind of cost.
        constant: what no term has.
        told: where units were removed in training, the place of every gate among those that are
            left, and thus told; -1 for one that is gone.
    """

    dense: Tensor
    clauses: Tensor
    formulas: Tensor
    needs: Tensor
    hosts: Tensor
    members: Tensor
    kinds: Tensor
    owners: Tensor
    wholes: Tensor
    cases: int
    base: Tensor
    times: Tensor
    holds: Tensor
    spare: Tensor
    arriving: Tensor
    others: Tensor
    sources: Tensor
    rounds: int
    tied: Tensor
    stands: Tensor
    each: Tensor
    ends: Tensor
    at: Tensor
    lines: int
    selecting: bool
    idles: Tensor
    idle: Tensor
    cuts: Tensor
    alike: Tensor
    pairs: Tensor
    factors: Tensor
    prices: Tensor
    constant: Tensor
    told: Tensor | None = None

    def among(self, left: Tensor, gates: int) -> "Ledger":
        """The same, asked about some of so many gates, by number; the others are shut for good."""
        told = torch.full((gates,), -1, device=left.device)
        told[left] = torch.arange(len(left), device=left.device)
        return replace(self, told=told)

    def kinds_of_gates(self) -> Tensor:
        """As ``alike``, of the gates that are left."""
        if self.told is None:
            return self.alike
        left = self.told >= 0
        return self.alike[left][self.told[left].argsort()]

    def cost(self, gates: Tensor) -> Tensor:
        """Of every kind, what compaction leaves where these gates, 0 or 1, are open.

        For probabilities, of independent gates, it is the mean as long as no group can be left
        with nothing, and near it while that is unlikely; its gradient leaves out what such a group
        takes along.
        """
        now = self._settled(gates)
        return self._total(*self._left(now.number, now.some, now.reached), now.spread, now)

    def mean(self, gates: Tensor) -> Tensor:
        """The mean over draws of independent gates that are open with these probabilities.

        By cases: each of the groups that are in doubt is left with nothing, or not. Exact unless
        that are more than twelve (six where code is compiled), a gate stands in two clauses of one
        formula, or named sites gate one of several layers that read or make a unit; bytes of the
        indices that layers select are near it. Single weights of a unit are taken to be shut
        together only where that is certain.
        """
        weights, given = self._cases(gates)
        now = self._settled(gates, given)
        numbers = now.number * given  # E[n | case], since n is 0 where nothing is left
        together = (_pairs(now.number, self.pairs) + now.spread) * given[:, self.pairs[:, 1]]
        spreads = together - _pairs(numbers, self.pairs)
        some = (now.some * given).clamp(max=1)
        idle = self._idle(gates, given, replace(now, some=some)) if len(self.idles) else None
        return weights @ self._total(*self._left(numbers, some, now.reached, idle), spreads, now)

    def sizes(self, gates: Tensor) -> Tensor:
        """Of every axis, as ``cost``."""
        now = self._settled(gates)
        return self._left(now.number, now.some, now.reached)[0]

    @property
    def dense_sizes(self) -> Tensor:
        """The size of every axis with all gates open."""
        return self._sizes(self.members.sum(1))

    def _settled(self, gates: Tensor, given: Tensor | None = None) -> "Settled":
        """What is known of the strands when all that one death brings has been followed.

        A layer of which nothing is left takes along what it alone reads or makes. No gate is to
        take all others along: this has no gradient. Of probabilities both is the smaller and
        either the larger one: what is certain about all but one is exact, and going round in
        circles changes nothing.
        """
        gates = self._asked(gates)
        live = self._everything(gates)
        formulas = self._formulas(gates, live)
        number, spread, some = self._moments(formulas)
        reached = torch.ones_like(some)
        for _ in range(self.rounds):
            now = some.detach()
            if given is not None:
                now = (now * given.detach()).clamp(max=1)
            alive = self.holds * _then(torch.minimum(now, reached), 1)[..., None, :]
            rest = _then(_then(alive.amax(-1), 1)[..., self.others].amin(-1), 1)
            groups = (self.sources * rest[..., None, None, :]).amax(-1).amin(-2)  # read, and made
            reached = _then(groups, 1)[..., self.owners]
            if len(self.tied):
                axes, lines = (rest[..., :-1] > NONE).double(), self._lines(gates, formulas)
                live = torch.cat([axes, lines.expand(*axes.shape[:-1], -1)], -1)
                formulas = self._formulas(gates, live)
                number, spread, some = self._moments(formulas)
        return Settled(formulas, number, spread, some, reached, live)

    def _idle(self, gates: Tensor, given: Tensor, now: "Settled") -> tuple[Tensor, Tensor]:
        """Of layers that select among their inputs: how likely none is left, and all that arrives.

        Their own gates are then shut; units that another layer reads too are there because of it.
        """
        chance = _product(1 - _then(torch.minimum(now.some, now.reached), 0)[..., self.idle])
        arriving = []
        for row, cut in zip(self.arriving[self.idles].split(1), self.cuts, strict=True):
            number, _, some = self._moments(self._formulas(self._asked(gates), now.live * cut))
            sizes, _ = self._left(number * given, (some * given).clamp(max=1), now.reached)
            arriving.append(sizes.index_select(-1, row))
        return chance, torch.cat(arriving, -1)

    def _all(self, formulas: Tensor) -> Tensor:
        """The mean number of indices a layer has where it reads all that arrives, else none."""
        needs, hosts = formulas[..., self.needs], formulas[..., self.hosts]
        sure = (1 - hosts + needs).clamp(min=TINY)  # that an index does not arrive unread
        every = (sure.log() @ self.members.T) @ self.times.T
        return every.exp() * (self.base + ((needs / sure) @ self.members.T) @ self.times.T)

    def _lines(self, gates: Tensor, formulas: Tensor) -> Tensor:
        """Along which indices there is a single weight that is open, and has its other ends."""
        if not self.lines:
            return gates.new_ones(0)
        alive = (_then(formulas, 1)[..., self.ends] > NONE).double()
        is_open = (gates[self.each] > NONE).double()
        found = alive.new_zeros(*alive.shape[:-2], self.lines + 1)
        for d in range(self.ends.shape[1]):
            others = [alive[..., k] for k in range(self.ends.shape[1]) if k != d]
            values = reduce(torch.mul, others, is_open.expand(alive.shape[:-1]))
            at = self.at[:, d].remainder(self.lines + 1).expand(alive.shape[:-1])
            found = found.scatter_reduce(-1, at, values, "amax")
        return found[..., :-1]

    def _everything(self, gates: Tensor) -> Tensor:
        """Nothing is cut off."""
        return gates.new_ones(self.sources.shape[2] - 1 + self.lines)

    def _asked(self, gates: Tensor) -> Tensor:
        """Of all gates, those that are gone included."""
        if self.told is None:
            return gates.double()
        return _then(gates.double(), 0)[self.told]

    def _formulas(self, gates: Tensor, live: Tensor) -> Tensor:
        """The probability of each, where what is not live is cut off."""
        values = gates
        if len(self.tied):
            tied = _then(gates, 1)[self.tied] * live[..., self.stands].amax(-1)
            values = torch.cat([tied, gates.expand(*live.shape[:-1], -1)], -1)
        if len(self.clauses):
            values = torch.cat([_either(_then(values, 0)[..., self.clauses]), values], -1)
        return _product(_then(values, 1)[..., self.formulas])

    def _moments(self, formulas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the strands the mean number of indices and the probability that there is one.

        Between them, what the mean of a product of two numbers has more than their means.
        """
        needs = formulas[..., self.needs]
        spread = needs.new_zeros(*needs.shape[:-1], 0)
        if len(self.pairs):
            alone = needs * (1 - formulas[..., self.hosts])
            spread = (alone @ self.members.T)[..., self.pairs[:, 1]]
        return needs @ self.members.T, spread, _either(_then(needs, 0)[..., self.kinds])

    def _cases(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """Of the groups in doubt each has an open gate or not: how likely every case is.

        And what it makes of the mean number in every strand.
        """
        gates = self._asked(gates)
        some = self._moments(self._formulas(gates, self._everything(gates)))[2]
        whole = self.wholes == torch.arange(len(some), device=some.device)
        doubt = torch.where(whole, some * (1 - some), -1.0).detach()
        many = min(self.cases, FEW if _fixed(doubt) else int((doubt > SURE).sum()))
        doubtful = doubt.topk(many).indices
        digits = torch.arange(many, device=some.device)
        left = (torch.arange(2**many, device=some.device)[:, None] >> digits) & 1
        chosen = some[doubtful]
        weights = torch.where(left > 0, chosen, 1 - chosen).unbind(1)
        given = some.new_ones(len(left), len(some))
        given = given.index_copy(1, doubtful, left / chosen.clamp(min=TINY))
        return reduce(torch.mul, weights, some.new_ones(len(left))), given[:, self.wholes]

    def _total(self, sizes: Tensor, chosen: Tensor, spread: Tensor, now: "Settled") -> Tensor:
        """All terms, from the mean sizes of the axes; there may be several cases."""
        quantities = [sizes]
        if len(self.pairs):
            quantities.append(spread * now.reached[..., self.pairs[:, 1]])
        if self.selecting:
            quantities.append((chosen - self._all(now.formulas)).clamp(min=0))
        values = _then(torch.cat(quantities, -1), 1)
        return self.constant + _product(values[..., self.factors]) @ self.prices.T

    def _left(
        self,
        numbers: Tensor,
        some: Tensor,
        reached: Tensor,
        idle: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Sizes of the axes, and how many of its indices each selects.

        Every group keeps one unit; nothing left to select, all stays.
        """
        numbers = numbers * (reached / torch.maximum(some, reached).clamp(min=TINY))
        empty = 1 - torch.minimum(some, reached)[..., : self.spare.shape[1]]
        own, spare = self._sizes(numbers), empty @ self.spare.T
        sizes = own + spare
        if not self.selecting:
            return sizes, sizes.new_zeros(0)
        arriving, has_some = sizes[..., self.arriving], own > NONE
        chosen = torch.where(has_some & (arriving - sizes > NONE), sizes, 0.0)
        sizes = torch.where(has_some, sizes, arriving)
        if idle is None:
            return sizes, chosen
        chance, all_of_it = idle
        rows = self.idles
        mean = own[..., rows] + (1 - chance) * spare[..., rows] + chance * all_of_it
        return sizes.index_copy(-1, rows, mean), chosen

    def _sizes(self, numbers: Tensor) -> Tensor:
        return self.base + numbers @ self.times.T

    def to(self, device: torch.device) -> "Ledger":
        """The same on another device."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: v.to(device) for k, v in own.items() if isinstance(v, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Settled:
    """What is known of the strands, perhaps case by case.

    Args:
        formulas: the probability of each.
        number: the mean number of indices.
        spread: what the mean of a product of two numbers has more than their means.
        some: the probability that there is one.
        reached: whether something reads and something makes their units.
        live: 0 for what is cut off, else 1.
    """

    formulas: Tensor
    number: Tensor
    spread: Tensor
    some: Tensor
    reached: Tensor
    live: Tensor


def _fixed(values: Tensor) -> bool:
    """Whether what is computed may not depend on numbers."""
    if values.is_meta or torch.compiler.is_compiling():
        return True
    return values.is_cuda and torch.cuda.is_current_stream_capturing()


def _then(values: Tensor, last: float) -> Tensor:
    """With a number at the end, where the index -1 finds it."""
    return torch.cat([values, values.new_full((*values.shape[:-1], 1), last)], -1)


def _pairs(numbers: Tensor, pairs: Tensor) -> Tensor:
    """Products of two each."""
    return numbers[..., pairs[:, 0]] * numbers[..., pairs[:, 1]]


def _product(values: Tensor) -> Tensor:
    """Over the last dimension, a power of two, by halves: torch.prod waits for the device."""
    while values.shape[-1] > 1:
        first, second = values.chunk(2, -1)
        values = first * second
    return values.squeeze(-1)


def _either(values: Tensor) -> Tensor:
    """The probability of one or more, exact however small they are; with slopes at 0 and 1 too."""
    sure = values >= 1
    many = sure.sum(-1)
    others = torch.log1p(-values.masked_fill(sure, 0.0)).sum(-1)  # that none of them, as a log
    lacks = torch.where(sure, 1 - values, 0.0).sum(-1)  # 0: for the slope of the one that is sure
    one = 1 - others.exp() * torch.where(many == 1, lacks, 0.0)
    return torch.where(many > 0, one, -torch.expm1(others))
