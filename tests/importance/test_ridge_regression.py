"""The regression against least squares on a matrix that is written out."""

import pytest
import torch
from torch import Tensor

from hardconcrete.importance.ridge_regression import RidgeRegression, exact_products, solve_cost


def written_out(x: Tensor, y: Tensor, before: Tensor, ridge: float, intercept: bool) -> Tensor:
    """The weights [in] of one output, by lstsq of rows below which the ridge stands as rows."""
    if intercept:
        x, y = x - x.mean(0), y - y.mean()
    ridge_row = (ridge * x.square().mean() * len(x)) ** 0.5
    rows = torch.cat([x, ridge_row * torch.eye(x.shape[1], dtype=x.dtype)])
    targets = torch.cat([y, ridge_row * before])
    return torch.linalg.lstsq(rows, targets[:, None]).solution[:, 0]


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
def test_the_weights_are_those_of_least_squares(intercept: bool, scattered: bool) -> None:
    groups, inputs, outputs, ridge = 2, 6, 4, 0.03
    x = 3 + torch.randn(50, groups, inputs, dtype=torch.float64)
    y = torch.randn(50, groups, outputs, dtype=torch.float64) + x.sum(2, keepdim=True)
    before = torch.randn(groups, outputs, inputs, dtype=torch.float64)
    may_change = torch.rand(groups, outputs, inputs) < 0.7
    if not scattered:
        may_change = torch.tensor([True, True, False, True, True, False]).expand_as(before).clone()
        may_change[1, 2] = False
    before *= may_change
    regression = RidgeRegression(intercept=intercept)
    for x_part, y_part in zip(x.split(20), y.split(20), strict=True):
        regression.add(x_part, y_part)
    solution = regression.solve(before, may_change, ridge)
    missing = torch.zeros(())
    for group in range(groups):
        for output in range(outputs):
            chosen = may_change[group, output]
            expected = torch.zeros(inputs, dtype=torch.float64)
            expected[chosen] = written_out(
                x[:, group, chosen], y[:, group, output], before[group, output, chosen], ridge,
                intercept,
            )  # fmt: skip
            assert torch.allclose(solution.matrix[group, output], expected, atol=1e-9)
            products = x[:, group] @ expected
            rest = y[:, group, output] - products
            shift = rest.mean() if intercept else rest.new_zeros(())
            assert torch.allclose(solution.shift[group, output], shift, atol=1e-9)
            missing = missing + (rest - shift).square().mean()
    variance = (y - y.mean(0)).square() if intercept else y.square()
    assert abs(solution.unexplained - float(missing / variance.mean(0).sum())) < 1e-9


def test_a_large_mean_costs_no_digits() -> None:
    x = 1e4 + torch.randn(2000, 1, 4)
    weights = torch.tensor([[[1.0, -2.0, 3.0, 0.5]]])
    regression = RidgeRegression(intercept=True)
    for part in x.split(500):
        regression.add(part, ((part - 1e4).double() @ weights[0].T.double()).float())
    solution = regression.solve(torch.zeros(1, 1, 4), torch.ones(1, 1, 4).bool(), 1e-9)
    assert (solution.matrix - weights).abs().max() < 1e-3


def test_inputs_of_zero_keep_their_weights() -> None:
    regression, before = (
        RidgeRegression(intercept=True),
        torch.tensor([[[1.0, 2.0]]], dtype=torch.float64),
    )
    regression.add(torch.zeros(5, 1, 2), torch.ones(5, 1, 1))
    solution = regression.solve(before, before != 0, 1e-2)
    assert torch.allclose(solution.matrix, before)
    assert solution.shift.item() == 1
    assert solution.unexplained == 0


def test_numbers_that_are_not_finite_are_noticed() -> None:
    regression = RidgeRegression(intercept=False)
    regression.add(torch.tensor([[[1.0, torch.inf]]]), torch.ones(1, 1, 1))
    solution = regression.solve(torch.zeros(1, 1, 2), torch.ones(1, 1, 2).bool(), 1e-2)
    assert not solution.is_finite


def test_work_counts_each_set_of_inputs_once() -> None:
    may_change = torch.ones(3, 10, 20, dtype=torch.bool)
    assert solve_cost(may_change) == 3 * 20**3
    may_change[1, 4, 5] = False
    assert solve_cost(may_change) == 3 * 20**3 + 19**3
    assert solve_cost(torch.zeros(1, 2, 3, dtype=torch.bool)) == 0


def test_products_are_exact_and_settings_come_back() -> None:
    torch.set_float32_matmul_precision("medium")
    x = torch.randn(64, 64)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16), exact_products():
            product = x @ x
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert product.dtype == torch.float32
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert (product - x.double() @ x.double()).abs().max() < 1e-4
