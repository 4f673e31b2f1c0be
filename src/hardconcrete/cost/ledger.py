"""Expected and delivered cost: one polynomial in the probabilities that gates are open.

1. Gate i is open with probability p_i, independently of the others. Of a delivered cost all p_i
   are 0 or 1.
2. A *clause* holds if at least one of its gates is open: P = 1 - prod_i (1 - p_i). A *formula* is
   a conjunction of clauses; its probability is the product of theirs. A feature map of LeNet-5
   needs two clauses: its gate, and one of the gates on its 16 inputs to the dense layer.
3. An *index set* s holds indices of one group along axes that are kept for the same reasons. Most
   index sets are the units of a group. Its mean count is n_s = sum_k m_sk P(f_k), where m_sk of
   its indices need the formula f_k.
4. The mean size of axis a is S_a = c_a + sum_s t_as n_s: c_a indices always stay, and t_as is the
   number of times that the axis contains index set s.
5. A weight counts while its input unit and its output unit are alive, so a layer costs a price
   times a product of sizes. The cost of the model is a constant plus the sum of these terms.
6. Two sizes in one term can depend on the same group. Then E[S_a S_b] also has the terms
   t_as t_br Cov(n_s, n_r). With r the finer index set, Cov(n_s, n_r) = sum_i P(f_i) (1 - P(u_i)).
   Here i runs over the indices of r, f_i is what index i needs, and u_i is what its unit needs;
   f_i implies u_i.
7. A group keeps at least one unit. A layer without inputs or outputs removes what only it reads or
   makes. Both depend on whether an index set is empty, so a mean is taken case by case.
"""

from dataclasses import dataclass, fields, replace
from functools import reduce

import torch
from torch import Tensor

KINDS = ("params", "macs", "weight_bytes", "kv_bytes")
"""The kinds of cost, in the order of results; the same as the fields of ``Count``.

A cost of NaN could not be determined."""

MIN_DIVISOR = 1e-30
"""Divisors are at least this, to avoid a division by zero."""

MIN_DOUBT = 1e-12
"""A group is in doubt if P(empty) P(not empty) is larger than this."""

MAX_DOUBTFUL_GROUPS_COMPILED = 6
"""The number of groups in doubt where code is compiled or captured and cannot count them."""

MIN_EXPECTED_COUNT = 1e-6
"""An axis, index or gate that is expected less often than this counts as absent."""


