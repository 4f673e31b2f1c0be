"""Write the ledger of a model: its formulas, index sets, sizes and terms."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.cost.count import count
from hardconcrete.cost.index_sets import NO_GROUP, IndexSets, Row
from hardconcrete.cost.key_values import key_values
from hardconcrete.cost.ledger import Ledger
from hardconcrete.cost.liveness_formulas import EACH, Element
from hardconcrete.cost.ragged import concatenate_tables, pad_rows, repeat_to_width
from hardconcrete.graph.propagate import first_names, named_tensors
from hardconcrete.graph.trace import at_least_two_examples
from hardconcrete.units import Analysis
from hardconcrete.units.analysis import batch_of
from hardconcrete.units.axis import Place

INDEX_BYTES = 8
"""Bytes of one index in a layer that selects its inputs."""

MAX_DOUBTFUL_GROUPS = 12
"""The largest number of groups in doubt for which a mean distinguishes cases."""

MAX_TABLE_NUMBERS = 1 << 24
"""The largest table of a mean: numbers of the ledger's largest table, times cases."""


def write_ledger(
    model: nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    gates: Mapping[Place, Tensor],
    analysis: Analysis | None = None,
    may_empty: Collection[str] = (),
) -> Ledger:
    """Write the ledger of a model, which gives its cost for any gates.

    Args:
        model: the model without gates.
        example: positional and keyword inputs. Multiply-adds are counted for these.
        gates: for each gated axis the number of the gate of each index, or -1; under ``EACH``, for
            a parameter with gates on single weights, the number of the gate of each weight.
        analysis: the analysis of the model for this example, if you have it.
        may_empty: names of groups that may lose all units. Others keep one.

    Example:
        >>> import torch
        >>> layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        >>> gates = {("2.weight", 1): torch.tensor([0, 1, 2])}
        >>> example = (torch.zeros(2, 4),), {}
        >>> ledger = write_ledger(torch.nn.Sequential(*layers), example, gates)
        >>> ledger.cost(torch.tensor([1, 0, 1])).tolist()     # layers 4-2-2, two examples
        [16.0, 24.0, 64.0, 0.0]
        >>> ledger.cost(torch.tensor([0.5, 0.5, 0.5])).tolist()    # if all close, one stays
        [13.375, 19.5, 53.5, 0.0]
    """
    return LedgerWriter(model, example, gates, analysis, may_empty).ledger()


