"""The ledger of a model, written once: formulas, strands, sizes and terms."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from hardconcrete.cost.count import count
from hardconcrete.cost.index_sets import NOBODY, IndexSets, Row
from hardconcrete.cost.ledger import KINDS, Ledger
from hardconcrete.cost.liveness_formulas import EACH, Element
from hardconcrete.cost.ragged import filled, joined, padded
from hardconcrete.graph.propagate import LabelledGraph, first_names, named_tensors
from hardconcrete.graph.trace import at_least_two_examples
from hardconcrete.units.group import Place

INDEX_BYTES = 8
"""Memory of one index that a layer selects its inputs by."""

CASES = 12
"""Groups that are in doubt together, at most, where a mean is taken."""

ROOM = 1 << 24
"""Numbers that their cases may take, for each table of the ledger."""


def write_ledger(
    model: nn.Module,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    gates: Mapping[Place, Tensor],
    found: LabelledGraph | None = None,
) -> Ledger:
    """All that is needed to know what a model costs when some gates are shut.

    Args:
        model: without gates.
        example: positional and keyword inputs, which multiply-adds are counted for.
        gates: for the axes that are gated, the number of the gate of every index, or -1; for a
            parameter with gates on single weights, under ``EACH``, that of each.
        found: what a walk over the model found, if it is known.

    Example:
        >>> import torch
        >>> layers = torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)
        >>> gates = {("2.weight", 1): torch.tensor([0, 1, 2])}
        >>> example = (torch.zeros(2, 4),), {}
        >>> ledger = write_ledger(torch.nn.Sequential(*layers), example, gates)
        >>> ledger.cost(torch.tensor([1, 0, 1])).tolist()     # of 4-2-2, for two examples
        [16.0, 24.0, 64.0]
        >>> ledger.cost(torch.tensor([0.5, 0.5, 0.5])).tolist()    # once in eight times one is kept
        [13.375, 19.5, 53.5]
    """
    return LedgerWriter(model, example, gates, found).ledger()


class LedgerWriter(IndexSets):
    """All that is found of a model, and how it is written down."""

    def ledger(self) -> Ledger:
        """Everything, as tensors."""
        self.pairs: dict[tuple[int, int], int] = {}
        self.terms: list[tuple[tuple[float, ...], list[tuple[str, int]]]] = []
        dense = count(self.model, *self.example)
        self._note_tensors()
        rest = dense.macs - self._note_contractions(dense.macs)
        ledger = Ledger(
            dense=_numbers([[getattr(dense, kind) for kind in KINDS]])[0],
            constant=_numbers([[0.0, rest, 0.0]])[0],
            **self._each(),
            **self._needs(),
            **self._sizes(),
            **self._idle(),
            alike=self._alike(),
            **self._reach(),
            **self._factors(),
        )
        tables = [ledger.sources, ledger.holds, ledger.factors]
        if len(ledger.tied):  # what a unit needs is another thing in every case
            tables += [ledger.clauses, ledger.formulas, ledger.kinds, ledger.ends]
        largest = max(table.numel() for table in tables)
        room = max(1, ROOM // max(largest, 1)).bit_length() - 1
        return replace(ledger, cases=min(ledger.cases, CASES, room))

    def _note_tensors(self) -> None:
        """Terms of all parameters and buffers, and of the indices that layers select."""
        first = first_names(self.model)
        for name, tensor in named_tensors(self.model).items():
            if first[name] == name:
                dims = [d for d in range(tensor.dim()) if (name, d) in self.arriving]
                each = tensor.numel() / prod(tensor.shape[d] for d in dims)
                counted = each if isinstance(tensor, nn.Parameter) else 0.0
                prices = counted, 0.0, each * tensor.element_size()
                self._note(prices, [self._kept((name, d)) for d in dims])
        for row in self.selected.values():
            self.terms.append(((0.0, 0.0, INDEX_BYTES), [("selects", self.rows[row])]))

    def _note_contractions(self, dense: int) -> float:
        """Terms of all multiply-adds, which are returned; one example was traced as two."""
        contractions = self.walk.state.contractions
        traced = at_least_two_examples(self.example)
        macs = dense if traced is self.example else count(self.model, *traced).macs
        share = dense / max(macs, 1)
        for contraction in contractions:
            parts = [self.walk.state.labels.find(part).flatten() for part in contraction.parts]
            rows = [self._row(part) for part in parts]
            each = share * contraction.macs / prod(map(len, parts))
            for place, row in self._selected_in(contraction.module):
                roots = self.relations.roots[place]
                at = [k for k, part in enumerate(parts) if torch.equal(part, roots)]
                if at:
                    rows[at[0]] = row
                else:  # what is no unit is no part either
                    each /= len(roots)
                    rows.append(row)
            self._note((0.0, each, 0.0), rows)
        return share * sum(contraction.macs for contraction in contractions)

    def _note(self, prices: tuple[float, ...], rows: Sequence[Row]) -> None:
        """A product of sizes, and what its mean has more where two are sums over the same units."""
        sizes = [("size", self.rows[row]) for row in rows]
        self.terms.append((prices, sizes))
        for (i, first), (j, second) in combinations(enumerate(rows), 2):
            rest = [size for k, size in enumerate(sizes) if k not in (i, j)]
            for a, m in first.index_sets:
                for b, n in second.index_sets:
                    group = self.index_sets[a].group
                    if group == self.index_sets[b].group != NOBODY:
                        pair = min(a, b), max(a, b)  # whole groups come first
                        spread = "spread", self.pairs.setdefault(pair, len(self.pairs))
                        self.terms.append((tuple(m * n * p for p in prices), [spread, *rest]))

    def _each(self) -> dict[str, Any]:
        """The units at the ends of every single weight that has a gate, and its lines."""
        first, every = len(self.alive.places), [*self.alive.lines.items()]
        parts = [(numbers, name) for (name, dim), numbers in self.gates.items() if dim == EACH]
        tables = []
        for numbers, name in parts:
            index = torch.ones_like(numbers).nonzero().T
            ends, at = [], []
            for (_, dim), line in (one for one in every if one[0][0] == name):
                roots = self.relations.roots[name, dim].tolist()
                units = [self._number(self.alive.unit(root)) for root in roots]
                ends.append(torch.tensor(units)[index[dim]])
                at.append(index[dim] + line - first)
            if ends:  # else it has no units
                tables.append((numbers.flatten(), torch.stack(ends, 1), torch.stack(at, 1)))
        return {
            "each": torch.cat(
                [numbers for numbers, _, _ in tables] or [torch.zeros(0, dtype=torch.int64)]
            ),
            "ends": joined([ends for _, ends, _ in tables]),
            "at": joined([at for _, _, at in tables]),
            "lines": self.alive.numbers - first,
        }

    def _alike(self) -> Tensor:
        """A number for every gate: the same where it gates units of the same groups alike."""
        stands = defaultdict[int, list[tuple[Place, int]]](list)
        for place, numbers in self.gates.items():
            if place[1] != EACH:
                roots = self.relations.roots[place].tolist()
                for root, gate in zip(roots, numbers.tolist(), strict=True):
                    stands[gate].append((place, self.group_of.get(root, NOBODY)))
        kinds = {kind: k for k, kind in enumerate(dict.fromkeys(map(tuple, stands.values())))}
        most = max((int(numbers.max()) for numbers in self.gates.values()), default=-1)
        return torch.tensor([kinds.get(tuple(stands[gate]), NOBODY) for gate in range(most + 1)])

    def _idle(self) -> dict[str, Any]:
        """Layers that can be left without inputs which are there for others."""
        cuts, idle, idles = [], [], []
        formulas = list(self.formulas)
        for place, row in self.selected.items():
            needs = {need for k, _ in row.index_sets for need, _ in self.index_sets[k].indices}
            tied = any(at for need in needs for clause in formulas[need] for _, at in clause)
            if tied and not row.base:
                idles.append(self.rows[row])
                idle.append([k for k, _ in row.index_sets])
                cut = torch.ones(self.alive.numbers, dtype=torch.float64)
                start, size = self.alive.places.index(place), 1
                if place in self.alive.lines:
                    start, size = self.alive.lines[place], len(self.relations.roots[place])
                cut[start : start + size] = 0
                cuts.append(cut)
        found = torch.stack(cuts) if cuts else torch.ones(0, self.alive.numbers)
        rows = torch.tensor(idles, dtype=torch.int64)
        selecting = bool(self.selected)
        return {"selecting": selecting, "idles": rows, "idle": padded(idle), "cuts": found}

    def _tied(self) -> list[Element]:
        """What does not always count."""
        found = (e for formula in self.formulas for clause in formula for e in clause if e[1])
        return list(dict.fromkeys(found))

    def _needs(self) -> dict[str, Any]:
        """Clauses of several elements come first; then every element is one."""
        clauses = dict.fromkeys(clause for formula in self.formulas for clause in formula)
        wide = [clause for clause in clauses if len(clause) > 1]
        tied = self._tied()
        place = {element: k for k, element in enumerate(tied)}
        number = {
            clause: sorted(place.get(element, len(tied) + element[0]) for element in clause)
            for clause in clauses
        }
        first = {clause: k for k, clause in enumerate(wide)}
        kinds = list(
            dict.fromkeys(kind for index_set in self.index_sets for kind in index_set.indices)
        )
        column = {kind: k for k, kind in enumerate(kinds)}
        members = torch.zeros(len(self.index_sets), len(kinds), dtype=torch.float64)
        for k, index_set in enumerate(self.index_sets):
            for kind, n in Counter(index_set.indices).items():
                members[k, column[kind]] = n
        wholes = [k if s.group == NOBODY else s.group for k, s in enumerate(self.index_sets)]
        return {
            "wholes": torch.tensor(wholes, dtype=torch.int64),
            "cases": len(set(wholes)),
            "tied": torch.tensor([gate for gate, _ in tied], dtype=torch.int64),
            "stands": filled([sorted(at) for _, at in tied]),
            "clauses": padded([number[clause] for clause in wide]),
            "formulas": padded(
                [
                    [first.get(clause, len(wide) + number[clause][0]) for clause in formula]
                    for formula in self.formulas
                ]
            ),
            "needs": torch.tensor([need for need, _ in kinds], dtype=torch.int64),
            "hosts": torch.tensor([host for _, host in kinds], dtype=torch.int64),
            "members": members,
            "kinds": padded([row.nonzero().flatten().tolist() for row in members]),
        }

    def _sizes(self) -> dict[str, Any]:
        rows, index_sets = len(self.rows), len(self.index_sets)
        times = torch.zeros(rows, index_sets, dtype=torch.float64)
        for row, number in self.rows.items():
            for index_set, n in row.index_sets:
                times[number, index_set] = n
        arriving = torch.arange(rows)
        for place, row in self.selected.items():
            arriving[self.rows[row]] = self.rows[self.arriving[place]]
        base = torch.tensor([row.base for row in self.rows], dtype=torch.float64)
        return {
            "base": base,
            "times": times,
            "holds": (torch.cat([times, base[:, None]], 1) > 0).double(),
            "spare": times[arriving, : self.never_empty],
            "arriving": arriving,
            "owners": torch.tensor([s.group for s in self.index_sets], dtype=torch.int64),
        }

    def _reach(self) -> dict[str, Any]:
        """Which axes of gated parameters read and make the groups; the last stands for others."""
        places = self.alive.places
        sources = torch.zeros(2, len(self.groups), len(places) + 1, dtype=torch.float64)
        readers, makers = sources
        for k, (first, *_) in enumerate(self.groups):
            makers[k, -1] = float(first in self.relations.disturbed)
            for place, roots in self.relations.roots.items():
                at = places.index(place) if place in places else -1
                if first in self.relations.read.get(place, ()):
                    readers[k, at] = 1
                if first in roots and first not in self.relations.only_read(place):
                    makers[k, at] = 1
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
        rounds = self._deaths(others, sources) + len(self.alive.lines)
        return {"others": padded(numbers), "sources": sources, "rounds": rounds}

    def _deaths(self, others: Sequence[Sequence[Row]], sources: Tensor) -> int:
        """Of how many groups, or axes where units go one by one, one death can follow another."""
        always = self.formulas.get(frozenset())
        gated = [
            all(need != always for need, _ in index_set.indices) for index_set in self.index_sets
        ]
        mortal = set[int]()
        while True:

            def empties(row: Row, dead: set[int] = mortal) -> bool:
                index_sets = [k for k, _ in row.index_sets]
                return not row.base and all(
                    gated[k] or self.index_sets[k].group in dead for k in index_sets
                )

            lasts = torch.tensor([not any(map(empties, rows)) for rows in others] + [True])
            ends = (sources.bool() & lasts).any(2).logical_not().any(0)  # unread, or unmade
            found = set(ends.nonzero().flatten().tolist())
            if found == mortal:
                return int((~lasts).sum()) if self._tied() else len(mortal)
            mortal = found

    def _factors(self) -> dict[str, Any]:
        start = {"size": 0, "spread": len(self.rows), "selects": len(self.rows) + len(self.pairs)}
        factors = [[start[kind] + k for kind, k in term] for _, term in self.terms]
        prices = _numbers([prices for prices, _ in self.terms]).T
        pairs = torch.tensor([*self.pairs], dtype=torch.int64).view(-1, 2)
        return {"factors": padded(factors), "prices": prices, "pairs": pairs}


def _numbers(rows: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