@dataclass(frozen=True, eq=False)
class Ledger:
    """The cost of a model as a function of its gates. All tables of indices are made once.

    The module docstring explains the terms. An index of -1 in a table stands for the number 1 in a
    product, and for 0 in a clause.

    Args:
        dense: cost of the model without gates, by kind of cost.
        clauses: the gates of each clause with several, as positions in the list of conditional
            gates followed by all gates.
        formulas: the clauses of each formula, as positions in the list of ``clauses`` followed by
            conditional gates and all gates.
        index_formulas: the formula f_k of each kind of index.
        unit_formulas: the formula of the unit that each kind of index belongs to.
        kind_counts: m_sk, the number of indices of each kind in each index set.
        kinds_of_set: the kinds of each index set.
        group_of_set: the group of each index set; -1 for indices that belong to no group.
        whole_set: for each index set the index set of its whole group, which is empty only if this
            one is; the index set itself if it has no group.
        max_doubtful: the largest number of groups in doubt that ``mean`` distinguishes cases of.
        fixed_counts: c_a, the number of indices of each axis that always stay.
        set_multiples: t_as, the number of times that each axis contains each index set.
        contains_set: whether t_as > 0; the last column is whether c_a > 0.
        unit_widths: the indices that one unit takes along each axis, for each group that keeps
            at least one unit.
        arriving_axes: for an axis that selects among its inputs the axis before the selection, for
            any other axis itself.
        other_axes: for each axis of a gated parameter the other axes of that parameter.
        read_and_made_by: the axes of gated parameters that read the units of each group, and those
            that make them; the last column is any reader or maker without gates.
        liveness_rounds: how many times in a row one removal can cause another.
        conditional_gates: gates that count only while one of some axes or lines is not cut off; -1
            for a condition without a gate. A line is one index along an axis of a parameter with
            gates on single weights.
        condition_axes: these axes and lines of each conditional gate; lines are numbered after
            axes.
        weight_gates: the gates on single weights.
        weight_unit_formulas: for each such gate the formulas of the units that the weight connects.
        weight_lines: for each such gate the lines that the weight lies on.
        line_count: the number of lines.
        has_selection: whether a layer selects among its inputs.
        idle_axes: axes that select among inputs which other layers read too. Such a layer is idle
            if none of its inputs is selected.
        idle_sets: the index sets of each of these axes.
        idle_cuts: for each of these axes 0 for what is cut off if it is idle, else 1.
        gate_kinds: a number for each gate; gates of one site with equal costs share a number.
        set_pairs: pairs of index sets of one group whose covariance a term needs, the finer one
            last.
        term_factors: the factors of each term, as positions in the list of sizes, covariances and
            numbers of selected inputs.
        term_prices: the price of each term, by kind of cost.
        constant_cost: cost that depends on no gate, by kind of cost.
        remaining_positions: after units were removed in training, the position of each original
            gate among the remaining gates; -1 if it is removed.
    """

    dense: Tensor
    clauses: Tensor
    formulas: Tensor
    index_formulas: Tensor
    unit_formulas: Tensor
    kind_counts: Tensor
    kinds_of_set: Tensor
    group_of_set: Tensor
    whole_set: Tensor
    max_doubtful: int
    fixed_counts: Tensor
    set_multiples: Tensor
    contains_set: Tensor
    unit_widths: Tensor
    arriving_axes: Tensor
    other_axes: Tensor
    read_and_made_by: Tensor
    liveness_rounds: int
    conditional_gates: Tensor
    condition_axes: Tensor
    weight_gates: Tensor
    weight_unit_formulas: Tensor
    weight_lines: Tensor
    line_count: int
    has_selection: bool
    idle_axes: Tensor
    idle_sets: Tensor
    idle_cuts: Tensor
    gate_kinds: Tensor
    set_pairs: Tensor
    term_factors: Tensor
    term_prices: Tensor
    constant_cost: Tensor
    remaining_positions: Tensor | None = None

    def for_remaining(self, remaining: Tensor, gates: int) -> "Ledger":
        """The same ledger for a model with some of its gates removed.

        Args:
            remaining: the numbers of the remaining gates, in their order.
            gates: the number of gates before.
        """
        positions = torch.full((gates,), -1, device=remaining.device)
        positions[remaining] = torch.arange(len(remaining), device=remaining.device)
        return replace(self, remaining_positions=positions)

    def remaining_gate_kinds(self) -> Tensor:
        """``gate_kinds`` of the remaining gates, in their order."""
        if self.remaining_positions is None:
            return self.gate_kinds
        remaining = self.remaining_positions >= 0
        return self.gate_kinds[remaining][self.remaining_positions[remaining].argsort()]

    def cost(self, gates: Tensor) -> Tensor:
        """The cost after compaction if these gates (0 or 1) are open, by kind of cost.

        Of probabilities it is the mean cost while no group can become empty, and close to it while
        that is unlikely. Its gradient ignores what an empty group would remove.
        """
        state = self._set_state(gates)
        sizes, selected = self._axis_sizes(state.mean_count, state.nonempty, state.connected)
        return self._total_cost(sizes, selected, state.covariance, state)

    def mean(self, gates: Tensor) -> Tensor:
        """The mean cost over draws of independent gates with these probabilities to be open.

        It is a sum over cases: each group in doubt is empty, or not. It is exact except where

        - more than twelve groups are in doubt (six if the code is compiled);
        - a gate is in two clauses of one formula;
        - named sites gate only one of several layers that read or make a unit;
        - layers select among their inputs: the bytes of the selected indices are approximate;
        - single weights are gated: the weights of a unit count as closed together only if that is
          certain.
        """
        weights, conditioning = self._cases(gates)
        state = self._set_state(gates, conditioning)
        counts = state.mean_count * conditioning  # E[n | case], since n is 0 if the set is empty
        products = _pair_products(state.mean_count, self.set_pairs) + state.covariance
        products = products * conditioning[:, self.set_pairs[:, 1]]
        covariances = products - _pair_products(counts, self.set_pairs)
        nonempty = (state.nonempty * conditioning).clamp(max=1)
        idle = None
        if len(self.idle_axes):
            idle = self._idle_selections(gates, conditioning, replace(state, nonempty=nonempty))
        sizes, selected = self._axis_sizes(counts, nonempty, state.connected, idle)
        return weights @ self._total_cost(sizes, selected, covariances, state)

    def sizes(self, gates: Tensor) -> Tensor:
        """The size of each axis, for gates as in ``cost``."""
        state = self._set_state(gates)
        return self._axis_sizes(state.mean_count, state.nonempty, state.connected)[0]

    @property
    def dense_sizes(self) -> Tensor:
        """The size of each axis with all gates open."""
        return self._sizes_from_counts(self.kind_counts.sum(1))

    def _set_state(self, gates: Tensor, conditioning: Tensor | None = None) -> "SetState":
        """The state of the index sets after every removal that another one causes.

        A layer with nothing left removes what only it reads or makes. This has no gradient, so that
        no gate is pushed to remove all others. Of probabilities, "and" is the minimum and "or" the
        maximum. That is exact if all but one are certain, and repeating it on a cycle changes
        nothing.
        """
        gates = self._all_gates(gates)
        uncut = self._nothing_cut(gates)
        formulas = self._formula_probabilities(gates, uncut)
        mean_count, covariance, nonempty = self._set_moments(formulas)
        connected = torch.ones_like(nonempty)
        for _ in range(self.liveness_rounds):
            now = nonempty.detach()
            if conditioning is not None:
                now = (now * conditioning.detach()).clamp(max=1)
            in_axis = self.contains_set * _append(torch.minimum(now, connected), 1)[..., None, :]
            axis_nonempty = _append(in_axis.amax(-1), 1)
            works = _append(axis_nonempty[..., self.other_axes].amin(-1), 1)
            read, made = (self.read_and_made_by * works[..., None, None, :]).amax(-1).unbind(-2)
            connected = _append(torch.minimum(read, made), 1)[..., self.group_of_set]
            if len(self.conditional_gates):
                axes = (works[..., :-1] > MIN_EXPECTED_COUNT).double()
                lines = self._open_lines(gates, formulas)
                uncut = torch.cat([axes, lines.expand(*axes.shape[:-1], -1)], -1)
                formulas = self._formula_probabilities(gates, uncut)
                mean_count, covariance, nonempty = self._set_moments(formulas)
        return SetState(formulas, mean_count, covariance, nonempty, connected, uncut)

    def _idle_selections(
        self, gates: Tensor, conditioning: Tensor, state: "SetState"
    ) -> tuple[Tensor, Tensor]:
        """The probability that each layer of ``idle_axes`` is idle, and its mean size if it is.

        An idle layer keeps all inputs that arrive. Its gates are closed then, so these inputs are
        there for other layers.
        """
        nonempty = torch.minimum(state.nonempty, state.connected)
        idle_probability = _product(1 - _append(nonempty, 0)[..., self.idle_sets])
        arriving_sizes = []
        arriving = self.arriving_axes[self.idle_axes].split(1)
        for axis, cut in zip(arriving, self.idle_cuts, strict=True):
            formulas = self._formula_probabilities(self._all_gates(gates), state.uncut * cut)
            counts, _, nonempty = self._set_moments(formulas)
            nonempty = (nonempty * conditioning).clamp(max=1)
            sizes, _ = self._axis_sizes(counts * conditioning, nonempty, state.connected)
            arriving_sizes.append(sizes.index_select(-1, axis))
        return idle_probability, torch.cat(arriving_sizes, -1)

    def _mean_if_all_selected(self, formulas: Tensor) -> Tensor:
        """For each axis E[size; every index that arrives is selected].

        An index that needs f and whose unit needs u is no obstacle with P = 1 - P(u) + P(f).
        """
        index, unit = formulas[..., self.index_formulas], formulas[..., self.unit_formulas]
        no_obstacle = (1 - unit + index).clamp(min=MIN_DIVISOR)
        log_all = (no_obstacle.log() @ self.kind_counts.T) @ self.set_multiples.T
        counts = (index / no_obstacle) @ self.kind_counts.T
        return log_all.exp() * (self.fixed_counts + counts @ self.set_multiples.T)

    def _open_lines(self, gates: Tensor, formulas: Tensor) -> Tensor:
        """1 for each line with an open weight whose other units are alive, else 0."""
        if not self.line_count:
            return gates.new_ones(0)
        alive = _append(formulas, 1)[..., self.weight_unit_formulas] > MIN_EXPECTED_COUNT
        alive = alive.double()
        is_open = (gates[self.weight_gates] > MIN_EXPECTED_COUNT).double()
        lines = alive.new_zeros(*alive.shape[:-2], self.line_count + 1)
        dims = range(self.weight_unit_formulas.shape[1])
        for d in dims:
            others = [alive[..., k] for k in dims if k != d]
            values = reduce(torch.mul, others, is_open.expand(alive.shape[:-1]))
            places = self.weight_lines[:, d].remainder(self.line_count + 1)
            places = places.expand(alive.shape[:-1])
            lines = lines.scatter_reduce(-1, places, values, "amax")
        return lines[..., :-1]

    def _nothing_cut(self, gates: Tensor) -> Tensor:
        """1 for every axis and line."""
        return gates.new_ones(self.read_and_made_by.shape[2] - 1 + self.line_count)

    def _all_gates(self, gates: Tensor) -> Tensor:
        """The values of all original gates in float64; removed gates are 0."""
        if self.remaining_positions is None:
            return gates.double()
        return _append(gates.double(), 0)[self.remaining_positions]

    def _formula_probabilities(self, gates: Tensor, uncut: Tensor) -> Tensor:
        """The probability of each formula; ``uncut`` is 0 for the axes and lines that are cut."""
        values = gates
        if len(self.conditional_gates):
            conditions = uncut[..., self.condition_axes].amax(-1)
            conditional = _append(gates, 1)[self.conditional_gates] * conditions
            values = torch.cat([conditional, gates.expand(*uncut.shape[:-1], -1)], -1)
        if len(self.clauses):
            clauses = _any_probability(_append(values, 0)[..., self.clauses])
            values = torch.cat([clauses, values], -1)
        return _product(_append(values, 1)[..., self.formulas])

    def _set_moments(self, formulas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For each index set the mean count, for each pair the covariance, and P(not empty)."""
        kinds = formulas[..., self.index_formulas]
        covariance = kinds.new_zeros(*kinds.shape[:-1], 0)
        if len(self.set_pairs):
            per_kind = kinds * (1 - formulas[..., self.unit_formulas])
            covariance = (per_kind @ self.kind_counts.T)[..., self.set_pairs[:, 1]]
        nonempty = _any_probability(_append(kinds, 0)[..., self.kinds_of_set])
        return kinds @ self.kind_counts.T, covariance, nonempty

    def _cases(self, gates: Tensor) -> tuple[Tensor, Tensor]:
        """The probability of each case, and for each index set 1[not empty] / P(not empty).

        In a case each group in doubt is empty, or not. The second result turns a mean into a mean
        given the case.
        """
        gates = self._all_gates(gates)
        formulas = self._formula_probabilities(gates, self._nothing_cut(gates))
        nonempty = self._set_moments(formulas)[2]
        is_whole = self.whole_set == torch.arange(len(nonempty), device=nonempty.device)
        doubt = torch.where(is_whole, nonempty * (1 - nonempty), -1.0).detach()
        if _values_unreadable(doubt):
            doubtful_count = MAX_DOUBTFUL_GROUPS_COMPILED
        else:
            doubtful_count = int((doubt > MIN_DOUBT).sum())
        doubtful_count = min(self.max_doubtful, doubtful_count)
        doubtful = doubt.topk(doubtful_count).indices
        bits = torch.arange(doubtful_count, device=nonempty.device)
        cases = torch.arange(2**doubtful_count, device=nonempty.device)
        is_nonempty = (cases[:, None] >> bits) & 1
        probability = nonempty[doubtful]
        weights = torch.where(is_nonempty > 0, probability, 1 - probability).unbind(1)
        ones = nonempty.new_ones(len(cases), len(nonempty))
        scales = is_nonempty / probability.clamp(min=MIN_DIVISOR)
        conditioning = ones.index_copy(1, doubtful, scales)
        conditioning = conditioning[:, self.whole_set]
        return reduce(torch.mul, weights, nonempty.new_ones(len(cases))), conditioning

    def _total_cost(
        self, sizes: Tensor, selected: Tensor, covariance: Tensor, state: "SetState"
    ) -> Tensor:
        """The sum of all terms, by kind of cost; there may be several cases."""
        quantities = [sizes]
        if len(self.set_pairs):
            quantities.append(covariance * state.connected[..., self.set_pairs[:, 1]])
        if self.has_selection:  # a layer that selects all inputs stores no indices
            stored = selected - self._mean_if_all_selected(state.formulas)
            quantities.append(stored.clamp(min=0))
        values = _append(torch.cat(quantities, -1), 1)
        products = _product(values[..., self.term_factors])
        return self.constant_cost + products @ self.term_prices.T

    def _axis_sizes(
        self,
        counts: Tensor,
        nonempty: Tensor,
        connected: Tensor,
        idle: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The size of each axis, and the number of indices that it selects if it selects.

        An empty group keeps one unit. A layer that would select nothing keeps all its inputs.
        """
        scale = connected / torch.maximum(nonempty, connected).clamp(min=MIN_DIVISOR)
        empty = 1 - torch.minimum(nonempty, connected)[..., : self.unit_widths.shape[1]]
        from_sets, kept_units = self._sizes_from_counts(counts * scale), empty @ self.unit_widths.T
        sizes = from_sets + kept_units
        if not self.has_selection:
            return sizes, sizes.new_zeros(0)
        arriving, has_any = sizes[..., self.arriving_axes], from_sets > MIN_EXPECTED_COUNT
        selects = has_any & (arriving - sizes > MIN_EXPECTED_COUNT)
        selected = torch.where(selects, sizes, 0.0)
        sizes = torch.where(has_any, sizes, arriving)
        if idle is None:
            return sizes, selected
        idle_probability, idle_sizes = idle
        axes = self.idle_axes
        mean = from_sets[..., axes] + (1 - idle_probability) * kept_units[..., axes]
        mean = mean + idle_probability * idle_sizes
        return sizes.index_copy(-1, axes, mean), selected

    def _sizes_from_counts(self, counts: Tensor) -> Tensor:
        """S_a = c_a + sum_s t_as n_s."""
        return self.fixed_counts + counts @ self.set_multiples.T

    def to(self, device: torch.device) -> "Ledger":
        """The same ledger on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {k: v.to(device) for k, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class SetState:
    """The state of the index sets; with cases, its tensors have a dimension of cases first.

    Args:
        formulas: the probability of each formula.
        mean_count: n_s, the mean number of indices in each index set.
        covariance: Cov(n_s, n_r) for each of the ledger's ``set_pairs``.
        nonempty: the probability that each index set is not empty.
        connected: whether something reads and something makes the units of each index set.
        uncut: 0 for each axis and line that is cut off, else 1.
    """

    formulas: Tensor
    mean_count: Tensor
    covariance: Tensor
    nonempty: Tensor
    connected: Tensor
    uncut: Tensor


def _values_unreadable(values: Tensor) -> bool:
    """Whether code may not branch on these values: on meta, compiled, or in a CUDA graph."""
    if values.is_meta or torch.compiler.is_compiling():
        return True
    return values.is_cuda and torch.cuda.is_current_stream_capturing()


def _append(values: Tensor, last: float) -> Tensor:
    """Append a number along the last dimension, where the index -1 reads it."""
    return torch.cat([values, values.new_full((*values.shape[:-1], 1), last)], -1)


def _pair_products(numbers: Tensor, pairs: Tensor) -> Tensor:
    """The product of the two numbers of each pair."""
    return numbers[..., pairs[:, 0]] * numbers[..., pairs[:, 1]]


def _product(values: Tensor) -> Tensor:
    """The product over the last dimension, whose size is a power of two.

    By halves, because the backward of torch.prod synchronizes with the device.
    """
    while values.shape[-1] > 1:
        first, second = values.chunk(2, -1)
        values = first * second
    return values.squeeze(-1)


def _any_probability(values: Tensor) -> Tensor:
    """1 - prod(1 - p) over the last dimension: the probability that at least one holds.

    Exact for small p, and with the right gradient for p of 0 and 1 too.
    """
    certain = values >= 1
    certain_count = certain.sum(-1)
    log_no_other = torch.log1p(-values.masked_fill(certain, 0.0)).sum(-1)
    certain_lack = torch.where(certain, 1 - values, 0.0).sum(-1)  # 0, kept for its gradient
    if_certain = 1 - log_no_other.exp() * torch.where(certain_count == 1, certain_lack, 0.0)
    return torch.where(certain_count > 0, if_certain, -torch.expm1(log_no_other))