class LedgerWriter(IndexSets):
    """Collects the index sets and terms of a model and makes the tables of its ledger."""

    def ledger(self) -> Ledger:
        """Make the ledger."""
        self.pairs: dict[tuple[int, int], int] = {}
        self.terms: list[tuple[tuple[float, ...], list[tuple[str, int]]]] = []
        dense = count(self.model, *self.example)
        self._add_tensor_terms()
        rest = dense.macs - self._add_contraction_terms(dense.macs)
        kv_bytes = self._add_key_value_terms(dense.kv_bytes)
        ledger = Ledger(
            dense=_numbers([[dense.params, dense.macs, dense.weight_bytes, kv_bytes]])[0],
            constant_cost=_numbers([[0.0, rest, 0.0, kv_bytes - kv_bytes]])[0],
            **self._weight_tables(),
            **self._formula_tables(),
            **self._size_tables(),
            **self._selection_tables(),
            gate_kinds=self._gate_kinds(),
            **self._connection_tables(),
            **self._term_tables(),
        )
        tables = [ledger.read_and_made_by, ledger.contains_set, ledger.term_factors]
        if len(ledger.conditional_gates):  # formulas then have other values in each case
            tables += [
                ledger.clauses,
                ledger.formulas,
                ledger.kinds_of_set,
                ledger.weight_unit_formulas,
            ]
        largest = max(table.numel() for table in tables)
        affordable = max(1, MAX_TABLE_NUMBERS // max(largest, 1)).bit_length() - 1
        return replace(
            ledger, max_doubtful=min(ledger.max_doubtful, MAX_DOUBTFUL_GROUPS, affordable)
        )

    def _add_tensor_terms(self) -> None:
        """Add terms for the parameters and buffers, and for the indices that layers select."""
        first = first_names(self.model)
        for name, tensor in named_tensors(self.model).items():
            if first[name] == name:
                dims = [d for d in range(tensor.dim()) if (name, d) in self.arriving]
                entries = tensor.numel() / math.prod(tensor.shape[d] for d in dims)
                params = entries if isinstance(tensor, nn.Parameter) else 0.0
                prices = params, 0.0, entries * tensor.element_size(), 0.0
                self._add_terms(prices, [self._kept((name, d)) for d in dims])
        for row in self.selected.values():
            self.terms.append(((0.0, 0.0, INDEX_BYTES, 0.0), [("selects", self.rows[row])]))

    def _add_contraction_terms(self, dense: int) -> float:
        """Add terms for the multiply-adds of all contractions, and return how many those are.

        A batch of one is traced as a batch of two, so the counts of the trace are scaled.
        """
        contractions = self.labelled.state.contractions
        traced = at_least_two_examples(self.example)
        macs = dense if traced is self.example else count(self.model, *traced).macs
        share = dense / max(macs, 1)
        for contraction in contractions:
            parts = [self.labelled.state.labels.find(part).flatten() for part in contraction.parts]
            rows = [self._row(part) for part in parts]
            macs_each = share * contraction.macs / math.prod(map(len, parts))
            for place, row in self._selected_in(contraction.module):
                roots = self.relations.roots[place]
                matches = [k for k, part in enumerate(parts) if torch.equal(part, roots)]
                if matches:
                    rows[matches[0]] = row
                else:  # parts lack an axis whose indices are no units
                    macs_each /= len(roots)
                    rows.append(row)
            self._add_terms((0.0, macs_each, 0.0, 0.0), rows)
        return share * sum(contraction.macs for contraction in contractions)

    def _add_key_value_terms(self, dense: int | None) -> float:
        """Add terms for keys and values, and return their bytes per token.

        NaN where they are unclear, or where the trace has others than ``count`` found.
        """
        known, labels = key_values(self.labelled)
        examples = batch_of(self.labelled)
        if dense is None or known.bytes_per_token(examples) != dense:
            return math.nan
        for source, positions in known.found.items():
            parts = labels[source.tensor].components if source.tensor in labels else ()
            roots = [self.labelled.state.labels.find(part.labels).flatten() for part in parts]
            price = source.bytes / (examples * positions) / math.prod(map(len, roots))
            self._add_terms((0.0, 0.0, 0.0, price), [self._row(each) for each in roots])
        return dense

    def _add_terms(self, prices: tuple[float, ...], rows: Sequence[Row]) -> None:
        """Add a product of sizes, and the covariances of sizes that depend on the same group."""
        sizes = [("size", self.rows[row]) for row in rows]
        self.terms.append((prices, sizes))
        for (i, first), (j, second) in combinations(enumerate(rows), 2):
            rest = [size for k, size in enumerate(sizes) if k not in (i, j)]
            for a, m in first.index_sets:
                for b, n in second.index_sets:
                    group = self.index_sets[a].group
                    if group == self.index_sets[b].group != NO_GROUP:
                        pair = min(a, b), max(a, b)  # the whole group has the smaller number
                        covariance = "covariance", self.pairs.setdefault(pair, len(self.pairs))
                        self.terms.append((tuple(m * n * p for p in prices), [covariance, *rest]))

    def _weight_tables(self) -> dict[str, Any]:
        """For each gated single weight the formulas of the units it connects, and its lines."""
        first_line, lines = len(self.alive.places), [*self.alive.lines.items()]
        parts = [(numbers, name) for (name, dim), numbers in self.gates.items() if dim == EACH]
        tables = []
        for numbers, name in parts:
            index = torch.ones_like(numbers).nonzero().T
            formulas, positions = [], []
            for (_, dim), line in (entry for entry in lines if entry[0][0] == name):
                roots = self.relations.roots[name, dim].tolist()
                units = [self._number(self.alive.unit(root)) for root in roots]
                formulas.append(torch.tensor(units)[index[dim]])
                positions.append(index[dim] + line - first_line)
            if formulas:  # a parameter without units has none
                tables.append(
                    (numbers.flatten(), torch.stack(formulas, 1), torch.stack(positions, 1))
                )
        return {
            "weight_gates": torch.cat(
                [numbers for numbers, _, _ in tables] or [torch.zeros(0, dtype=torch.int64)]
            ),
            "weight_unit_formulas": concatenate_tables([formulas for _, formulas, _ in tables]),
            "weight_lines": concatenate_tables([positions for _, _, positions in tables]),
            "line_count": self.alive.numbers - first_line,
        }

    def _gate_kinds(self) -> Tensor:
        """A number for each gate; gates of the same groups at the same places share a number."""
        gated = defaultdict[int, list[tuple[Place, int]]](list)
        for place, numbers in self.gates.items():
            if place[1] != EACH:
                roots = self.relations.roots[place].tolist()
                for root, gate in zip(roots, numbers.tolist(), strict=True):
                    gated[gate].append((place, self.group_of.get(root, NO_GROUP)))
        kinds = {kind: k for k, kind in enumerate(dict.fromkeys(map(tuple, gated.values())))}
        last = max((int(numbers.max()) for numbers in self.gates.values()), default=-1)
        return torch.tensor([kinds.get(tuple(gated[gate]), NO_GROUP) for gate in range(last + 1)])

    def _selection_tables(self) -> dict[str, Any]:
        """Layers that can be idle: none of the inputs that other layers read is selected."""
        cuts, idle_sets, idle_axes = [], [], []
        formulas = list(self.formulas)
        for place, row in self.selected.items():
            needs = {need for k, _ in row.index_sets for need, _ in self.index_sets[k].indices}
            conditional = any(at for need in needs for clause in formulas[need] for _, at in clause)
            if conditional and not row.base:
                idle_axes.append(self.rows[row])
                idle_sets.append([k for k, _ in row.index_sets])
                cut = torch.ones(self.alive.numbers, dtype=torch.float64)
                start, size = self.alive.places.index(place), 1
                if place in self.alive.lines:
                    start, size = self.alive.lines[place], len(self.relations.roots[place])
                cut[start : start + size] = 0
                cuts.append(cut)
        no_cuts = torch.ones(0, self.alive.numbers)
        return {
            "has_selection": bool(self.selected),
            "idle_axes": torch.tensor(idle_axes, dtype=torch.int64),
            "idle_sets": pad_rows(idle_sets),
            "idle_cuts": torch.stack(cuts) if cuts else no_cuts,
        }

    def _conditional_elements(self) -> list[Element]:
        """The elements of clauses that count only under a condition."""
        elements = (e for formula in self.formulas for clause in formula for e in clause)
        return list(dict.fromkeys(element for element in elements if element[1]))

    def _formula_tables(self) -> dict[str, Any]:
        """Formulas and index sets. A clause of one element is that element."""
        clauses = dict.fromkeys(clause for formula in self.formulas for clause in formula)
        several = [clause for clause in clauses if len(clause) > 1]
        conditional = self._conditional_elements()
        place = {element: k for k, element in enumerate(conditional)}
        number = {
            clause: sorted(place.get(element, len(conditional) + element[0]) for element in clause)
            for clause in clauses
        }
        first = {clause: k for k, clause in enumerate(several)}
        kinds = list(
            dict.fromkeys(kind for index_set in self.index_sets for kind in index_set.indices)
        )
        counts = self._kind_counts(kinds)
        wholes = [k if s.group == NO_GROUP else s.group for k, s in enumerate(self.index_sets)]
        return {
            "whole_set": torch.tensor(wholes, dtype=torch.int64),
            "max_doubtful": len(set(wholes)),
            "conditional_gates": torch.tensor([gate for gate, _ in conditional], dtype=torch.int64),
            "condition_axes": repeat_to_width([sorted(at) for _, at in conditional]),
            "clauses": pad_rows([number[clause] for clause in several]),
            "formulas": pad_rows(
                [
                    [first.get(clause, len(several) + number[clause][0]) for clause in formula]
                    for formula in self.formulas
                ]
            ),
            "index_formulas": torch.tensor([need for need, _ in kinds], dtype=torch.int64),
            "unit_formulas": torch.tensor([host for _, host in kinds], dtype=torch.int64),
            "kind_counts": counts,
            "kinds_of_set": pad_rows([row.nonzero().flatten().tolist() for row in counts]),
        }

    def _kind_counts(self, kinds: Sequence[tuple[int, int]]) -> Tensor:
        """How many indices of each kind every index set has."""
        column = {kind: k for k, kind in enumerate(kinds)}
        counts = torch.zeros(len(self.index_sets), len(kinds), dtype=torch.float64)
        for k, index_set in enumerate(self.index_sets):
            for kind, n in Counter(index_set.indices).items():
                counts[k, column[kind]] = n
        return counts

    def _size_tables(self) -> dict[str, Any]:
        """The sizes of all axes, from index sets."""
        rows, index_sets = len(self.rows), len(self.index_sets)
        multiples = torch.zeros(rows, index_sets, dtype=torch.float64)
        for row, number in self.rows.items():
            for index_set, n in row.index_sets:
                multiples[number, index_set] = n
        arriving = torch.arange(rows)
        for place, row in self.selected.items():
            arriving[self.rows[row]] = self.rows[self.arriving[place]]
        base = torch.tensor([row.base for row in self.rows], dtype=torch.float64)
        return {
            "fixed_counts": base,
            "set_multiples": multiples,
            "contains_set": (torch.cat([multiples, base[:, None]], 1) > 0).double(),
            "unit_widths": multiples[arriving, : len(self.units_kept)] * self.units_kept,
            "arriving_axes": arriving,
            "group_of_set": torch.tensor([s.group for s in self.index_sets], dtype=torch.int64),
        }

    def _connection_tables(self) -> dict[str, Any]:
        """The axes of gated parameters that read and make each group."""
        places = self.alive.places
        sources = torch.zeros(2, len(self.groups), len(places) + 1, dtype=torch.float64)
        readers, makers = sources
        for k, (first, *_) in enumerate(self.groups):
            makers[k, -1] = float(first in self.relations.zero_lost)
            for place, roots in self.relations.roots.items():
                column = places.index(place) if place in places else -1
                if first in self.relations.read.get(place, ()):
                    readers[k, column] = 1
                if first in roots and first not in self.relations.only_read(place):
                    makers[k, column] = 1
        sources[..., -1] += sources.sum(2) == 0
        others = [
            [
                self.apart.get(place, self.arriving[place])
                for place in places
                if place[0] == name and place[1] != dim
            ]
            for name, dim in places
        ]
        numbers = [[self.rows[row] for row in rows] for rows in others]
        rounds = self._liveness_rounds(others, sources) + len(self.alive.lines)
        return {
            "other_axes": pad_rows(numbers),
            "read_and_made_by": sources,
            "liveness_rounds": rounds,
        }

    def _liveness_rounds(self, others: Sequence[Sequence[Row]], sources: Tensor) -> int:
        """How many groups, or axes whose indices are removed one by one, can empty in a row."""
        always = self.formulas.get(frozenset())
        all_gated = [
            all(need != always for need, _ in index_set.indices) for index_set in self.index_sets
        ]
        removable = set[int]()
        while True:

            def can_empty(row: Row, removed: set[int] = removable) -> bool:
                index_sets = [k for k, _ in row.index_sets]
                return not row.base and all(
                    all_gated[k] or self.index_sets[k].group in removed for k in index_sets
                )

            stays = torch.tensor([not any(map(can_empty, rows)) for rows in others] + [True])
            connected = (sources.bool() & stays).any(2).all(0)  # something reads and makes it
            now = set((~connected).nonzero().flatten().tolist())
            if now == removable:
                return int((~stays).sum()) if self._conditional_elements() else len(removable)
            removable = now

    def _term_tables(self) -> dict[str, Any]:
        start = {
            "size": 0,
            "covariance": len(self.rows),
            "selects": len(self.rows) + len(self.pairs),
        }
        factors = [[start[kind] + k for kind, k in term] for _, term in self.terms]
        prices = _numbers([prices for prices, _ in self.terms]).T
        pairs = torch.tensor([*self.pairs], dtype=torch.int64).view(-1, 2)
        return {"term_factors": pad_rows(factors), "term_prices": prices, "set_pairs": pairs}


def _numbers(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
